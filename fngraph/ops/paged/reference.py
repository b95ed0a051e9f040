"""The `reference` backend of attention: plain torch, right before it is fast, CPU and CUDA.

No host sync and no data-dependent shape anywhere, so one captured graph serves every batch
(ALWAYS). Every token gathers its request's whole block table, some tokens at a time.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend
from fngraph.ops.fp8 import quantize_fp8
from fngraph.ops.paged.config import (
    AttentionArgs,
    AttentionConfig,
    AttentionMeta,
    owners,
    sees_nothing,
    turned,
)
from fngraph.ops.slots import read_cache, some_at_a_time, times_scale, write_cache


def run(args: AttentionArgs, host: HostBounds | None) -> None:
    """See `fngraph.ops.attention`; shape letters are listed there."""
    args = turned(args)
    write_new(args)
    attend_to(args)


def write_new(args: AttentionArgs) -> None:
    """This step's keys and values to their slots."""
    write_cache(args.k_cache, args.k, args.meta.slot_mapping, args.k_scale)
    write_cache(args.v_cache, args.v, args.meta.slot_mapping, args.v_scale)


def attend_to(args: AttentionArgs) -> None:
    """`attend` over the cache into `out`, some tokens at a time."""
    if sees_nothing(args.meta):
        args.out.zero_()
        return
    for part in some_at_a_time(args.q.shape[0], args.meta.block_tables, args.k_cache):
        made = attend(
            args.q[part],
            args.kv,
            args.meta,
            args.config,
            args.sinks,
            args.k_scale,
            args.v_scale,
            first=part.start,
        )
        args.out[part].copy_(made if args.out_scale is None else quantize_fp8(made, args.out_scale))


def attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: AttentionMeta,
    config: AttentionConfig,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    first: int = 0,
) -> Tensor:
    """Attention over a cache that holds this step's k and v; computed in float32 at least.

    What a token does not see counts as zero before anything is multiplied with it: unseen slots
    may hold NaN, whose gradients would be NaN too.

    Args:
        first: number of the first token in `q_THD`.
    """
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    starts = meta.query_start_loc.long()
    token_T = torch.arange(first, first + q_THD.shape[0], device=q_THD.device)
    owner_T, owned_T = owners(token_T, starts)
    len_T = meta.seq_lens.long()[owner_T]
    position_T = len_T - (starts[owner_T + 1] - token_T)

    table_TB = meta.block_tables.long()[owner_T]
    key_S = torch.arange(table_TB.shape[1] * config.block_size, device=q_THD.device)
    last_T = position_T if config.causal else len_T - 1
    seen_TS = (key_S[None] <= last_T[:, None]) & owned_T[:, None]
    if config.window is not None:
        seen_TS &= key_S[None] > position_T[:, None] - config.window
        seen_TS &= key_S[None] < position_T[:, None] + config.window
    k_TSKD, v_TSKD = (
        times_scale(
            rearrange(read_cache(cache, table_TB, dtype), "t b s k d -> t (b s) k d").masked_fill(
                ~seen_TS[:, :, None, None], 0.0
            ),
            scale,
        )
        for cache, scale in zip(kv, (k_scale, v_scale))
    )

    q_TKGD = rearrange(q_THD.to(dtype), "t (k g) d -> t k g d", k=config.num_kv_heads)
    scores_TKGS = einsum(q_TKGD, k_TSKD, "t k g d, t s k d -> t k g s") * config.scale
    if config.softcap is not None:
        scores_TKGS = (scores_TKGS / config.softcap).tanh() * config.softcap
    hidden_T1GS = ~seen_TS[:, None, None]
    scores_TKGS = scores_TKGS.masked_fill(hidden_T1GS, torch.finfo(dtype).min)
    if sinks is not None:  # one more score, whose value is zero
        sink_1KG1 = sinks.to(dtype).view(1, config.num_kv_heads, -1, 1)
        scores_TKGS = torch.cat([scores_TKGS, sink_1KG1.expand(*scores_TKGS.shape[:3], 1)], -1)
    weights_TKGS = scores_TKGS.softmax(-1)[..., : seen_TS.shape[1]]
    weights_TKGS = weights_TKGS.masked_fill(hidden_T1GS, 0.0)  # of a row that sees nothing
    mixed_TKGD = einsum(weights_TKGS, v_TSKD, "t k g s, t s k d -> t k g d")
    return rearrange(mixed_TKGD, "t k g d -> t (k g) d").to(q_THD.dtype)


BACKEND = Backend(
    "reference",
    run,
    support=lambda config: Support.ALWAYS,
    options=("bidirectional", "sinks", "cache scales", "fp8 cache", "rope", "fp8 output"),
)
