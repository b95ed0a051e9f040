"""Every backend of attention, registered: those that are shipped, and names with a level."""

from collections.abc import Sequence

from fngraph.core import Support
from fngraph.ops import (
    attention_flash,
    attention_flashinfer,
    attention_flex,
    attention_sdpa,
    attention_varlen,
    triton_backends,
)
from fngraph.ops.backend import Backend
from fngraph.ops.delta_rule import GATED_DELTA
from fngraph.ops.latent_attention import MLA
from fngraph.ops.listing import not_shipped
from fngraph.ops.paged_attention import ATTENTION
from fngraph.ops.primitive import Primitive
from fngraph.ops.state_space import SSD

ATTENTION.register(
    attention_sdpa.BACKEND,
    attention_varlen.BACKEND,
    attention_flex.BACKEND,
    attention_flash.FLASH_ATTN,
    attention_flash.FLASH_ATTN_3,
    attention_flashinfer.BACKEND,
    *triton_backends.ATTENTION,
)
MLA.register(*triton_backends.LATENT)


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
