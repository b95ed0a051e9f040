"""Triton attention without a cache: over sequences that lie end to end.

A program takes a tile of one sequence's tokens and one head, over all keys of that sequence, from
its first on. So a row's bits depend on its own sequence alone: not on those beside it, nor on where
in the pack it lies. The grid follows from T and the number of offsets (see `tiling`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense
from fngraph.ops.triton.keys import LOG2E, Tile, weigh
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.tiling import find, lanes, tiles
from fngraph.ops.varlen import VarlenArgs, VarlenConfig


@triton.jit(do_not_specialize=COUNTS)
def varlen_kernel(
    q, k, v, starts, out, T, R,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, CAUSAL: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """One tile of one head; zeros past the last offset."""
    head = tl.program_id(0).to(tl.int64)
    r, begin, first = find(starts, tl.program_id(1), R, ROWS, REQS)
    end = T
    if r < R:
        end = tl.minimum(tl.load(starts + r + 1).to(tl.int32), T)
    if first < end:
        d = tl.arange(0, WIDTH)
        token = first + tl.arange(0, ROWS)
        real = token < end
        there = real[:, None] & (d < D)[None, :]
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if r < R:
            at = token.to(tl.int64)[:, None] * q_row + head * q_head + d[None, :]
            x = tl.load(q + at, mask=there, other=0.0)
            x = x.to(tl.float32) if FLOAT32 else x
            last = end
            if CAUSAL:
                last = tl.minimum(end, first + ROWS)
            keys = k + head // GROUP * k_head
            values = v + head // GROUP * v_head
            whole = begin + (last - begin) // KEYS * KEYS  # tiles before it are full
            if CAUSAL:
                whole = begin + tl.maximum(first + 1 - begin, 0) // KEYS * KEYS
            acc, top, total = attend_tiles(
                acc, top, total, x, token, begin, whole, last, keys, values, k_row, v_row, scale,
                D, WIDTH, KEYS, CAUSAL, FLOAT32, False,
            )  # fmt: skip
            acc, top, total = attend_tiles(
                acc, top, total, x, token, whole, last, last, keys, values, k_row, v_row, scale,
                D, WIDTH, KEYS, CAUSAL, FLOAT32, True,
            )  # fmt: skip
        made = acc / tl.where(total > 0, total, 1.0)[:, None]
        at = token.to(tl.int64)[:, None] * out_row + head * out_head + d[None, :]
        tl.store(out + at, made.to(out.dtype.element_ty), mask=there)


@triton.jit
def attend_tiles(
    acc, top, total, q, token, begin, end, last, keys, values, k_row, v_row, scale,
    D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr, CAUSAL: tl.constexpr,
    FLOAT32: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys begin <= n < end, KEYS at a time; with MASKED those from `last` on are left out."""
    d = tl.arange(0, WIDTH)
    for start in tl.range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        live = (n < last)[:, None] & (d < D)[None, :] if MASKED else (d < D)[None, :]
        n_wide = n.to(tl.int64)[:, None]
        x = tl.load(keys + n_wide * k_row + d[None, :], mask=live, other=0.0)
        y = tl.load(values + n_wide * v_row + d[None, :], mask=live, other=0.0)
        scores = tl.dot(q, tl.trans(x.to(q.dtype)), input_precision="ieee") * scale
        if MASKED:
            seen = (n < last)[None, :]
            if CAUSAL:
                seen = seen & (n[None, :] <= token[:, None])
            scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = weigh(scores, top, total)
        y = y.to(tl.float32) if FLOAT32 else y
        acc = tl.dot(weights.to(y.dtype), y, acc * fade[:, None], input_precision="ieee")
    return acc, top, total


def run(args: VarlenArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.varlen_attention`; shape letters are listed there."""
    q_THD, k_TKD, v_TKD, out_THD = dense(args.q), dense(args.k), dense(args.v), args.out
    starts, config = args.cu_seqlens, args.config
    T, S = q_THD.shape[0], starts.shape[0] - 1
    if not q_THD.numel():
        return
    exact = config.dtype == torch.float32 or config.device == "cpu"
    tile = tile_of(config, exact)
    launch(
        varlen_kernel,
        (config.num_heads, tiles(T, S, tile.rows)),
        (q_THD, k_TKD, v_TKD, starts),
        (out_THD,),
        (T, S, *q_THD.stride()[:2], *k_TKD.stride()[:2], *v_TKD.stride()[:2],
         *out_THD.stride()[:2], config.scale * LOG2E),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        kept=kept,
        GROUP=config.num_heads // config.num_kv_heads,
        D=config.head_dim,
        WIDTH=power_of_two(config.head_dim, at_least=16),
        CAUSAL=config.causal,
        FLOAT32=exact,
        ROWS=tile.rows,
        KEYS=tile.keys,
        REQS=lanes(S),
    )  # fmt: skip


def tile_of(config: VarlenConfig, exact: bool) -> Tile:
    """Rows and keys of a tile; float32 goes without tensor cores, in small ones."""
    if exact:
        return Tile(16, 32, 4, 1)
    width = power_of_two(config.head_dim, at_least=16)
    return Tile(128, 64, 4 if width <= 64 else 8, 3) if width <= 128 else Tile(64, 32, 4, 2)
