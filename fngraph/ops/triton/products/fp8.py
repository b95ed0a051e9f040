"""The Triton kernels of products in fp8 of few rows.

A product of few rows is as fast as its weights are read. Each program reads some rows of the weight
(columns of the result), or a part of each of them, once for all rows of x. One row is
`skinny_fp8.py`'s; more go through tensor cores as float16, in which every number of float8_e4m3fn
is exact and so is each product in float32. Scales come at the end, as in the plain form, and a sum
behind them. Parts are added by a second kernel, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import COUNTS, launch, power_of_two, processors
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.products import skinny_fp8
from fngraph.ops.triton.products.skinny import added, around


class How(NamedTuple):
    """Static choices of a product of few rows.

    Attributes:
        columns: of the result, that a program makes.
        wide: what it reads of their weights at a time.
        splits: parts of K, each with programs of its own.
        num_warps, num_stages: of a program; `one_kernel`, for one row, has no stages.
    """

    columns: int
    wide: int
    splits: int
    num_warps: int
    num_stages: int


def how_to(T: int, N: int, K: int, places: int) -> How:
    """By shapes alone: enough programs for the multiprocessors (`places`), K split if N is small.

    A row of a result has the same bits for any 2 <= T <= 16. One row takes all of a weight's row at
    a time, or 16384 of it, before the wait: on an H200 3.1 to 4.1 TB/s, 2.2 to 3.5 in a pipeline.
    """
    if T == 1:
        columns, wide, warps = skinny_fp8.tile_of_one(K, rounded=True)
        return How(columns, wide, 1, warps, 0)
    splits = 1
    while splits < 8 and -(-N // 64) * splits < 2 * places and K // (2 * splits) >= 512:
        splits *= 2
    return How(64, 128, splits, 4, 4)


def linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *,
    held: bool = False, how: How | None = None, more: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """See `fngraph.ops.fp8.scaled_linear`; of at most 16 rows.

    Args:
        more: (T, N) of `dtype`, added to the rounded product, rounded again.
        out: (T, N) of `dtype` to write to; it may have gaps between rows. None: a new one.
    """
    (T, K), N = x.shape, weight.shape[0]
    how = how or how_to(T, N, K, processors(x.device))
    out = x.new_empty((T, N), dtype=dtype) if out is None else out
    x, scales = x.contiguous(), (x_scale, weight_scale)
    if T == 1:
        tile = skinny_fp8.Tile(how.columns, how.wide, how.num_warps)
        skinny_fp8.run(
            x, [weight], [weight_scale], out, dtype, x_scale=x_scale, more=more, held=held,
            tile=tile,
        )  # fmt: skip
        return out
    blocks, steps = -(-N // how.columns), tuple(int(y.dim() > 0) for y in scales)
    added = weight_scale if more is None else more
    rows = (0 if more is None else more.stride(0), out.stride(0))
    each = -(-K // (how.splits * how.wide)) * how.wide
    split = how.splits > 1
    parts = x.new_empty((how.splits, T, N), dtype=torch.float32) if split else out
    launch(
        few_kernel,
        (blocks, how.splits),
        (x, weight, *scales, added),
        (parts,),
        (T, N, each, *steps, *rows),
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        early=True,
        K=K,
        COLUMNS=how.columns,
        WIDE=how.wide,
        STAGES=how.num_stages,
        SPLIT=split,
        EVEN=N % how.columns == 0 and K % (how.splits * how.wide) == 0,
        ADDS=more is not None,
    )
    if split:
        block = min(256, power_of_two(N))
        launch(
            add_kernel,
            (T, -(-N // block)),
            (parts, *scales, added),
            (out,),
            (T, N, *steps, *rows),
            early=True,
            SPLITS=how.splits,
            BLOCK=block,
            ADDS=more is not None,
        )
    return out


@triton.jit(do_not_specialize=COUNTS)
def few_kernel(
    x, weight, x_scale, weight_scale, more, out, T, N, each, x_step, weight_step, more_row, out_row,
    K: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of up to 16 rows, or with SPLIT the sums of `each` of K, without scales.

    With EVEN nothing is read past the end of the weight.
    """
    overlap(EARLY)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    t = tl.arange(0, 16)
    step = tl.arange(0, WIDE)
    there = n < N
    weights = weight + n.to(tl.int64)[:, None] * K
    first = tl.program_id(1) * each
    total = tl.zeros((16, COLUMNS), tl.float32)
    for start in tl.range(first, tl.minimum(first + each, K), WIDE, num_stages=STAGES):
        k = start + step
        if EVEN:
            w = tl.load(weights + k[None, :], eviction_policy="evict_first")
        else:
            real = there[:, None] & (k < K)[None, :]
            w = tl.load(weights + k[None, :], mask=real, other=0.0)
        rows = (t < T)[:, None] if EVEN else (t < T)[:, None] & (k < K)[None, :]
        a = tl.load(x + t[:, None] * K + k[None, :], mask=rows, other=0.0)
        total = tl.dot(a.to(tl.float16), tl.trans(w.to(tl.float16)), total)
    real = (t < T)[:, None] & there[None, :]
    if SPLIT:
        at = t[:, None] * N + n[None, :]
        tl.store(out + tl.program_id(1).to(tl.int64) * T * N + at, total, mask=real)
    else:
        by_row = tl.load(x_scale + t * x_step, mask=t < T, other=0.0)
        by_column = tl.load(weight_scale + n * weight_step, mask=there, other=0.0)
        made = total * by_row[:, None] * by_column[None, :]
        kind = out.dtype.element_ty
        by = added(more, t, n, T, there, more_row, ADDS)
        made = around(made, made, by, kind, False, ADDS)
        at = t.to(tl.int64)[:, None] * out_row + n[None, :]
        tl.store(out + at, made.to(kind), mask=real)


@triton.jit(do_not_specialize=COUNTS)
def add_kernel(
    parts, x_scale, weight_scale, more, out, T, N, x_step, weight_step, more_row, out_row,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of row t: its parts from the first to the last, the scales, and the sum."""
    overlap(EARLY)
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = t.to(tl.int64) * N + n
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPLITS):
        total += tl.load(parts + i * T * N + at, mask=n < N, other=0.0)
    by_column = tl.load(weight_scale + n * weight_step, mask=n < N, other=0.0)
    made = total * tl.load(x_scale + t * x_step) * by_column
    kind = out.dtype.element_ty
    row = t.to(tl.int64)
    by = tl.load(more + row * more_row + n, mask=n < N, other=0.0).to(tl.float32) if ADDS else 0.0
    made = around(made, made, by, kind, False, ADDS)
    tl.store(out + row * out_row + n, made.to(kind), mask=n < N)
