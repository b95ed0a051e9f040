"""Triton's latent attention: `unified` for any mix of requests, `decode` for uniform batches.

A row of a tile is one query head of one token. A tile reads each row of the cache once for all of
its heads, since the key is the whole row and the value is the row's first part. Tiles of keys begin
at multiples of KEYS and each row's softmax goes over them in order, as in `keys`.

`unified` has tiles of tokens over a grid that fits every batch (see `tiles`). `decode`, split-KV in
two phases, has splits of a fixed length, counted out of `seq_lens` and taken in turn; `merge` folds
their sums span by span, so that a row's bits do not depend on the batch around it. Tiles of other
heads and tokens that read the same split follow each other: most find it in the L2 cache.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense, sees_nothing
from fngraph.ops.paged.latent import MLAArgs
from fngraph.ops.triton.attention.decode import How
from fngraph.ops.triton.attention.keys import LOG2E, Tile, check_near, compute_dtype, weigh
from fngraph.ops.triton.attention.merging import empty, merge
from fngraph.ops.triton.attention.writing import write_rows
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two, processors
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.tiling import find_with_keys, lanes, tiles

MAX_TOKENS = 8  # of a request: more is prefill


def unified(args: MLAArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.mla`; shape letters are listed there."""
    write_rows(args.new, args.cache, args.meta.slot_mapping, kept)
    attend_unified(args, kept=kept)


def decode(args: MLAArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.mla`. A batch not known to be uniform goes to the unified kernel."""
    write_rows(args.new, args.cache, args.meta.slot_mapping, kept)
    Q = host.max_query_len if host is not None else None
    if Q is None or Q > MAX_TOKENS or args.q.shape[0] != args.meta.seq_lens.shape[0] * Q:
        attend_unified(args, kept=kept)
    else:
        attend_decode(args, Q, kept=kept)


def attend_unified(args: MLAArgs, tile: Tile | None = None, kept: Launches | None = None) -> None:
    """Latent attention over a cache that holds this step's rows, into all of the output."""
    q_THC, out_THL = dense(args.q), args.out
    cache, meta, config = args.cache, args.meta, args.config
    if sees_nothing(meta):
        out_THL.zero_()
        return
    check_near("cache", cache, config.block_size)
    T, R = q_THC.shape[0], meta.seq_lens.shape[0]
    tile = tile or tile_of(config, 64)
    known = constants(config, tile)
    launch(
        latent_unified_kernel,
        (-(-config.num_heads // known["GROUP"]), tiles(T, R, known["BQ"])),
        (q_THC, cache, meta.query_start_loc, meta.seq_lens, meta.block_tables),
        (out_THL,),
        (T, R, *q_THC.stride()[:2], *cache.stride()[:2], meta.block_tables.stride(0),
         *out_THL.stride()[:2], scale_of(config)),
        REQS=lanes(R),
        kept=kept,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **known,
    )  # fmt: skip


def attend_decode(
    args: MLAArgs, Q: int, how: How | None = None, kept: Launches | None = None
) -> None:
    """Latent attention of R * Q rows, where no request brings more than Q, into all of them."""
    q_THC, out_THL = dense(args.q), args.out
    cache, meta, config = args.cache, args.meta, args.config
    if sees_nothing(meta):
        out_THL.zero_()
        return
    check_near("cache", cache, config.block_size)
    R, H, L = meta.seq_lens.shape[0], config.num_heads, config.rank
    widest = meta.block_tables.shape[1] * config.block_size
    how = how or how_to(config, Q, widest)
    tile, split, programs = how.tile, how.split, how.programs
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
        early=how.early,
        programs=programs,
        kept=kept,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **known,
    )  # fmt: skip
    merge(sums, meta, out_THL, Q, split, early=how.early, kept=kept)


def how_to(config: Any, Q: int, widest: int) -> How:
    """By what is the same for every batch; `widest` is what the block table can hold.

    What a split of 16 keys a head leaves to be merged is a tenth of what it reads; there are 64
    splits at most.
    """
    split = max(128, power_of_two(16 * config.num_heads), power_of_two(widest) // 64)
    tile = tile_of(config, Q * config.num_heads)
    return How(tile, split, 2 if tile.num_warps == 4 else 1, None)


def scale_of(config: Any) -> float:
    """The scale of scores, as `attend_rows` takes it."""
    return config.scale * LOG2E


def constants(config: Any, tile: Tile) -> dict[str, Any]:
    """Both kernels' constants. A tile holds BQ tokens of GROUP heads, even shares that fit."""
    tiles = -(-config.num_heads // tile.rows)
    group = -(-config.num_heads // tiles)
    return {
        "HEADS": config.num_heads,
        "GROUP": group,
        "BQ": tile.rows // group,
        "SIZE": config.block_size,
        "RANK": config.rank,
        "WIDTH": power_of_two(config.rank, at_least=16),
        "ROPE": config.rope_dim,
        "TURN": power_of_two(config.rope_dim, at_least=16),
        "FLOAT32": compute_dtype(config) == torch.float32,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }


def tile_of(config: Any, rows: int) -> Tile:
    """For tiles of up to `rows` rows, whose sums, rows x rank in float32, stay in registers.

    At rank 512, 32 keys are 36 KB of shared memory and 64 rows of queries 72 KB. The block table
    is looked up ahead of the keys, which takes two stages more.
    """
    if compute_dtype(config) == torch.float32:  # without tensor cores
        return Tile(16, 16, 8, 1)
    if rows <= 16:
        return Tile(16, 32, 4, 5)  # two programs to a multiprocessor
    return Tile(32, 32, 8, 5) if rows <= 32 else Tile(64, 32, 8, 3)


@triton.jit(do_not_specialize=COUNTS)
def latent_unified_kernel(
    q, cache, starts, lens, tables, out, T, R,
    q_row, q_head, by_block, by_slot, table_row, out_row, out_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """One tile of tokens and heads, over all the keys that it sees."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tokens see most keys: they go first
    r, first_token, end, length = find_with_keys(starts, lens, tile, T, R, BQ, REQS)
    if first_token < end:
        m = tl.arange(0, ROWS)
        token = first_token + m // GROUP
        head = tl.program_id(0) * GROUP + m % GROUP
        real = (m < BQ * GROUP) & (token < end) & (token < T) & (head < HEADS)
        d = tl.arange(0, WIDTH)
        at = token.to(tl.int64) * out_row + head.to(tl.int64) * out_head
        into = out + at[:, None] + d[None, :]
        there = real[:, None] & (d < RANK)[None, :]
        if length > 0:
            last = tl.minimum(length, length - (end - first_token) + BQ)
            acc, _, total = attend_rows(
                q, token.to(tl.int64) * q_row + head.to(tl.int64) * q_head, real,
                length - (end - token), 0, last, last, tables + r.to(tl.int64) * table_row,
                cache, by_block, by_slot, scale,
                SIZE, RANK, WIDTH, ROPE, TURN, ROWS, KEYS, FLOAT32,
            )  # fmt: skip
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(into, result.to(out.dtype.element_ty), mask=there)
        else:
            tl.store(into, tl.zeros((ROWS, WIDTH), out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=COUNTS)
def latent_split_kernel(
    q, cache, starts, lens, tables, parts, tops, totals, R, UNITS,
    q_row, q_head, by_block, by_slot, table_row, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, REQS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Softmax of one tile of a request's rows over one split of its keys, item by item."""
    overlap(EARLY)
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


@triton.jit
def load_row(
    of, at, there,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """The latent part and the rotated part of rows that begin at `at`; zeros past their ends."""
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, TURN)
    latent = tl.load(
        of + at[:, None] + d[None, :], mask=there[:, None] & (d < RANK)[None, :], other=0.0
    )
    turned = tl.load(
        of + at[:, None] + RANK + e[None, :], mask=there[:, None] & (e < ROPE)[None, :], other=0.0
    )
    return latent, turned


@triton.jit
def attend_rows(
    q, q_at, real, position, begin, end, last, table, cache, by_block, by_slot, scale,
    SIZE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    TURN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """(acc, top, total): weighted latents, largest score and sum of weights of each row.

    Keys begin <= n < end, by multiples of KEYS; none from `last` on is looked at. Scores are in
    powers of two.
    """
    x, x_turned = load_row(q, q_at, real, RANK, WIDTH, ROPE, TURN)
    if FLOAT32:
        x, x_turned = x.to(tl.float32), x_turned.to(tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        live = n < last
        block = tl.load(table + n // SIZE, mask=live, other=0).to(tl.int64)
        at = block * by_block + n % SIZE * by_slot
        latent, turned = load_row(cache, at, live, RANK, WIDTH, ROPE, TURN)
        latent, turned = latent.to(x.dtype), turned.to(x.dtype)
        scores = tl.dot(x, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(x_turned, tl.trans(turned), scores, input_precision="ieee") * scale
        seen = live[None, :] & (n[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = weigh(scores, top, total)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(x.dtype), latent, acc, input_precision="ieee")
    return acc, top, total
