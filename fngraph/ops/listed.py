"""The published tables of capture levels as data, under the names that they use, beside ours.

The documents that describe vLLM's graphs list levels of attention backends: a *table* in the design
document, and another in a *walk-through* of the code. They were written at different times, before
vLLM 0.33, whose declarations are ours wherever a backend is not shipped here.
"""

from __future__ import annotations

from typing import NamedTuple

from fngraph.core import Support
from fngraph.core.text import table
from fngraph.ops.paged.multi_head import ATTENTION
from fngraph.ops.shipped import ONE_TOKEN, UNIFORM


class Listed(NamedTuple):
    """One line of a published table.

    Attributes:
        name: as it is written there.
        where: "table" or "walk-through".
        level: that it has there.
        here: the backend of `fg.ops.attention` that the name stands for.
        why: how that comes to another level here; "" where it does not.
    """

    name: str
    where: str
    level: Support
    here: str
    why: str = ""

    @property
    def ours(self) -> Support:
        """The level here, of a plain configuration."""
        return ATTENTION.backend(self.here).level(None)


LISTED = (
    Listed("FlashAttention v2", "table", UNIFORM, "flash_attn"),
    Listed("FlashAttention v3", "table", Support.ALWAYS, "flash_attn_3"),
    Listed("Triton Attention", "table", Support.ALWAYS, "triton"),
    Listed("AITER FlashAttention", "table", UNIFORM, "AITER FlashAttention"),
    Listed("FlashInfer", "table", ONE_TOKEN, "flashinfer"),
    Listed("FlashMLA", "table", UNIFORM, "FlashMLA"),
    Listed("AITER MLA", "table", ONE_TOKEN, "AITER MLA",
           "vLLM 0.33 declares UNIFORM_BATCH, verify steps too"),
    Listed("CUTLASS MLA", "table", ONE_TOKEN, "CUTLASS MLA"),
    Listed("Mamba attention", "table", ONE_TOKEN, "Mamba",
           "vLLM 0.33 declares UNIFORM_BATCH; fg.ops.ssd runs on triton, ALWAYS"),
    Listed("FlashAttention 3", "walk-through", Support.ALWAYS, "flash_attn_3"),
    Listed("FlashAttention 2", "walk-through", UNIFORM, "flash_attn"),
    Listed("FlashInfer", "walk-through", Support.ALWAYS, "flashinfer",
           "the table says one token; vLLM 0.33 more where trtllm's kernels serve"),
    Listed("Triton", "walk-through", Support.NEVER, "triton",
           "the table says ALWAYS, and so does vLLM 0.33; ours take any mix"),
    Listed("MLA", "walk-through", UNIFORM, "Triton MLA"),
    Listed("GDN", "walk-through", ONE_TOKEN, "GDN",
           "vLLM 0.33 declares UNIFORM_BATCH; fg.ops.gated_delta runs on triton, ALWAYS"),
)  # fmt: skip
"""Unlisted backends are NEVER there; here a name that nobody knows is a `BackendError`."""

ATTENTION.aliases.update({one.name: one.here for one in LISTED if one.name != one.here})


class Levels(tuple[Listed, ...]):
    """Lines of the published tables; prints as a table, with the level here."""

    def __repr__(self) -> str:
        header = ("published as", "in the", "level there", "here", "level here", "because")
        return table(header, [(x.name, x.where, x.level, x.here, x.ours, x.why) for x in self])

    as_text = __repr__


def listed_levels() -> Levels:
    """The published tables of capture levels, each line beside what its name stands for here.

    `fg.ops.attention.level(name)` finds each of the names, and gives the level here.
    """
    return Levels(LISTED)
