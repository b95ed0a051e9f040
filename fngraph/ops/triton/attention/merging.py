"""Sums over parts of a request's keys, and how they become its attention: always in one order.

A split is a fixed number of keys; SPLITS splits in a row are a span. A span's sums are its splits'
folded from the first to the last, by whichever program: one that reads the whole span does it on
the way; for splits that several programs read, attention's last one does it (`decode`), and
`merge_kernel` for latent attention. Bits are the same.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.repeating import Launches

SPLITS = 8  # of a span, in order


@triton.jit
def fold(acc, top, total, part, part_top, part_total):
    """Sums so far and those of the keys that come next. Rounded alike wherever it is compiled."""
    higher = tl.maximum(top, part_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(top - base)
    weight = tl.exp2(part_top - base)
    acc = tl.fma(part, tl.expand_dims(weight, -1), acc * tl.expand_dims(fade, -1))
    return acc, higher, tl.fma(part_total, weight, total * fade)


@triton.jit
def by_spans(first, length, many, SPLIT: tl.constexpr):
    """Whether a request that sees keys first <= n < length has more than `many` splits of them."""
    return (length + SPLIT - 1) // SPLIT - first // SPLIT > many


@triton.jit(do_not_specialize=COUNTS)
def merge_kernel(
    starts, lens, parts, tops, totals, out, R, UNITS, out_row, out_head,
    GROUP: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr,
    SPLIT: tl.constexpr, SPLITS: tl.constexpr, BESIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One query head of one token: its spans in order; zeros where there is no such token.

    What is read before the wait was written before the kernel ahead began.
    """
    r, token = tl.program_id(0) // Q, tl.program_id(0) % Q
    query_head = tl.program_id(1)
    heads = tl.num_programs(1) // GROUP
    begin, length = tl.load(starts + r), tl.load(lens + r)
    new = tl.load(starts + r + 1) - begin
    used = tl.load(starts + R)
    d = tl.arange(0, WIDTH)
    into = out + query_head.to(tl.int64) * out_head + d
    at = (r.to(tl.int64) * heads + query_head // GROUP) * UNITS * (Q * GROUP)
    at += token * GROUP + query_head % GROUP
    overlap(EARLY)
    if r * Q + token >= used:  # a row past the last request
        zeros = tl.zeros((WIDTH,), out.dtype.element_ty)
        tl.store(into + (r * Q + token).to(tl.int64) * out_row, zeros, mask=d < D)
    if token < new:
        one = tl.arange(0, 1)
        acc, _, total = merge_units(
            parts + at * D, tops + at, totals + at, one, one == 0, 0, (length + SPLIT - 1) // SPLIT,
            SPLITS, D, WIDTH, 1, Q * GROUP, SPLITS, BESIDE,
        )  # fmt: skip
        at = (begin + token).to(tl.int64) * out_row
        made = acc * (1.0 / tl.where(total > 0, total, 1.0))[:, None]
        tl.store((into + at)[None, :], made.to(out.dtype.element_ty), mask=(d < D)[None, :])


@triton.jit
def merge_units(
    parts, tops, totals, m, real, first, units, per,
    D: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr,
    PER: tl.constexpr, BESIDE: tl.constexpr,
):  # fmt: skip
    """Sums of units in order, `per` <= PER to a span, of which the first may be cut off.

    Loads of BESIDE spans go together: a program of one row waits once for all. As tensors of their
    own, since a sum over a dim of spans would be a wait of all warps each: a layer of 8B at one
    request of 512 tokens took 136 us by that, and 127 without, on an H200.
    """
    d = tl.arange(0, WIDTH)[None, :]
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for span in tl.range(first // per, (first + units + per - 1) // per, BESIDE, num_stages=1):
        for s in tl.static_range(BESIDE):
            acc_S = tl.zeros((ROWS, WIDTH), tl.float32)
            top_S = tl.full((ROWS,), float("-inf"), tl.float32)
            total_S = tl.zeros((ROWS,), tl.float32)
            for i in tl.static_range(PER):
                unit = (span + s) * per + i - first
                row = m + unit * STEP
                live = real & (i < per) & (unit >= 0) & (unit < units)
                part_top = tl.load(tops + row, mask=live, other=float("-inf"), cache_modifier=".cg")
                part_total = tl.load(totals + row, mask=live, other=0.0, cache_modifier=".cg")
                at = parts + row[:, None] * D + d
                part = tl.load(at, mask=live[:, None] & (d < D), other=0.0, cache_modifier=".cg")
                acc_S, top_S, total_S = fold(acc_S, top_S, total_S, part, part_top, part_total)
            acc, top, total = fold(acc, top, total, acc_S, top_S, total_S)
    return acc, top, total


class Sums(NamedTuple):
    """Sums of each request, kv head and unit; rows go token by token, by query heads in each.

    Attributes:
        parts: (R, K, units, rows, D) float32, weighted values.
        tops: (R, K, units, rows), the largest score, in powers of two.
        totals: (R, K, units, rows), sums of weights.
    """

    parts: Tensor
    tops: Tensor
    totals: Tensor


def empty(like: Tensor, R: int, K: int, units: int, rows: int, D: int) -> Sums:
    """Room for sums, on the device of `like`."""
    parts = like.new_empty((R, K, units, rows, D), dtype=torch.float32)
    return Sums(parts, *parts.new_empty((2, R, K, units, rows)).unbind())


def merge(
    sums: Sums, meta: Any, out_THD: Tensor, Q: int, split: int, *, early: bool = True,
    kept: Launches | None = None,
) -> None:  # fmt: skip
    """Launch `merge_kernel` into all rows of `out_THD`; `sums` has the splits of each request."""
    R, K, units, rows, D = sums.parts.shape
    launch(
        merge_kernel,
        (R * Q, K * rows // Q),
        (meta.query_start_loc, meta.seq_lens, *sums),
        (out_THD,),
        (R, units, *out_THD.stride()[:2]),
        GROUP=rows // Q,
        D=D,
        WIDTH=power_of_two(D, at_least=16),
        Q=Q,
        SPLIT=split,
        SPLITS=SPLITS,
        BESIDE=4 if units > SPLITS else 1,
        early=early,
        kept=kept,
        num_warps=4,
    )
