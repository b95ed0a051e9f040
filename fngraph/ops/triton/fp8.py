"""The Triton kernels of `fngraph.ops.fp8`: quantising, and products of few rows.

A product of few rows is as fast as its weights are read. Each program reads some rows of the weight
(columns of the result), or a part of each of them, once for all rows of x. One row is multiplied
and summed as it is, in float32; more go through tensor cores as float16, in which every number of
float8_e4m3fn is exact and so is each product in float32. Scales come at the end, as in the plain
form. Parts are added by a second kernel, in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import COUNTS, interpreted, launch, power_of_two, processors
from fngraph.ops.triton.overlapping import let_next, overlap, wait

FP8 = torch.float8_e4m3fn
BY_HAND = tl.constexpr(interpreted())
"""The interpreter rounds wrongly; a GPU has an instruction."""


@triton.jit
def scale_of_row(wide):
    """The scale of a row in float32, 0 where it has ended: its largest / 448, at least 2**-126."""
    top = tl.max(tl.abs(wide), 0)
    scale = tl.maximum(tl.div_rn(top, tl.full((), 448.0, tl.float32)), 1.1754943508222875e-38)
    spoilt = tl.max((wide != wide).to(tl.int32), 0) > 0  # a maximum passes NaN over
    return tl.where(spoilt, float("nan"), scale)


@triton.jit
def as_fp8(wide, scale):
    """wide / scale in float8_e4m3fn, cut off at +-448; NaN stays."""
    x = tl.div_rn(wide, scale + tl.zeros_like(wide))
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    if BY_HAND:
        bits = tl.abs(x).to(tl.int32, bitcast=True)
        normal = (
            (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        ) - 960  # exponents begin at -7, not -127
        small = (tl.abs(x) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000  # in steps of 2**-9
        code = tl.where(tl.abs(x) < 0.015625, small, normal)
        code = tl.where(x != x, 0x7F, code) | ((x.to(tl.int32, bitcast=True) >> 24) & 0x80)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)
    return x.to(tl.float8e4nv)


@triton.jit
def put_rounded(into, x, scale, like, mask, ROUNDS: tl.constexpr):
    """Store x in the dtype of `into`; with ROUNDS as fp8 by the scale, in the dtype of `like`
    first."""
    if ROUNDS:
        wide = x.to(like.dtype.element_ty).to(tl.float32)
        tl.store(into, as_fp8(wide, tl.load(scale)), mask=mask)
    else:
        tl.store(into, x.to(into.dtype.element_ty), mask=mask)


@triton.jit
def quantize_kernel(
    x, scale, values, x_row, x_column, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """BLOCK columns of row t, by one scale."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wide = tl.load(x + t * x_row + k * x_column, mask=k < K, other=0.0).to(tl.float32)
    tl.store(values + t * K + k, as_fp8(wide, tl.load(scale)), mask=k < K)


@triton.jit
def quantize_rows_kernel(
    x, values, scales, x_row, x_column, K: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Row t, by its own scale."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    wide = tl.load(x + t * x_row + k * x_column, mask=k < K, other=0.0).to(tl.float32)
    scale = scale_of_row(wide)
    tl.store(values + t * K + k, as_fp8(wide, scale), mask=k < K)
    tl.store(scales + t, scale)


def quantize(x: Tensor, scale: Tensor) -> Tensor:
    """See `fngraph.ops.fp8.quantize_fp8`."""
    rows, values = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape, dtype=FP8)
    count, K = rows.shape
    block = min(1024, power_of_two(K))
    launch(
        quantize_kernel,
        (count, -(-K // block)),
        (rows, scale),
        (values,),
        rows.stride(),
        early=True,
        K=K,
        BLOCK=block,
    )
    return values


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fp8.quantize_fp8_rows`."""
    rows, values = x.reshape(-1, x.shape[-1]), x.new_empty(x.shape, dtype=FP8)
    scales = x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)
    count, K = rows.shape
    launch(
        quantize_rows_kernel,
        (count,),
        (rows,),
        (values, scales),
        rows.stride(),
        num_warps=4 if K <= 1024 else 8 if K <= 4096 else 16,
        early=True,
        K=K,
        BLOCK=power_of_two(K),
    )
    return values, scales


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
        wide = min(power_of_two(K), 16384)
        return How(2, wide, 1, 4 if wide <= 8192 else 8, 0)
    splits = 1
    while splits < 8 and -(-N // 64) * splits < 2 * places and K // (2 * splits) >= 512:
        splits *= 2
    return How(64, 128, splits, 4, 4)


def linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype, *,
    held: bool = False, how: How | None = None,
) -> Tensor:  # fmt: skip
    """See `fngraph.ops.fp8.scaled_linear`; of at most 16 rows."""
    (T, K), N = x.shape, weight.shape[0]
    how = how or how_to(T, N, K, processors(x.device))
    out, x = x.new_empty((T, N), dtype=dtype), x.contiguous()
    blocks, scales = -(-N // how.columns), (x_scale, weight_scale)
    steps = tuple(int(y.dim() > 0) for y in scales)
    if T == 1:
        launch(
            one_kernel,
            (blocks,),
            (x, weight, *scales),
            (out,),
            (N, *steps),
            num_warps=how.num_warps,
            early=True,
            K=K,
            COLUMNS=how.columns,
            WIDE=how.wide,
            HELD=held and x.is_cuda and torch.cuda.is_current_stream_capturing(),
        )
        return out
    each = -(-K // (how.splits * how.wide)) * how.wide
    parts = out if how.splits == 1 else x.new_empty((how.splits, T, N), dtype=torch.float32)
    launch(
        few_kernel,
        (blocks, how.splits),
        (x, weight, *scales),
        (parts,),
        (T, N, each, *steps),
        num_warps=how.num_warps,
        num_stages=how.num_stages,
        early=True,
        K=K,
        COLUMNS=how.columns,
        WIDE=how.wide,
        STAGES=how.num_stages,
        SPLIT=how.splits > 1,
        EVEN=N % how.columns == 0 and K % (how.splits * how.wide) == 0,
    )
    if how.splits > 1:
        block = min(256, power_of_two(N))
        launch(
            add_kernel,
            (T, -(-N // block)),
            (parts, *scales),
            (out,),
            (T, N, *steps),
            early=True,
            SPLITS=how.splits,
            BLOCK=block,
        )
    return out


@triton.jit
def one_kernel(
    x, weight, x_scale, weight_scale, out, N, x_step, weight_step,
    K: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, HELD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one row; what is held is read before the wait, WIDE of K of it."""
    let_next(EARLY)
    wait(EARLY and not HELD)
    n = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDE)
    real = n < N
    at = weight + n.to(tl.int64)[:, None] * K + k[None, :]
    tile = tl.load(at, mask=real[:, None] & (k < K)[None, :], other=0.0)
    by_column = tl.load(weight_scale + n * weight_step, mask=real, other=0.0)
    wait(EARLY and HELD)
    if WIDE >= K:  # it has been read
        v = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        sums = tl.sum(tile.to(tl.float32) * v[None, :], 1)
    else:
        total = tl.zeros((COLUMNS, WIDE), tl.float32)
        for start in range(0, K, WIDE):
            now = tile
            there = real[:, None] & (start + WIDE + k < K)[None, :]
            tile = tl.load(at + start + WIDE, mask=there, other=0.0)
            v = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            total += now.to(tl.float32) * v[None, :]
        sums = tl.sum(total, 1)
    made = sums * tl.load(x_scale) * by_column
    tl.store(out + n, made.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=COUNTS)
def few_kernel(
    x, weight, x_scale, weight_scale, out, T, N, each, x_step, weight_step,
    K: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, STAGES: tl.constexpr,
    SPLIT: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
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
    at = t[:, None] * N + n[None, :]
    if SPLIT:
        tl.store(out + tl.program_id(1).to(tl.int64) * T * N + at, total, mask=real)
    else:
        by_row = tl.load(x_scale + t * x_step, mask=t < T, other=0.0)
        by_column = tl.load(weight_scale + n * weight_step, mask=there, other=0.0)
        made = total * by_row[:, None] * by_column[None, :]
        tl.store(out + at, made.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=COUNTS)
def add_kernel(
    parts, x_scale, weight_scale, out, T, N, x_step, weight_step,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of row t: its parts from the first to the last, and the scales."""
    overlap(EARLY)
    t = tl.program_id(0)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = t.to(tl.int64) * N + n
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(SPLITS):
        total += tl.load(parts + i * T * N + at, mask=n < N, other=0.0)
    by_column = tl.load(weight_scale + n * weight_step, mask=n < N, other=0.0)
    made = total * tl.load(x_scale + t * x_step) * by_column
    tl.store(out + at, made.to(out.dtype.element_ty), mask=n < N)
