"""The `reference` backend of attention: plain torch, right before it is fast, CPU and CUDA.

No host sync and no data-dependent shape anywhere, so one captured graph serves every batch
(ALWAYS). Every token gathers its request's whole block table: memory grows as T * B * block_size.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import einsum, rearrange
from torch import Tensor

from fngraph.core import HostBounds, Support
from fngraph.ops.primitive import Backend


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
) -> None:
    """See `fngraph.ops.attention`; shape letters are listed there."""
    k_cache, v_cache = kv
    write(k_cache, k_TKD, meta.slot_mapping)
    write(v_cache, v_TKD, meta.slot_mapping)
    out_THD.copy_(attend(q_THD, (k_cache, v_cache), meta, config))


def attend(q_THD: Tensor, kv: tuple[Tensor, Tensor], meta: Any, config: Any) -> Tensor:
    """Attention over a cache that holds this step's k and v; computed in float32 at least.

    What a token does not see counts as zero before anything is multiplied with it: unseen slots
    may hold NaN, whose gradients would be NaN too.
    """
    dtype = torch.promote_types(q_THD.dtype, torch.float32)
    R = meta.seq_lens.shape[0]
    starts = meta.query_start_loc.long()
    token_T = torch.arange(q_THD.shape[0], device=q_THD.device)
    owner_T = (token_T[:, None] >= starts[1:]).sum(1)
    owned_T = owner_T < R  # tokens past the last offset are padding
    owner_T = owner_T.clamp(max=R - 1)
    len_T = meta.seq_lens.long()[owner_T]
    position_T = len_T - (starts[owner_T + 1] - token_T)

    table_TB = meta.block_tables.long()[owner_T]
    key_S = torch.arange(table_TB.shape[1] * config.block_size, device=q_THD.device)
    seen_TS = (key_S[None] <= position_T[:, None]) & owned_T[:, None]
    if config.window is not None:
        seen_TS &= key_S[None] > position_T[:, None] - config.window
    k_TSKD, v_TSKD = (
        rearrange(cache[table_TB], "t b s k d -> t (b s) k d")
        .to(dtype)
        .masked_fill(~seen_TS[:, :, None, None], 0.0)
        for cache in kv
    )

    q_TKGD = rearrange(q_THD.to(dtype), "t (k g) d -> t k g d", k=config.num_kv_heads)
    scores_TKGS = einsum(q_TKGD, k_TSKD, "t k g d, t s k d -> t k g s") * config.scale
    if config.softcap is not None:
        scores_TKGS = (scores_TKGS / config.softcap).tanh() * config.softcap
    hidden_T1GS = ~seen_TS[:, None, None]
    weights_TKGS = scores_TKGS.masked_fill(hidden_T1GS, torch.finfo(dtype).min).softmax(-1)
    weights_TKGS = weights_TKGS.masked_fill(hidden_T1GS, 0.0)  # of a row that sees nothing
    mixed_TKGD = einsum(weights_TKGS, v_TSKD, "t k g s, t s k d -> t k g d")
    return rearrange(mixed_TKGD, "t k g d -> t (k g) d").to(q_THD.dtype)


def write(cache: Tensor, new_TKD: Tensor, slot_mapping: Tensor) -> None:
    """cache[slot] = new for each token whose slot is not -1; nothing else changes, no sync.

    `index_put` cannot skip rows, so a skipped row repeats the write of the first real one; if
    there is none, every row writes back what slot 0 holds.
    """
    rows = cache.view(-1, *cache.shape[2:])
    real_T = slot_mapping >= 0
    first = real_T.long().argmax()
    source_T = torch.where(real_T, torch.arange(slot_mapping.shape[0], device=cache.device), first)
    slot_T = slot_mapping[source_T].clamp(min=0)
    value_TKD = torch.where(real_T.any(), new_TKD[source_T].to(cache.dtype), rows[slot_T])
    rows.index_put_((slot_T,), value_TKD)


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


BACKEND = Backend("reference", run, support=lambda config: Support.ALWAYS)
