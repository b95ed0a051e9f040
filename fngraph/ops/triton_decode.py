"""Triton attention for uniform batches of any query length: split-KV, in two phases.

Each request's keys are cut into splits of a fixed number of keys; programs, as many as fill the
device, take (split, kv head) items in turn from a list that they count out of `seq_lens`. So the
grid fits every batch, dead splits cost nothing, and ragged lengths balance. Then the splits of a
row are merged, in order, by log-sum-exp. How long a split is follows from the block table's width
alone, and so a row's bits do not depend on the batch around it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops import triton_unified
from fngraph.ops.triton_keys import Tile, attend_keys, compute_dtype, finish, options
from fngraph.ops.triton_launch import launch, power_of_two, processors
from fngraph.ops.triton_write import dense, scale_of, write

MAX_ROWS = 64  # query rows of one kv head: more is prefill
MERGED = 32  # splits merged at a time


@triton.jit
def split_kernel(
    q, k_cache, v_cache, starts, lens, tables, k_scale, parts, tops, totals, R, HEADS, SPLITS,
    q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    k_step, scale, softcap, window,
    ALIKE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, REQS: tl.constexpr, K_SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Softmax of Q tokens' rows over one split of their request's keys, item by item."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    i = tl.arange(0, REQS)
    length_R = tl.load(lens + i, mask=i < R, other=0)
    count_R = (length_R + SPLIT - 1) // SPLIT
    if WINDOW:
        count_R -= tl.maximum(length_R - Q - window + 1, 0) // SPLIT
    end_R = tl.cumsum(count_R, 0)
    items = tl.sum(count_R, 0) * HEADS
    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
        head = (item % HEADS).to(tl.int64)
        index = item // HEADS
        r = tl.sum((end_R <= index).to(tl.int32), 0)
        split = index - tl.sum(tl.where(i < r, count_R, 0), 0)
        length = tl.load(lens + r)
        begin = tl.load(starts + r)
        new = tl.load(starts + r + 1) - begin
        first = 0
        if WINDOW:
            first = tl.maximum(length - Q - window + 1, 0)
            split += first // SPLIT
        real = m < new * GROUP
        query_head = head * GROUP + m % GROUP
        at = (begin + m // GROUP).to(tl.int64) * q_row + query_head * q_head
        there = real[:, None] & (d < D)[None, :]
        x = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
        x = x.to(tl.float32) if FLOAT32 else x
        position = length - new + m // GROUP
        last = tl.minimum(length, (split + 1) * SPLIT)
        begin_key = tl.maximum(split * SPLIT, first // KEYS * KEYS)
        acc = tl.zeros((ROWS, WIDTH), tl.float32)
        top = tl.full((ROWS,), float("-inf"), tl.float32)
        total = tl.zeros((ROWS,), tl.float32)
        by_k = tl.load(k_scale + head * k_step) if K_SCALED else 1.0
        acc, top, total = attend_keys(
            acc, top, total, x, position, begin_key, last, first, last,
            tables + r.to(tl.int64) * table_row, k_cache + head * k_head, v_cache + head * v_head,
            k_block, k_slot, v_block, v_slot, scale * by_k, softcap, window,
            ALIKE, SIZE, D, WIDTH, KEYS, CAUSAL, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        at = ((r.to(tl.int64) * HEADS + head) * SPLITS + split) * (Q * GROUP) + m
        tl.store(tops + at, top, mask=real)
        tl.store(totals + at, total, mask=real)
        tl.store(parts + at[:, None] * D + d[None, :], acc, mask=there)


@triton.jit
def merge_kernel(
    starts, lens, parts, tops, totals, sinks, v_scale, out, R, SPLITS, out_row, out_head, window,
    v_step,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, WINDOW: tl.constexpr,
    Q: tl.constexpr, SPLIT: tl.constexpr, MERGED: tl.constexpr,
    SINKS: tl.constexpr, V_SCALED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query head of one token: its splits in order; zeros where there is no such token."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    r, token = tl.program_id(0) // Q, tl.program_id(0) % Q
    query_head = tl.program_id(1)
    heads = tl.num_programs(1) // GROUP
    begin, length = tl.load(starts + r), tl.load(lens + r)
    new = tl.load(starts + r + 1) - begin
    used = tl.load(starts + R)
    d = tl.arange(0, WIDTH)
    into = out + query_head.to(tl.int64) * out_head + d
    if r * Q + token >= used:  # a row past the last request
        zeros = tl.zeros((WIDTH,), out.dtype.element_ty)
        tl.store(into + (r * Q + token).to(tl.int64) * out_row, zeros, mask=d < D)
    if token < new:
        first = 0
        if WINDOW:
            first = tl.maximum(length - Q - window + 1, 0) // SPLIT
        last = (length + SPLIT - 1) // SPLIT
        row = (r.to(tl.int64) * heads + query_head // GROUP) * SPLITS
        row_in_split = token * GROUP + query_head % GROUP
        acc = tl.zeros((WIDTH,), tl.float32)
        top = float("-inf")
        total = 0.0
        for start in tl.range(first, last, MERGED):
            split = start + tl.arange(0, MERGED)
            at = (row + split) * (Q * GROUP) + row_in_split
            live = split < last
            top_S = tl.load(tops + at, mask=live, other=float("-inf"))
            total_S = tl.load(totals + at, mask=live, other=0.0)
            there = live[:, None] & (d < D)[None, :]
            part_SD = tl.load(parts + at[:, None] * D + d[None, :], mask=there, other=0.0)
            higher = tl.maximum(top, tl.max(top_S, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            weight_S = tl.exp2(top_S - base)
            fade = tl.exp2(top - base)
            total = total * fade + tl.sum(total_S * weight_S, 0)
            acc = acc * fade + tl.sum(part_SD * weight_S[:, None], 0)
            top = higher
        by_v = tl.load(v_scale + query_head // GROUP * v_step) if V_SCALED else 1.0
        result = acc * finish(top, total, sinks, query_head, True, by_v, SINKS)
        at = (begin + token).to(tl.int64) * out_row
        tl.store(into + at, result.to(out.dtype.element_ty), mask=d < D)


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
    """See `fngraph.ops.attention`. A batch not known to be uniform goes to the unified kernel."""
    write(k_TKD, v_TKD, kv, meta.slot_mapping, k_scale, v_scale)
    T, R = q_THD.shape[0], meta.seq_lens.shape[0]
    Q = host.max_query_len if host is not None else None
    rows = (Q or 0) * (config.num_heads // config.num_kv_heads)
    if Q is None or T != R * Q or rows > MAX_ROWS:
        triton_unified.attend(q_THD, kv, meta, out_THD, config, sinks, k_scale, v_scale)
    else:
        attend(q_THD, kv, meta, out_THD, config, Q, sinks, k_scale, v_scale)


def attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    config: Any,
    Q: int,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    how: How | None = None,
) -> None:
    """Attention of R * Q rows, where no request brings more than Q tokens, into all of them."""
    q_THD, (k_cache, v_cache) = dense(q_THD), kv
    R, K, D = meta.seq_lens.shape[0], config.num_kv_heads, config.head_dim
    numbers, constants = options(config, kv)
    rows = Q * constants["GROUP"]
    widest = meta.block_tables.shape[1] * config.block_size
    tile, split, programs, early = how or how_to(config, rows, widest)
    splits = -(-widest // split)
    parts = q_THD.new_empty((R, K, splits, rows, D), dtype=torch.float32)
    tops, totals = parts.new_empty((2, R, K, splits, rows)).unbind()
    by_k, k_step = scale_of(k_scale, q_THD)
    by_v, v_step = scale_of(v_scale, q_THD)
    launch(
        split_kernel,
        (min(R * K * splits, processors(q_THD.device) * programs),),
        (q_THD, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables,
         by_k),
        (parts, tops, totals),
        (R, K, splits, *q_THD.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
         meta.block_tables.stride(0), k_step, *numbers),
        ROWS=tile.rows,
        KEYS=tile.keys,
        Q=Q,
        SPLIT=split,
        REQS=power_of_two(R),
        K_SCALED=k_scale is not None,
        early=early,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )  # fmt: skip
    launch(
        merge_kernel,
        (R * Q, config.num_heads),
        (meta.query_start_loc, meta.seq_lens, parts, tops, totals,
         q_THD if sinks is None else sinks, by_v),
        (out_THD,),
        (R, splits, *out_THD.stride()[:2], numbers[2], v_step),
        **{name: constants[name] for name in ("GROUP", "D", "WIDTH", "WINDOW")},
        Q=Q,
        SPLIT=split,
        MERGED=MERGED,
        SINKS=sinks is not None,
        V_SCALED=v_scale is not None,
        early=early,
        num_warps=4,
    )  # fmt: skip


class How(NamedTuple):
    """Static choices of the split kernel: its tile, keys a split, programs a multiprocessor.

    Attributes:
        early: whether both kernels are launched while the one ahead still runs.
    """

    tile: Tile
    split: int
    programs: int
    early: bool = True


def how_to(config: Any, rows: int, widest: int) -> How:
    """By what is the same for every batch; `widest` is what the block table can hold.

    Narrow tiles, so that several programs share a multiprocessor and keep loads in flight. Short
    splits fill the device at batch 1; where requests can be long, fewer cost less to merge.
    """
    rows = power_of_two(rows, at_least=16)
    width = power_of_two(config.head_dim, at_least=16)
    split = next((split for most, split in SPLITS if widest <= most), 1024)
    if compute_dtype(config) == torch.float32:
        return How(Tile(rows, 32, 4, 1), split, 4)
    return How(Tile(rows, 32, 4, 5 if width <= 128 else 3), split, 4)


SPLITS = ((1024, 128), (16384, 256), (32768, 512))
