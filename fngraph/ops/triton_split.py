"""The Triton kernel of split-KV decode: sums over units of each request's keys, one a program.

A unit is a split, or a whole span of splits if the request is long enough to fill the device so
(see `triton_merge`). There is a program for every unit that a request could have, or, where these
are too many, each takes several in turn. Those past the end of their request read its length and
are done; the device gives each next one to whichever multiprocessor is free, which requests of any
lengths share well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.ops.triton_keys import finish, score
from fngraph.ops.triton_merge import by_spans, fold


@triton.jit
def split_kernel(
    q, k_cache, v_cache, starts, lens, tables, sinks, k_scale, v_scale, parts, tops, totals, out,
    R, HEADS, UNITS, EACH, many, q_row, q_head, k_block, k_slot, k_head, v_block, v_slot, v_head,
    table_row, out_row, out_head, k_step, v_step, scale, softcap, window,
    ALIKE: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr,
    WIDTH: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, SPAN: tl.constexpr, SHARED: tl.constexpr, FINAL: tl.constexpr,
    K_SCALED: tl.constexpr, V_SCALED: tl.constexpr, SINKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One unit of the keys that a request sees, or with SHARED every EACH-th of them.

    They count from the first of which it sees any key. Requests of more than `many` splits go by
    spans of SPAN keys, if it is more than SPLIT. With FINAL one unit holds all keys of a request,
    if there are any: what would be merged is written to `out`.
    """
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = (tl.program_id(0) % HEADS).to(tl.int64)
    r = tl.program_id(0) // HEADS % R
    unit = tl.program_id(0) // HEADS // R  # late ones last: most are past the end
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
    size = SPLIT
    if SPAN > SPLIT:
        size = tl.where(by_spans(first, length, many, SPLIT), SPAN, SPLIT)
    real = m < new * GROUP
    token = (begin + m // GROUP).to(tl.int64)
    there = real[:, None] & (d < D)[None, :]
    at = token * q_row + query_head * q_head
    x = tl.load(q + at[:, None] + d[None, :], mask=there, other=0.0)
    by_k = tl.load(k_scale + head * k_step) if K_SCALED else 1.0
    count = (length + size - 1) // size - first // size
    rounds = 1 if FINAL else (count > unit).to(tl.int32)
    if SHARED:  # a length past the table must not reach what is another's
        rounds = tl.cdiv(tl.minimum(count, UNITS) - unit, EACH)
    for _ in tl.range(0, rounds, num_stages=1):
        key = first // size * size + unit * size
        last = tl.minimum(length, key + size)
        acc, top, total = sum_keys(
            x.to(tl.float32) if FLOAT32 else x, length - new + m // GROUP,
            tl.maximum(key, first // KEYS * KEYS), first, last,
            tables + r.to(tl.int64) * table_row, k_cache + head * k_head, v_cache + head * v_head,
            k_block, k_slot, v_block, v_slot, scale * by_k, softcap, window,
            ALIKE, SIZE, D, WIDTH, CAUSAL, WINDOW, SOFTCAP, ROWS, KEYS, Q, SPLIT, SPAN,
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
        unit += EACH


@triton.jit
def sum_keys(
    q, position, begin, first, last, table, k_cache, v_cache,
    k_block, k_slot, v_block, v_slot, scale, softcap, window,
    ALIKE: tl.constexpr, SIZE: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, Q: tl.constexpr, SPLIT: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Keys begin <= n < last, split by split: weighted values, largest scores, sums of weights.

    Weights are summed by a product with ones: no warp waits for another, and the order of the sum
    is the tile's, however many warps share it. A tile's blocks are looked up while the tile before
    is summed, so that its keys can be on their way a tile earlier.
    """
    d = tl.arange(0, WIDTH)
    ones = tl.full((KEYS, 16), 1.0, q.dtype)
    part = tl.zeros((ROWS, WIDTH), tl.float32)
    part_top = tl.full((ROWS,), float("-inf"), tl.float32)
    part_total = tl.zeros((ROWS, 16), tl.float32)
    acc, top, total = part, part_top, tl.zeros((ROWS,), tl.float32)
    ahead = tl.load(table + within(begin + tl.arange(0, KEYS), first, last) // SIZE)
    for start in tl.range(begin, last, KEYS):
        n = start + tl.arange(0, KEYS)
        block = ahead.to(tl.int64)
        ahead = tl.load(table + within(n + KEYS, first, last) // SIZE)
        row = within(n, first, last) % SIZE
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
        if SPAN > SPLIT:
            if (start + KEYS) % SPLIT == 0:
                acc, top, total = fold(acc, top, total, part, part_top, tl.max(part_total, 1))
                part = tl.zeros((ROWS, WIDTH), tl.float32)
                part_top = tl.full((ROWS,), float("-inf"), tl.float32)
                part_total = tl.zeros((ROWS, 16), tl.float32)
    return fold(acc, top, total, part, part_top, tl.max(part_total, 1))


@triton.jit
def within(n, first, last):
    """The nearest keys first <= n < last: always ones to read."""
    return tl.maximum(tl.minimum(n, last - 1), first).to(tl.uint32)
