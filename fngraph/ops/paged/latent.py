"""Multi-head latent attention (MLA): a cache of one compressed row a token, shared by all heads.

Shape letters: T tokens, H heads, C = L + D columns of the cache: L of the latent (kv_lora_rank), D
of the rotated key. Queries come absorbed, already multiplied into latent space, and so the output
is in latent space too. Prefill goes by the same formula.

Source: DeepSeek-V2, 2024, section 2.1 and appendix C.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import PAGED, Shapes
from fngraph.ops.paged import reference
from fngraph.ops.paged.config import AttentionArgs, AttentionConfig, AttentionMeta, meta_of
from fngraph.ops.primitives import Pages, define
from fngraph.ops.slots import write_cache


class MLAConfig(NamedTuple):
    """What a backend may be chosen by.

    Attributes:
        rank: columns of the latent, which are also the values; the rest is the rotated key.
    """

    num_heads: int
    rank: int
    rope_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str
    scale: float

    @property
    def asks(self) -> tuple[str, ...]:
        """What only a backend that lists it in its `options` is asked to do."""
        return ("fp8 cache",) if self.cache_dtype.itemsize == 1 else ()


class MLAArgs(NamedTuple):
    """What a backend of `mla` gets, `run(args, host)`.

    Attributes:
        q: (T, H, C) absorbed queries.
        new: (T, C) rows of the cache, to be written at `meta.slot_mapping`.
        cache: (num_blocks, block_size, C).
        meta: where the tokens belong.
        out: (T, H, L) to be written in full, zero in rows that belong to no request.
        config: what is the same for every batch.
        plan: the buffers that the backend's `Plan` has filled, if it has one.
    """

    q: Tensor
    new: Tensor
    cache: Tensor
    meta: AttentionMeta
    out: Tensor
    config: MLAConfig
    plan: Any = None


def run(args: MLAArgs, host: HostBounds | None) -> None:
    """The `reference` backend: attention with one kv head, whose value is part of its key."""
    c = args.config
    plain = AttentionConfig(
        c.num_heads, 1, args.q.shape[2], c.block_size, c.dtype, c.cache_dtype, c.device, c.scale
    )
    keys, new = args.cache[:, :, None], args.new[:, None]
    values = keys[..., : c.rank]
    write_cache(keys, new, args.meta.slot_mapping)
    reference.attend_to(AttentionArgs(args.q, new, new, keys, values, args.meta, args.out, plain))


def _configure(q: Tensor, new: Tensor, cache: Tensor, *rest: Any) -> MLAConfig:
    *_, rank, scale = rest
    return MLAConfig(
        q.shape[1], rank, q.shape[2] - rank, cache.shape[1], q.dtype, cache.dtype, q.device.type,
        scale,
    )  # fmt: skip


MLA = define(
    "mla",
    "(Tensor q, Tensor new, Tensor(a!) cache, Tensor slot_mapping, Tensor seq_lens, "
    "Tensor query_start_loc, Tensor block_tables, Tensor(b!) out, int rank, float scale)",
    configure=_configure,
    args=MLAArgs,
    default=Backend(
        "reference", run, support=lambda config: Support.ALWAYS, options=("fp8 cache",)
    ),
    null_slots="slot_mapping",
    offsets="query_start_loc",
    pages=Pages(("cache",), ("block_tables",), ("slot_mapping",)),
)


SHAPES = Shapes(
    "mla", {"q_THC": "T H C", "new_TC": "T C", "cache": "num_blocks block_size C", **PAGED}
)


@MLA.function
def mla(
    q_THC: Tensor, new_TC: Tensor, cache: Tensor, batch: Any, *, rank: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Write this step's compressed rows to the cache, then attend causally in latent space.

    Args:
        q_THC: (T, H, C) queries: the latent part, multiplied by the key's up-projection, then the
            rotated part.
        new_TC: (T, C) rows of the cache: the normalized latent, then the rotated key.
        cache: (num_blocks, block_size, C); written in place, so it must be donated.
        batch: anything with the fields of `fg.ops.AttentionMeta`.
        rank: L, columns of the latent.
        scale: of the scores. It belongs to the head dim before absorption, which is not in sight.

    Returns:
        (T, H, L) in q's dtype, to be multiplied by the value's up-projection; zero in rows that
        belong to no request. And `cache` itself.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
        TransformError: a gradient or a `torch.func` transform goes through it.
    """
    tensors = (q_THC, new_TC, cache, *meta_of(batch))
    columns = SHAPES.check(*tensors)["C"]
    SHAPES.number("rank", rank, int)
    SHAPES.number("scale", scale, float)
    if not 0 < rank <= columns:
        raise ValueError(f"fg.ops.mla(rank={rank}): pass the latent's columns, 1 to {columns}")
    out_THL = q_THC.new_empty(*q_THC.shape[:2], rank)
    MLA.op(*tensors, out_THL, rank, scale)
    return out_THL, cache
