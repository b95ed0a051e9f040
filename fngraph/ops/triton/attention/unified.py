"""Triton attention for any mix of prefill and decode: one kernel, whose grid fits every batch.

A tile holds BQ tokens of one request, for all query heads of one kv head; see `tiles`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fngraph.core import HostBounds
from fngraph.ops.paged.config import AttentionArgs, dense, sees_nothing
from fngraph.ops.triton.attention.keys import Tile, attend_keys, compute_dtype, finish, options
from fngraph.ops.triton.attention.turning import turn_and_write
from fngraph.ops.triton.attention.writing import scale_of
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.rounding import put_rounded
from fngraph.ops.triton.strides import by_step
from fngraph.ops.triton.tiling import find_with_keys, lanes, tiles


@triton.jit(do_not_specialize=COUNTS)
def unified_kernel(
    q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, out_scale, out, T, R,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row, out_row, out_head,
    k_step, v_step, scale, softcap, window,
    ALIKE: tl.constexpr, STEP: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr,
    D: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr, FLOAT32: tl.constexpr, SINKS: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BQ: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """One tile of query rows of one kv head, over all the keys that it sees."""
    head = tl.program_id(0).to(tl.int64)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tokens see most keys: they go first
    r, first_token, end, length = find_with_keys(starts, lens, tile, T, R, BQ, REQS)
    if first_token < end:
        m = tl.arange(0, ROWS)
        token = first_token + m // GROUP
        real = (m < BQ * GROUP) & (token < end) & (token < T)
        position = length - (end - token)
        query_head = head * GROUP + m % GROUP
        d = tl.arange(0, WIDTH)
        there = real[:, None] & (d < D)[None, :]
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if length > 0:
            at = token.to(tl.int64) * q_row + query_head * q_head
            x = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
            x = x.to(tl.float32) if FLOAT32 else x
            lowest = length - (end - first_token)  # position of the tile's first token
            last = length
            full = length // KEYS * KEYS  # keys before it are seen by all rows
            if CAUSAL:
                last = tl.minimum(length, lowest + BQ)
                full = tl.minimum(tl.maximum(lowest + 1, 0) // KEYS * KEYS, full)
            elif WINDOW:
                last = tl.minimum(length, lowest + BQ - 1 + window)
            first = 0
            if WINDOW:
                first = tl.maximum(lowest - window + 1, 0)
                full = first // KEYS * KEYS
            by_k = tl.load(k_scale + head * k_step) if K_SCALED else 1.0
            keys = k_cache + head * by_step(k_head, STEP)
            values = v_cache + head * by_step(v_head, STEP)
            k_blocks, k_slots = by_step(k_block, STEP), by_step(k_slot, STEP)
            v_blocks, v_slots = by_step(v_block, STEP), by_step(v_slot, STEP)
            table = tables + r.to(tl.int64) * table_row
            if not WINDOW:
                acc, top, total = attend_keys(
                    acc, top, total, x, position, 0, full, 0, last, table, keys, values,
                    k_blocks, k_slots, v_blocks, v_slots, scale * by_k, softcap, window,
                    ALIKE, SIZE, D, WIDTH, KEYS, CAUSAL, WINDOW, SOFTCAP, False,
                )  # fmt: skip
            acc, top, total = attend_keys(
                acc, top, total, x, position, full, last, first, last, table, keys, values,
                k_blocks, k_slots, v_blocks, v_slots, scale * by_k, softcap, window,
                ALIKE, SIZE, D, WIDTH, KEYS, CAUSAL, WINDOW, SOFTCAP, True,
            )  # fmt: skip
        by_v = tl.load(v_scale + head * v_step) if V_SCALED else 1.0
        result = acc * finish(top, total, sinks, query_head, real, by_v, SINKS)[:, None]
        at = token.to(tl.int64) * out_row + query_head * out_head
        put_rounded(out + at[:, None] + d[None, :], result, out_scale, q, there, ROUNDS)


def run(args: AttentionArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.attention`; shape letters are listed there."""
    attend(turn_and_write(args, None, kept), kept=kept)


def attend(args: AttentionArgs, tile: Tile | None = None, kept: Launches | None = None) -> None:
    """Attention over a cache that holds this step's k and v, into all rows of the output."""
    q_THD, k_cache, v_cache, out_THD = dense(args.q), args.k_cache, args.v_cache, args.out
    meta, config = args.meta, args.config
    sinks = None if args.sinks is None else dense(args.sinks)
    T, R = q_THD.shape[0], meta.seq_lens.shape[0]
    if sees_nothing(meta):
        args.out.zero_()
        return
    numbers, constants = options(config, args.kv)
    group = constants["GROUP"]
    tile = tile or tile_of(config)
    BQ = tile.rows // group
    by_k, k_step = scale_of(args.k_scale, q_THD)
    by_v, v_step = scale_of(args.v_scale, q_THD)
    launch(
        unified_kernel,
        (config.num_kv_heads, tiles(T, R, BQ)),
        (q_THD, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables,
         q_THD if sinks is None else sinks, by_k, by_v,
         q_THD if args.out_scale is None else args.out_scale),
        (out_THD,),
        (T, R, *q_THD.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
         meta.block_tables.stride(0), *out_THD.stride()[:2], k_step, v_step, *numbers),
        ROWS=tile.rows,
        KEYS=tile.keys,
        BQ=BQ,
        REQS=lanes(R),
        kept=kept,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        SINKS=sinks is not None,
        K_SCALED=args.k_scale is not None,
        V_SCALED=args.v_scale is not None,
        ROUNDS=args.out_scale is not None,
        **constants,
    )  # fmt: skip


def tile_of(config: Any) -> Tile:
    """Large tiles for prefill; float32 goes without tensor cores, in small ones."""
    group = config.num_heads // config.num_kv_heads
    width = power_of_two(config.head_dim, at_least=16)
    if compute_dtype(config) == torch.float32:
        tile = Tile(16, 32, 4, 1)
    elif width <= 64:
        tile = Tile(128, 64, 4, 3)
    elif width <= 128:  # with masks of columns, twice as many keys are more than registers hold
        tile = Tile(128, 128 if width == config.head_dim else 64, 8, 3)
    else:
        tile = Tile(64, 32, 4, 2)
    return tile._replace(rows=power_of_two(group, at_least=tile.rows))
