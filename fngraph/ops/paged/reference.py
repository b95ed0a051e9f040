"""The `reference` backend of attention: plain torch, right before it is fast, CPU and CUDA.

No host sync and no data-dependent shape anywhere, so one captured graph serves every batch
(ALWAYS). Every token gathers its request's whole block table, some tokens at a time.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.backend import Backend


def run(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `fngraph.ops.attention`; shape letters are listed there."""
    write(kv[0], k_TKD, meta.slot_mapping, k_scale)
    write(kv[1], v_TKD, meta.slot_mapping, v_scale)
    options = {"sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
    attend_to(q_THD, kv, meta, out_THD, config, **options)


def attend_to(
    q_THD: Tensor, kv: tuple[Tensor, Tensor], meta: Any, out: Tensor, config: Any, **options: Any
) -> None:
    """`attend` into `out`, some tokens at a time."""
    if meta.seq_lens.shape[0] == 0:
        out.zero_()
        return
    at_once = max(1, AT_ONCE // (meta.block_tables.shape[1] * kv[0][0].numel()))
    for first in range(0, q_THD.shape[0], at_once):
        part = slice(first, first + at_once)
        out[part].copy_(attend(q_THD[part], kv, meta, config, **options, first=first))


AT_ONCE = 1 << 27
"""Elements of the cache that tokens gather at a time, keys alone."""


def attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    config: Any,
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
    R = meta.seq_lens.shape[0]
    starts = meta.query_start_loc.long()
    token_T = torch.arange(first, first + q_THD.shape[0], device=q_THD.device)
    owner_T = (token_T[:, None] >= starts[1:]).sum(1)
    owned_T = owner_T < R  # tokens past the last offset are padding
    owner_T = owner_T.clamp(max=R - 1)
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
        rearrange(read(cache, table_TB, dtype, scale), "t b s k d -> t (b s) k d").masked_fill(
            ~seen_TS[:, :, None, None], 0.0
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


def read(cache: Tensor, blocks: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """cache[blocks] in `dtype`, times the scale of its kv heads."""
    found = _bytes(cache)[blocks]
    if cache.dtype.itemsize == 1:
        found = found.view(cache.dtype)
    found = found.to(dtype)
    return found if scale is None else found * scale.to(dtype).view(-1, 1)


def write(
    cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor, scale: Tensor | None = None
) -> None:
    """cache[slot] = new / scale for each token whose slot is not -1; nothing else changes, no sync.

    `index_put` cannot skip rows, so a skipped row repeats the write of the first real one; if
    there is none, every row writes back what slot 0 holds.
    """
    rows = _bytes(cache.view(-1, *cache.shape[2:]))
    real_T = slot_mapping >= 0
    first = real_T.long().argmax()
    source_T = torch.where(real_T, torch.arange(slot_mapping.shape[0], device=cache.device), first)
    slot_T = slot_mapping[source_T].clamp(min=0)
    value_TKD = torch.where(
        real_T.any(), _bytes(rounded(new_TKD[source_T], cache.dtype, scale)), rows[slot_T]
    )
    rows.index_put_((slot_T,), value_TKD)


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x / scale in the cache's dtype; in fp8, which has no infinity, as far as its range goes."""
    if scale is not None:
        x = x.float() / scale.float().view(-1, *[1] * (x.dim() - 2))
    if dtype.itemsize == 1:
        x = x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """fp8 as bytes, since torch cannot index it everywhere; anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def put(cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor) -> Tensor:
    """What `write` makes of the cache, as a new tensor that any transform can go through.

    It gathers, since scattering the first real row more than once would count its gradient so.
    """
    num_blocks, block_size, *_ = cache.shape
    N = num_blocks * block_size
    slot_T = torch.where(slot_mapping < 0, N, slot_mapping)
    token_T = torch.arange(slot_T.shape[0], device=cache.device)
    nobody = torch.full((N + 1,), -1, device=cache.device)
    writer_NS = nobody.index_put((slot_T,), token_T)[:N].view(num_blocks, block_size)
    new_NSKD = new_TKD.to(cache.dtype)[writer_NS.clamp(min=0)]
    return torch.where(writer_NS[:, :, None, None] >= 0, new_NSKD, cache)


BACKEND = Backend(
    "reference",
    run,
    support=lambda config: Support.ALWAYS,
    options=("bidirectional", "sinks", "cache scales", "fp8 cache"),
)
