"""The two Triton kernels of split-KV decode: softmax over each split, then their merging, in order.

Programs take (split, kv head) items in turn from a list that each counts out of `seq_lens`: the
grid fits every batch, dead splits cost nothing, and requests of any lengths share the device.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.ops.triton_keys import attend_keys, finish


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
