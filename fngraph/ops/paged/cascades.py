"""Cascade attention: what all requests have in common is attended to once for all of them.

Each token attends twice: to the shared prefix, whose keys are read once for the whole batch, and to
the rest of its request. The two are merged by their log-sum-exp, which is exact.

It is never captured: whether sharing pays, and how far it goes, is the host's choice at each step.
So its steps run as PIECEWISE; in other models' tables, a batch with `BatchSpec(cascade=True)` does.
Shape letters are those of `fngraph.ops.attention`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.check_shapes import PAGED, QKV, Shapes
from fngraph.ops.paged.config import AttentionConfig, AttentionMeta, meta_of, sees_nothing
from fngraph.ops.paged.gathered import rows_of
from fngraph.ops.primitives import Pages, define
from fngraph.ops.slots import read_cache, some_at_a_time, write_cache


class CascadeArgs(NamedTuple):
    """What a backend of `cascade` gets, `run(args, host)`.

    Attributes:
        q, k, v, k_cache, v_cache, meta, out, config, plan: as of `fg.ops.AttentionArgs`.
        prefix_len: (1,) int32, tokens that all requests have in common.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    prefix_len: Tensor
    out: Tensor
    config: AttentionConfig
    plan: Any = None


def run(args: CascadeArgs, host: HostBounds | None) -> None:
    """The `reference` backend."""
    meta, config, kv = args.meta, args.config, (args.k_cache, args.v_cache)
    for cache, x_TKD in zip(kv, (args.k, args.v)):
        write_cache(cache, x_TKD, meta.slot_mapping)
    if sees_nothing(meta):
        args.out.zero_()
        return
    dtype = torch.promote_types(args.q.dtype, torch.float32)
    rows, B = rows_of(meta, args.q.shape[0], None), meta.block_tables.shape[1]
    key_S = torch.arange(B * config.block_size, device=args.q.device)
    shared_S = key_S < args.prefix_len
    first_B = meta.block_tables[0].long()
    k_SKD, v_SKD = (_known(read_cache(x, first_B, dtype)[None], shared_S[None])[0] for x in kv)
    for part in some_at_a_time(args.q.shape[0], meta.block_tables, args.k_cache):
        q_TKGD = rearrange(args.q[part].to(dtype), "t (k g) d -> t k g d", k=config.num_kv_heads)
        seen_TS = (key_S <= rows.position_NQ[part]) & rows.owned_T[part, None]
        own_TS = seen_TS & ~shared_S
        k_TSKD, v_TSKD = (_known(read_cache(x, rows.table_NB[part], dtype), own_TS) for x in kv)
        scores = einsum(q_TKGD, k_SKD, "t k g d, s k d -> t k g s") * config.scale
        weights, lse = _softmax(scores, seen_TS & shared_S)
        shared = einsum(weights, v_SKD, "t k g s, s k d -> t k g d"), lse
        scores = einsum(q_TKGD, k_TSKD, "t k g d, t s k d -> t k g s") * config.scale
        weights, lse = _softmax(scores, own_TS)
        own = einsum(weights, v_TSKD, "t k g s, t s k d -> t k g d"), lse
        args.out[part].copy_(rearrange(merge(*shared, *own), "t k g d -> t (k g) d"))


def _known(x_TBSKD: Tensor, seen_TS: Tensor) -> Tensor:
    """Rows of pages one behind the other; what is not seen may hold NaN, and is zero here."""
    x_TSKD = rearrange(x_TBSKD, "t b s k d -> t (b s) k d")
    return x_TSKD.masked_fill(~seen_TS[:, :, None, None], 0.0)


def _softmax(scores_TKGS: Tensor, seen_TS: Tensor) -> tuple[Tensor, Tensor]:
    """Weights, zero where nothing is seen, and the log-sum-exp, -inf there."""
    scores_TKGS = scores_TKGS.masked_fill(~seen_TS[:, None, None], -torch.inf)
    lse_TKG = scores_TKGS.logsumexp(-1)
    return (scores_TKGS - lse_TKG[..., None]).exp().nan_to_num(0.0), lse_TKG


def merge(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> Tensor:
    """Attention over two sets of keys from attention over each, (..., D), and its (...) lse."""
    lse = torch.logaddexp(lse_a, lse_b)
    weights = ((x - lse).exp().nan_to_num(0.0)[..., None] for x in (lse_a, lse_b))
    return sum(x * weight for x, weight in zip((a, b), weights))  # type: ignore[return-value]


def _configure(q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, *rest: Any) -> AttentionConfig:
    *_, scale = rest
    return AttentionConfig(
        q.shape[1], k.shape[1], q.shape[2], k_cache.shape[1], q.dtype, k_cache.dtype,
        q.device.type, scale,
    )  # fmt: skip


CASCADE = define(
    "cascade",
    "(Tensor q, Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping, "
    "Tensor seq_lens, Tensor query_start_loc, Tensor block_tables, Tensor prefix_len, "
    "Tensor(c!) out, float scale)",
    configure=_configure,
    args=CascadeArgs,
    default=Backend("reference", run, support=lambda config: Support.NEVER),
    null_slots="slot_mapping",
    offsets="query_start_loc",
    pages=Pages(("k_cache", "v_cache"), ("block_tables",), ("slot_mapping",)),
)


SHAPES = Shapes("cascade", {**QKV, **PAGED, "batch.prefix_len": "1"}, shared=("H", "K"))


@CASCADE.function
def cascade(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: Any,
    batch: Any,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Any]:
    """Causal attention as `fg.ops.attention`, with the keys that all requests share read once.

    Args:
        q_THD, k_TKD, v_TKD, kv: as of `fg.ops.attention`.
        batch: anything with the fields of `fg.ops.AttentionMeta`, and `prefix_len`: (1,) int32,
            tokens that all requests have in common; their blocks are those of the first one.
        scale: of the scores; 1 / sqrt(D) if None.

    Returns:
        (T, H, D) in q's dtype, zero in rows that belong to no request; and `kv` itself.

    Raises:
        TreeError: an argument whose shape or dtype does not fit the others.
        TransformError: a gradient or a `torch.func` transform goes through it.
    """
    tensors = (
        q_THD, k_TKD, v_TKD, *SHAPES.pair("kv", kv), *meta_of(batch), batch.prefix_len
    )  # fmt: skip
    SHAPES.check(*tensors)
    scale = q_THD.shape[-1] ** -0.5 if scale is None else scale
    SHAPES.number("scale", scale, float)
    out_THD = q_THD.new_empty(q_THD.shape)
    CASCADE.op(*tensors, out_THD, scale)
    return out_THD, kv
