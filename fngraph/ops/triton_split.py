"""The Triton kernel of split-KV decode: sums over units of each request's keys.

A unit is a split, or a whole span of splits where there are programs enough without (see
`triton_merge`). One program to each is quick to begin; where most could be past the end of their
request, fewer programs count the units out of `seq_lens` and take them in turn.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.ops.triton_keys import finish, score
from fngraph.ops.triton_merge import fold


@triton.jit
def split_kernel(
    q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, parts, tops, totals, out,
    R, HEADS, UNITS, q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    out_row, out_head, k_step, v_step, scale, softcap, window,
    ALIKE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, REQS: tl.constexpr, EACH: tl.constexpr,
    FINAL: tl.constexpr, K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, SINKS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Units of UNIT keys: with EACH a program for every one that there could be.

    With FINAL a unit holds all keys of a request; what would be merged is written to `out`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if EACH:
        index = tl.program_id(0) // HEADS
        attend_unit(
            index // UNITS, (tl.program_id(0) % HEADS).to(tl.int64), index % UNITS,
            q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, parts, tops, totals,
            out, R, HEADS, UNITS, q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
            table_row, out_row, out_head, k_step, v_step, scale, softcap, window,
            ALIKE, GROUP, SIZE, D, WIDTH, CAUSAL, WINDOW, SOFTCAP, FLOAT32, ROWS, KEYS, Q,
            SPLIT, UNIT, FINAL, K_SCALED, V_SCALED, SINKS,
        )  # fmt: skip
    else:
        i = tl.arange(0, REQS)
        length_R = tl.load(lens + i, mask=i < R, other=0)
        count_R = (length_R + UNIT - 1) // UNIT
        if WINDOW:  # of a request that brings less than Q, one too many at most
            count_R -= tl.maximum(length_R - Q - window + 1, 0) // UNIT
        end_R = tl.cumsum(count_R, 0)
        items = tl.sum(count_R, 0) * HEADS
        for item in tl.range(tl.program_id(0), items, tl.num_programs(0), num_stages=1):
            index = item // HEADS
            r = tl.sum((end_R <= index).to(tl.int32), 0)
            unit = index - tl.sum(tl.where(i < r, count_R, 0), 0)
            attend_unit(
                r, (item % HEADS).to(tl.int64), unit,
                q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, parts, tops,
                totals, out, R, HEADS, UNITS, q_row, q_head, k_block, k_slot, k_head, v_block,
                v_slot, v_head, table_row, out_row, out_head, k_step, v_step, scale, softcap,
                window,
                ALIKE, GROUP, SIZE, D, WIDTH, CAUSAL, WINDOW, SOFTCAP, FLOAT32, ROWS, KEYS, Q,
                SPLIT, UNIT, FINAL, K_SCALED, V_SCALED, SINKS,
            )  # fmt: skip


@triton.jit
def attend_unit(
    r, head, unit,
    q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, parts, tops, totals, out,
    R, HEADS, UNITS, q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head, table_row,
    out_row, out_head, k_step, v_step, scale, softcap, window,
    ALIKE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, UNIT: tl.constexpr, FINAL: tl.constexpr, K_SCALED: tl.constexpr,
    V_SCALED: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One unit of the keys that a request sees, counted from the first that it sees any of."""
    m = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    length = tl.load(lens + r)
    begin = tl.load(starts + r)
    new = tl.load(starts + r + 1) - begin
    query_head = head * GROUP + m % GROUP
    if FINAL:  # rows past the last request
        row = r * Q + m // GROUP
        at = row.to(tl.int64) * out_row + query_head * out_head
        past = (m < Q * GROUP) & (row >= tl.load(starts + R))
        zeros = tl.zeros((ROWS, WIDTH), out.dtype.element_ty)
        tl.store(out + at[:, None] + d[None, :], zeros, mask=past[:, None] & (d < D)[None, :])
    first = 0
    if WINDOW:
        first = tl.maximum(length - tl.maximum(new, 1) - window + 1, 0)
        unit += first // UNIT
    last = tl.minimum(length, (unit + 1) * UNIT)
    begin_key = tl.maximum(unit * UNIT, first // KEYS * KEYS)
    if FINAL or begin_key < last:
        real = m < new * GROUP
        token = (begin + m // GROUP).to(tl.int64)
        there = real[:, None] & (d < D)[None, :]
        at = token * q_row + query_head * q_head
        x = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
        by_k = tl.load(k_scale + head * k_step) if K_SCALED else 1.0
        acc, top, total = sum_keys(
            x.to(tl.float32) if FLOAT32 else x, length - new + m // GROUP, begin_key, first, last,
            tables + r.to(tl.int64) * table_row, k_cache + head * k_head, v_cache + head * v_head,
            k_block, k_slot, v_block, v_slot, scale * by_k, softcap, window,
            ALIKE, SIZE, D, WIDTH, CAUSAL, WINDOW, SOFTCAP, ROWS, KEYS, Q, SPLIT, UNIT,
        )  # fmt: skip
        if FINAL:
            by_v = tl.load(v_scale + head * v_step) if V_SCALED else 1.0
            acc *= finish(top, total, sinks, query_head, real, by_v, SINKS)[:, None]
            at = token * out_row + query_head * out_head
            tl.store(out + at[:, None] + d[None, :], acc.to(out.dtype.element_ty), mask=there)
        else:
            at = ((r.to(tl.int64) * HEADS + head) * UNITS + unit) * (Q * GROUP) + m
            tl.store(tops + at, top, mask=real)
            tl.store(totals + at, total, mask=real)
            tl.store(parts + at[:, None] * D + d[None, :], acc, mask=there)


@triton.jit
def sum_keys(
    q, position, begin, first, last, table, k_cache, v_cache,
    k_block, k_slot, v_block, v_slot, scale, softcap, window,
    ALIKE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, Q: tl.constexpr, SPLIT: tl.constexpr, UNIT: tl.constexpr,
):  # fmt: skip
    """Keys begin <= n < last, split by split: weighted values, largest scores, sums of weights.

    Weights are summed by a product with ones: no warp waits for another, and the order of the sum
    is the tile's, however many warps share it.
    """
    d = tl.arange(0, WIDTH)
    ones = tl.full((KEYS, 16), 1.0, q.dtype)
    part = tl.zeros((ROWS, WIDTH), tl.float32)
    part_top = tl.full((ROWS,), float("-inf"), tl.float32)
    part_total = tl.zeros((ROWS, 16), tl.float32)
    acc, top, total = part, part_top, tl.zeros((ROWS,), tl.float32)
    for start in tl.range(begin, last, KEYS):
        n = start + tl.arange(0, KEYS)
        near = tl.minimum(n, last - 1)  # always a key to read
        if WINDOW:
            near = tl.maximum(near, first)
        near = near.to(tl.uint32)
        block = tl.load(table + near // SIZE).to(tl.int64)
        row = near % SIZE
        k_at = (block * k_block + row * k_slot)[:, None] + d[None, :]
        v_at = k_at if ALIKE else (block * v_block + row * v_slot)[:, None] + d[None, :]
        if WIDTH == D:
            k = tl.load(k_cache + k_at)
            v = tl.load(v_cache + v_at)
        else:
            k = tl.load(k_cache + k_at, mask=(d < D)[None, :], other=0.0)
            v = tl.load(v_cache + v_at, mask=(d < D)[None, :], other=0.0)
        live = (n >= first) & (n < last)
        scores = score(
            q, k, n, live, position, scale, softcap, window,
            CAUSAL and Q > 1, WINDOW, SOFTCAP, True,
        )  # fmt: skip
        higher = tl.maximum(part_top, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - base[:, None]).to(q.dtype)
        fade = tl.exp2(part_top - base)[:, None]
        part_top = higher
        part_total = tl.dot(weights, ones, part_total * fade, input_precision="ieee")
        part = tl.dot(weights, v.to(q.dtype), part * fade, input_precision="ieee")
        if UNIT > SPLIT:
            if (start + KEYS) % SPLIT == 0:
                acc, top, total = fold(acc, top, total, part, part_top, tl.max(part_total, 1))
                part = tl.zeros((ROWS, WIDTH), tl.float32)
                part_top = tl.full((ROWS,), float("-inf"), tl.float32)
                part_total = tl.zeros((ROWS, 16), tl.float32)
    return fold(acc, top, total, part, part_top, tl.max(part_total, 1))
