"""Attention over a paged KV cache, for any mix of prefill and decode.

Shape letters: T query tokens, R requests, H query heads, K kv heads, D head dim, B blocks per
request. The cache of one layer is a pair of (num_blocks, block_size, K, D) tensors; token number i
of a request lives in block `block_tables[r, i // block_size]` at row `i % block_size`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops import reference
from fngraph.ops.primitive import Backend, define


class AttentionMeta(NamedTuple):
    """Where the tokens of a batch belong.

    Attributes:
        slot_mapping: (T,) int64, block * block_size + row for each token's k and v; -1 writes none.
        seq_lens: (R,) int32, tokens of each request, this step's included; 0 is a padding request.
        query_start_loc: (R + 1,) int32, offset of each request's first token among the T.
        block_tables: (R, B) int32, the blocks of each request, in order.
    """

    slot_mapping: Tensor
    seq_lens: Tensor
    query_start_loc: Tensor
    block_tables: Tensor


class AttentionConfig(NamedTuple):
    """What a backend may be chosen by: everything that is the same for every batch."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    cache_dtype: torch.dtype
    device: str
    scale: float


def attention(
    q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, kv: Any, batch: Any, *, scale: float | None = None
) -> tuple[Tensor, Any]:
    """Write this step's k and v to the cache, then attend causally over each request's tokens.

    Query heads share kv heads in order: head h reads kv head `h // (H // K)`.

    Args:
        q_THD: (T, H, D) queries.
        k_TKD: (T, K, D) new keys.
        v_TKD: (T, K, D) new values.
        kv: the layer's cache, a pair (k, v) of (num_blocks, block_size, K, D); written in place,
            so it must be donated.
        batch: anything with the fields of `AttentionMeta`.
        scale: of the scores; 1 / sqrt(D) if None.

    Returns:
        (T, H, D) in q's dtype, zero in rows that belong to no request; and `kv` itself.

    Raises:
        NotImplementedError: a gradient would have to flow through it.
    """
    k_cache, v_cache = kv
    out_THD = q_THD.new_zeros(q_THD.shape)
    ATTENTION.op(
        q_THD, k_TKD, v_TKD, k_cache, v_cache, *_meta(batch), out_THD,
        q_THD.shape[-1] ** -0.5 if scale is None else scale,
    )  # fmt: skip
    return out_THD, kv


def _meta(batch: Any) -> AttentionMeta:
    return AttentionMeta(
        batch.slot_mapping, batch.seq_lens, batch.query_start_loc, batch.block_tables
    )


def _configure(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, *rest: Any) -> AttentionConfig:
    scale = rest[-1]
    return AttentionConfig(
        num_heads=q.shape[1], num_kv_heads=k.shape[1], head_dim=q.shape[2],
        block_size=k_cache.shape[1], dtype=q.dtype, cache_dtype=k_cache.dtype,
        device=q.device.type, scale=scale,
    )  # fmt: skip


def _call(
    backend: Backend, args: tuple[Any, ...], config: AttentionConfig, host: HostBounds | None
) -> None:
    q, k, v, k_cache, v_cache, slots, lens, starts, tables, out, _ = args
    meta = AttentionMeta(slots, lens, starts, tables)
    backend.run(q, k, v, (k_cache, v_cache), meta, out, config=config, host=host)


ATTENTION = define(
    "attention",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor block_tables, Tensor(c!) out, float scale)",
    configure=_configure,
    call=_call,
    default=reference.BACKEND,
    null_slots="slot_mapping",
)
