"""The `triton` backends of the primitives over recurrent state. Triton is loaded on first use."""

from __future__ import annotations

from typing import Any

from fngraph.ops.convolution import CAUSAL_CONV
from fngraph.ops.delta_rule import GATED_DELTA
from fngraph.ops.state_space import SSD
from fngraph.ops.triton_backends import MULTIPLIED, backend


def supports(config: Any) -> str | None:
    """Why none of them can run a configuration, or None."""
    for what, dtype in (("tokens", config.dtype), ("states", config.state_dtype)):
        if dtype not in MULTIPLIED:
            return f"its {what} are float32, float16 or bfloat16, not {dtype}"
    for what in ("key_dim", "value_dim", "state_dim", "head_dim"):
        if getattr(config, what, 0) > 256:
            return f"its tiles hold a {what} up to 256, not {getattr(config, what)}"
    return None


for _primitive, _module, _function in (
    (GATED_DELTA, "triton_linear", "gated_delta"),
    (SSD, "triton_linear", "ssd"),
    (CAUSAL_CONV, "triton_convolution", "run"),
):
    _primitive.register(
        backend(_primitive.name, _module, supports, function=_function, preferred=True)
    )
