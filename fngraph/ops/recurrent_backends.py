"""The `triton` backends of the primitives over recurrent state. Triton is loaded on first use."""

from __future__ import annotations

from typing import Any

import torch

from fngraph.core import Support
from fngraph.ops.convolution import CAUSAL_CONV
from fngraph.ops.delta_rule import GATED_DELTA
from fngraph.ops.primitive import Backend, Primitive
from fngraph.ops.state_space import SSD
from fngraph.ops.triton_backends import MULTIPLIED, loaded
from fngraph.ops.triton_launch import missing


def supports(config: Any) -> str | None:
    """Why none of them can run a configuration, or None."""
    for what, dtype in (("tokens", config.dtype), ("states", config.state_dtype)):
        if dtype not in MULTIPLIED:
            return f"its {what} are float32, float16 or bfloat16, not {dtype}"
    for what in ("key_dim", "value_dim", "state_dim", "head_dim"):
        if getattr(config, what, 0) > 256:
            return f"its tiles hold a {what} up to 256, not {getattr(config, what)}"
    return None


def _register(primitive: Primitive, module: str, function: str) -> None:
    def run(x: torch.Tensor, *args: Any, **options: Any) -> None:
        kernels = loaded(primitive.name, "triton", module, x.device.type)
        getattr(kernels, function)(x, *args, **options)

    primitive.register(
        Backend(
            "triton", run, lambda config: Support.ALWAYS, supports, needs="Triton, CUDA",
            missing=missing, preferred=lambda config: config.device == "cuda",
        )
    )  # fmt: skip


_register(GATED_DELTA, "triton_linear", "gated_delta")
_register(SSD, "triton_linear", "ssd")
_register(CAUSAL_CONV, "triton_convolution", "run")
