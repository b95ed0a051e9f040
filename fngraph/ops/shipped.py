"""Every backend of attention, registered: those that are shipped, and names with a level.

The `triton` backends of the primitives over recurrent state. Triton is loaded on first use.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fngraph.core import Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged import flash, flashinfer, flex, sdpa, varlen
from fngraph.ops.paged.latent import MLA
from fngraph.ops.paged.multi_head import ATTENTION
from fngraph.ops.primitives import Primitive, not_shipped
from fngraph.ops.recurrent.convolution import CAUSAL_CONV
from fngraph.ops.recurrent.delta_rule import GATED_DELTA
from fngraph.ops.recurrent.state_space import SSD
from fngraph.ops.triton import backends as triton
from fngraph.ops.triton.backends import MULTIPLIED, backend

ATTENTION.register(
    sdpa.BACKEND,
    varlen.BACKEND,
    flex.BACKEND,
    flash.FLASH_ATTN,
    flash.FLASH_ATTN_3,
    flashinfer.BACKEND,
    *triton.ATTENTION,
)
MLA.register(*triton.LATENT)


def published(name: str, level: Support, needs: str) -> Backend:
    """A backend of vLLM's that is not shipped here: a name with its level, to study."""
    return Backend(
        name,
        not_shipped(name),
        support=lambda config: level,
        options=("bidirectional", "sinks", "cache scales", "fp8 cache"),
        needs=needs,
        missing=lambda: "not shipped: its level alone is known",
        shipped=False,
    )


def register(primitives: Sequence[Primitive], *backends: Backend) -> None:
    """The same backends for several primitives."""
    for one in primitives:
        one.register(*backends)


# Source: vLLM 0.33 `get_cudagraph_support` of each builder
# all are attention's too, as in the field's own table, so that one name finds any of them
register(
    (ATTENTION,),
    published("ROCm attention", Support.ALWAYS, "ROCm"),
    published("AITER FlashAttention", Support.UNIFORM_BATCH, "ROCm, aiter"),
    published("TurboQuant", Support.UNIFORM_BATCH, "CUDA"),
    published("chunked local attention", Support.NEVER, "CUDA"),
    published("linear attention", Support.UNIFORM_SINGLE_TOKEN_DECODE, "CUDA"),
)
register(
    (ATTENTION, MLA),
    published("FlashMLA", Support.UNIFORM_BATCH, "CUDA, sm_90, flash_mla"),
    published("FlashAttention MLA", Support.UNIFORM_BATCH, "CUDA, sm_90, flash_attn_interface"),
    published("FlashInfer MLA", Support.ALWAYS, "CUDA, sm_100, flashinfer"),
    published("Triton MLA", Support.UNIFORM_BATCH, "CUDA"),
    published("AITER MLA", Support.UNIFORM_BATCH, "ROCm, aiter"),
    published("CUTLASS MLA", Support.UNIFORM_SINGLE_TOKEN_DECODE, "CUDA, sm_100"),
)
register((ATTENTION, SSD), published("Mamba", Support.UNIFORM_BATCH, "CUDA"))
register((ATTENTION, GATED_DELTA), published("GDN", Support.UNIFORM_BATCH, "CUDA"))


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
    (GATED_DELTA, "linear", "gated_delta"),
    (SSD, "linear", "ssd"),
    (CAUSAL_CONV, "convolution", "run"),
):
    _primitive.register(
        backend(_primitive.name, _module, supports, function=_function, preferred=True)
    )
