"""Triton's latent attention for uniform batches of any query length: split-KV, in two phases.

Splits are of a fixed length, counted out of `seq_lens` and taken in turn, and `triton_merge` folds
their sums span by span; so a row's bits do not depend on the batch around it. Tiles of other heads
and tokens that read the same split follow each other, so that most of them find it in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense
from fngraph.ops.triton import latent_unified
from fngraph.ops.triton.decode import How
from fngraph.ops.triton.latent import attend_rows, constants, scale_of, tile_of
from fngraph.ops.triton.launch import launch, power_of_two, processors
from fngraph.ops.triton.merge import empty, merge
from fngraph.ops.triton.write import write_rows

MAX_TOKENS = 8  # of a request: more is prefill


@triton.jit
def latent_split_kernel(
    q, cache, starts, lens, tables, parts, tops, totals, R, UNITS,
    q_row, q_head, by_block, by_slot, table_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, REQS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile of a request's rows over one split of its keys, item by item."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, REQS)
    count_R = (tl.load(lens + i, mask=i < R, other=0) + SPLIT - 1) // SPLIT
    end_R = tl.cumsum(count_R, 0)
    wide = (HEADS + GROUP - 1) // GROUP
    tiles = wide * ((Q + BQ - 1) // BQ)
    items = tl.sum(count_R, 0) * tiles
    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        tile = item % tiles
        index = item // tiles
        r = tl.sum((end_R <= index).to(tl.int32), 0)
        split = index - tl.sum(tl.where(i < r, count_R, 0), 0)
        length = tl.load(lens + r)
        begin = tl.load(starts + r)
        new = tl.load(starts + r + 1) - begin
        token = tile // wide * BQ + m // GROUP
        head = tile % wide * GROUP + m % GROUP
        real = (m < BQ * GROUP) & (token < tl.minimum(new, Q)) & (head < HEADS)
        last = tl.minimum(length, (split + 1) * SPLIT)
        acc, top, total = attend_rows(
            q, (begin + token).to(tl.int64) * q_row + head.to(tl.int64) * q_head, real,
            length - new + token, split * SPLIT, last, last,
            tables + r.to(tl.int64) * table_row, cache, by_block, by_slot, scale,
            SIZE, RANK, WIDTH, ROPE, TURN, ROWS, KEYS, FLOAT32,
        )  # fmt: skip
        at = (r.to(tl.int64) * UNITS + split) * (Q * HEADS) + token * HEADS + head
        tl.store(tops + at, top, mask=real)
        tl.store(totals + at, total, mask=real)
        there = real[:, None] & (d < RANK)[None, :]
        tl.store(parts + at[:, None] * RANK + d[None, :], acc, mask=there)


def run(
    q_THC: Tensor,
    new_TC: Tensor,
    cache: Tensor,
    meta: Any,
    out_THL: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.mla`. A batch not known to be uniform goes to the unified kernel."""
    write_rows(new_TC, cache, meta.slot_mapping)
    Q = host.max_query_len if host is not None else None
    if Q is None or Q > MAX_TOKENS or q_THC.shape[0] != meta.seq_lens.shape[0] * Q:
        latent_unified.attend(q_THC, cache, meta, out_THL, config)
    else:
        attend(q_THC, cache, meta, out_THL, config, Q)


def attend(
    q_THC: Tensor,
    cache: Tensor,
    meta: Any,
    out_THL: Tensor,
    config: Any,
    Q: int,
    how: How | None = None,
) -> None:
    """Latent attention of R * Q rows, where no request brings more than Q, into all of them."""
    q_THC = dense(q_THC)
    R, H, L = meta.seq_lens.shape[0], config.num_heads, config.rank
    widest = meta.block_tables.shape[1] * config.block_size
    tile, split, programs, many, _, early = how or how_to(config, Q, widest)
    known = constants(config, tile)
    splits = -(-widest // split)
    sums = empty(q_THC, R, 1, splits, Q * H, L)
    tiles = -(-H // known["GROUP"]) * -(-Q // known["BQ"])
    launch(
        latent_split_kernel,
        (min(R * splits * tiles, processors(q_THC.device) * programs),),
        (q_THC, cache, meta.query_start_loc, meta.seq_lens, meta.block_tables),
        sums,
        (R, splits, *q_THC.stride()[:2], *cache.stride()[:2], meta.block_tables.stride(0),
         scale_of(config)),
        Q=Q,
        SPLIT=split,
        REQS=power_of_two(R, at_least=256),
        early=early,
        programs=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **known,
    )  # fmt: skip
    merge(sums, meta, out_THL, Q, split, many, early=early)


def how_to(config: Any, Q: int, widest: int) -> How:
    """By what is the same for every batch; `widest` is what the block table can hold.

    What a split of 16 keys a head leaves to be merged is a tenth of what it reads; there are 64
    splits at most.
    """
    split = max(128, power_of_two(16 * config.num_heads), power_of_two(widest) // 64)
    tile = tile_of(config, Q * config.num_heads)
    return How(tile, split, 2 if tile.num_warps == 4 else 1, None)
