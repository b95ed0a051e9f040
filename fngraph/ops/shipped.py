"""Every backend, registered; and a table of those that are not shipped: names with a level.

The `triton` ones load Triton when one first runs.
"""

from __future__ import annotations

from typing import NamedTuple

from fngraph.core import Support
from fngraph.ops.backend import Backend
from fngraph.ops.paged import flash, flashinfer, gathered
from fngraph.ops.paged.latent import MLA
from fngraph.ops.paged.multi_head import ATTENTION
from fngraph.ops.primitives import Primitive
from fngraph.ops.recurrent.convolution import CAUSAL_CONV
from fngraph.ops.recurrent.delta_rule import GATED_DELTA
from fngraph.ops.recurrent.state_space import SSD
from fngraph.ops.triton import backends as triton
from fngraph.ops.varlen import FLASH, VARLEN

ATTENTION.register(
    gathered.SDPA, flash.VARLEN, gathered.FLEX, flash.FLASH_ATTN, flash.FLASH_ATTN_3,
    flashinfer.BACKEND, *triton.ATTENTION,
)  # fmt: skip
MLA.register(*triton.LATENT)
GATED_DELTA.register(triton.GATED_DELTA)
SSD.register(triton.SSD)
CAUSAL_CONV.register(triton.CAUSAL_CONV)
VARLEN.register(FLASH, triton.VARLEN)


class Published(NamedTuple):
    """A backend of vLLM's that is not shipped here: its level is known, to study.

    Attributes:
        primitives: that list it.
        needs: what it takes to run it.
    """

    name: str
    level: Support
    primitives: tuple[Primitive, ...]
    needs: str

    @property
    def backend(self) -> Backend:
        """One that can be lowered and not compiled."""
        return Backend(
            self.name,
            run=None,
            support=lambda config: self.level,
            options=next(iter(ATTENTION.backends.values())).options,
            needs=self.needs,
            missing=lambda: "not shipped: its level alone is known",
        )


# Source: vLLM 0.33 `get_cudagraph_support` of each builder
# all are attention's too, as in the field's own table, so that one name finds any of them
ONE_TOKEN, UNIFORM = Support.UNIFORM_SINGLE_TOKEN_DECODE, Support.UNIFORM_BATCH
PUBLISHED = (
    Published("ROCm attention", Support.ALWAYS, (ATTENTION,), "ROCm"),
    Published("AITER FlashAttention", UNIFORM, (ATTENTION,), "ROCm, aiter"),
    Published("TurboQuant", UNIFORM, (ATTENTION,), "CUDA"),
    Published("chunked local attention", Support.NEVER, (ATTENTION,), "CUDA"),
    Published("linear attention", ONE_TOKEN, (ATTENTION,), "CUDA"),
    Published("FlashMLA", UNIFORM, (ATTENTION, MLA), "CUDA, sm_90, flash_mla"),
    Published("FlashAttention MLA", UNIFORM, (ATTENTION, MLA), "CUDA, sm_90, flash_attn_interface"),
    Published("FlashInfer MLA", Support.ALWAYS, (ATTENTION, MLA), "CUDA, sm_100, flashinfer"),
    Published("Triton MLA", UNIFORM, (ATTENTION, MLA), "CUDA"),
    Published("AITER MLA", UNIFORM, (ATTENTION, MLA), "ROCm, aiter"),
    Published("CUTLASS MLA", ONE_TOKEN, (ATTENTION, MLA), "CUDA, sm_100"),
    Published("Mamba", UNIFORM, (ATTENTION, SSD), "CUDA"),
    Published("GDN", UNIFORM, (ATTENTION, GATED_DELTA), "CUDA"),
)
for _published in PUBLISHED:
    for _primitive in _published.primitives:
        _primitive.register(_published.backend)
