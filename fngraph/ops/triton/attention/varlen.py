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
from fngraph.ops.triton.attention.keys import LOG2E, Tile, weigh
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.repeating import Launches
from fngraph.ops.triton.strides import by_step, step_of
from fngraph.ops.triton.tiling import find, lanes, tiles
from fngraph.ops.varlen import VarlenArgs, VarlenConfig


@triton.jit(do_not_specialize=COUNTS)
def varlen_kernel(
    q, k, v, starts, out, T, R,
    q_row, q_head, k_row, k_head, v_row, v_head, out_row, out_head, scale,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr,
    STEP: tl.constexpr, CAUSAL: tl.constexpr, FLOAT32: tl.constexpr, RISING: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """One tile of one head; zeros past the last offset.

    A head is WIDTH columns, and with MORE as many more beside them: 72 are 64 and 16, not 128.
    Heads and rows are multiples of STEP numbers apart. RISING says that the scale is above 0.
    """
    head = tl.program_id(0).to(tl.int64)
    r, begin, first = find(starts, tl.program_id(1), R, ROWS, REQS)
    end = T
    if r < R:
        end = tl.minimum(tl.load(starts + r + 1).to(tl.int32), T)
    if first < end:
        token = first + tl.arange(0, ROWS)
        real = token < end
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        acc_more = tl.zeros((ROWS, MORE), tl.float32) if MORE else acc
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        if r < R:
            at, row = q + head * by_step(q_head, STEP), token.to(tl.int64)
            x = columns(at, row, by_step(q_row, STEP), real, D, 0, WIDTH, True)
            x = x.to(tl.float32) if FLOAT32 else x
            x_more = x
            if MORE:
                x_more = columns(
                    at, token.to(tl.int64), by_step(q_row, STEP), real, D, WIDTH, MORE, True
                )
                x_more = x_more.to(tl.float32) if FLOAT32 else x_more
            last = end
            if CAUSAL:
                last = tl.minimum(end, first + ROWS)
            keys = k + head // GROUP * by_step(k_head, STEP)
            values = v + head // GROUP * by_step(v_head, STEP)
            whole = begin + (last - begin) // KEYS * KEYS  # tiles before it are full
            if CAUSAL:
                whole = begin + tl.maximum(first + 1 - begin, 0) // KEYS * KEYS
            k_rows, v_rows = by_step(k_row, STEP), by_step(v_row, STEP)
            acc, acc_more, top, total = attend_tiles(
                acc, acc_more, top, total, x, x_more, token, begin, whole, last, keys, values,
                k_rows, v_rows, scale, D, WIDTH, MORE, KEYS, CAUSAL, FLOAT32, RISING, False,
            )  # fmt: skip
            acc, acc_more, top, total = attend_tiles(
                acc, acc_more, top, total, x, x_more, token, whole, last, last, keys, values,
                k_rows, v_rows, scale, D, WIDTH, MORE, KEYS, CAUSAL, FLOAT32, RISING, True,
            )  # fmt: skip
        by = 1.0 / tl.where(total > 0, total, 1.0)[:, None]
        at = out + token.to(tl.int64)[:, None] * out_row + head * out_head
        d = tl.arange(0, WIDTH)[None, :]
        tl.store(at + d, (acc * by).to(out.dtype.element_ty), mask=real[:, None] & (d < D))
        if MORE:
            d = WIDTH + tl.arange(0, MORE)[None, :]
            tl.store(at + d, (acc_more * by).to(out.dtype.element_ty), mask=real[:, None] & (d < D))


@triton.jit
def columns(
    at, row, stride, real, D: tl.constexpr, FIRST: tl.constexpr, SIZE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """SIZE columns of rows, from FIRST on; zeros from D on, and with MASKED where not real."""
    d = FIRST + tl.arange(0, SIZE)[None, :]
    at += row[:, None] * stride + d
    if MASKED:
        return tl.load(at, mask=real[:, None] & (d < D), other=0.0)
    if FIRST + SIZE > D:
        return tl.load(at, mask=d < D, other=0.0)
    return tl.load(at)


@triton.jit
def attend_tiles(
    acc, acc_more, top, total, q, q_more, token, begin, end, last, keys, values, k_row, v_row,
    scale, D: tl.constexpr, WIDTH: tl.constexpr, MORE: tl.constexpr, KEYS: tl.constexpr,
    CAUSAL: tl.constexpr, FLOAT32: tl.constexpr, RISING: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Keys begin <= n < end, KEYS at a time; with MASKED those from `last` on are left out."""
    for start in tl.range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        real = n < last
        i = tl.arange(0, KEYS)
        k_at = keys + tl.cast(start, tl.int64) * k_row
        v_at = values + tl.cast(start, tl.int64) * v_row
        x = columns(k_at, i, k_row, real, D, 0, WIDTH, MASKED)
        y = columns(v_at, i, v_row, real, D, 0, WIDTH, MASKED)
        scores = tl.dot(q, tl.trans(x.to(q.dtype)), input_precision="ieee")
        if MORE:
            x_more = columns(k_at, i, k_row, real, D, WIDTH, MORE, MASKED)
            y_more = columns(v_at, i, v_row, real, D, WIDTH, MORE, MASKED)
            scores = tl.dot(q_more, tl.trans(x_more.to(q.dtype)), scores, input_precision="ieee")
        if RISING and not MASKED:
            weights, fade, top, total = weigh_scaled(scores, scale, top, total)
        else:
            scores *= scale
            if MASKED:
                seen = real[None, :]
                if CAUSAL:
                    seen = seen & (n[None, :] <= token[:, None])
                scores = tl.where(seen, scores, float("-inf"))
            weights, fade, top, total = weigh(scores, top, total)
        y = y.to(tl.float32) if FLOAT32 else y
        weights = weights.to(y.dtype)
        acc = tl.dot(weights, y, acc * fade[:, None], input_precision="ieee")
        if MORE:
            y_more = y_more.to(tl.float32) if FLOAT32 else y_more
            acc_more = tl.dot(weights, y_more, acc_more * fade[:, None], input_precision="ieee")
    return acc, acc_more, top, total


@triton.jit
def weigh_scaled(scores, scale, top, total):
    """`weigh` of scores times a scale above 0, whose product goes into the subtraction: a tile of
    64 keys takes 581 instructions a warp in place of 642 on Hopper."""
    higher = tl.maximum(top, tl.max(scores, 1) * scale)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    weights = tl.exp2(scores * scale - base[:, None])
    fade = tl.exp2(top - base)
    return weights, fade, higher, total * fade + tl.sum(weights, 1)


def run(args: VarlenArgs, host: HostBounds | None, kept: Launches | None = None) -> None:
    """See `fngraph.ops.varlen_attention`; shape letters are listed there."""
    q_THD, k_TKD, v_TKD, out_THD = dense(args.q), dense(args.k), dense(args.v), args.out
    starts, config = args.cu_seqlens, args.config
    T, S = q_THD.shape[0], starts.shape[0] - 1
    if not q_THD.numel():
        return
    exact = config.dtype == torch.float32 or config.device == "cpu"
    tile = tile_of(config, exact)
    width, more = widths(config.head_dim)
    strides = [n for x in (q_THD, k_TKD, v_TKD, out_THD) for n in x.stride()[:2]]
    launch(
        varlen_kernel,
        (config.num_heads, tiles(T, S, tile.rows)),
        (q_THD, k_TKD, v_TKD, starts),
        (out_THD,),
        (T, S, *strides, config.scale * LOG2E),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        kept=kept,
        GROUP=config.num_heads // config.num_kv_heads,
        D=config.head_dim,
        WIDTH=width,
        MORE=more,
        STEP=step_of(*strides),
        CAUSAL=config.causal,
        FLOAT32=exact,
        RISING=config.scale > 0,
        ROWS=tile.rows,
        KEYS=tile.keys,
        REQS=lanes(S),
    )  # fmt: skip


def widths(head_dim: int) -> tuple[int, int]:
    """Powers of two that hold a head: one, and beside it another or 0, if that is less."""
    whole = power_of_two(head_dim, at_least=16)
    more = power_of_two(head_dim - whole // 2, at_least=16)
    return (whole // 2, more) if 32 <= whole // 2 and whole // 2 + more < whole else (whole, 0)


def tile_of(config: VarlenConfig, exact: bool) -> Tile:
    """Rows and keys of a tile; float32 goes without tensor cores, in small ones.

    Heads of 72 on an H200, four sequences of 4096: 300 TFLOP/s, 266 by tiles of (64, 128), 257 by
    eight warps, 244 by (64, 64); SDPA 389.
    """
    if exact:
        return Tile(16, 32, 4, 1)
    width = sum(widths(config.head_dim))
    if width > 128:
        return Tile(64, 32, 4, 2)
    return Tile(128, 64, 4 if width < 128 else 8, 3)
