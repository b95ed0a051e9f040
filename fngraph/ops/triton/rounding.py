"""The Triton kernels that round to fp8, with the bits of their plain form, and what kernels that
round what they make share."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import interpreted, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap

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
def row_as_fp8(wide, scale):
    """`as_fp8` of a row that is multiplied next, by one scale, in half its instructions.

    The quotient by the inverse, mended by what is left of the division, is the nearest too
    (Markstein): these are the same bits but for the sign of zeros. A scale below 2**-126, whose
    inverse may be infinite, counts as that.
    """
    if BY_HAND:  # whose fma rounds twice
        return as_fp8(wide, scale)
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)  # NaN stays
    inverse = tl.div_rn(tl.full((), 1.0, tl.float32), scale)
    quotient = wide * inverse
    left = tl.fma(-quotient, scale + tl.zeros_like(wide), wide)
    mended = tl.fma(left, inverse + tl.zeros_like(wide), quotient)
    # the instruction cuts off, an infinity too, of which `left` is NaN
    return tl.where(tl.abs(quotient) < 448.0, mended, quotient).to(tl.float8e4nv)


@triton.jit
def as_rounded(x, kind: tl.constexpr):
    """x, float32, rounded to `kind` whatever is done with it next. Of a product in half precision
    and a sum compilers make one instruction, which leaves the product's rounding out."""
    if BY_HAND or kind == tl.float32:
        x = x.to(kind).to(tl.float32)
    elif kind == tl.bfloat16:
        x = tl.inline_asm_elementwise(
            "cvt.rn.bf16.f32 $0, $1;", "=h,f", [x], dtype=tl.bfloat16, is_pure=True, pack=1
        ).to(tl.float32)
    else:
        x = tl.inline_asm_elementwise(
            "cvt.rn.f16.f32 $0, $1;", "=h,f", [x], dtype=tl.float16, is_pure=True, pack=1
        ).to(tl.float32)
    return x


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
