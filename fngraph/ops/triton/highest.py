"""Triton kernels of `row_max`: programs that share a row, and one that looks at what they found.

A number and its column are one integer of 64 bits: above, bits that are ordered as the numbers are;
below, what is higher the earlier the column. So the highest is a maximum of integers, which is the
same in any order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.fused import as_rows
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two, processors
from fngraph.ops.triton.overlapping import overlap

BLOCK = 2048  # columns that a program looks at together
INFINITE = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}  # its bits
FILL = 4  # programs a multiprocessor, if there are columns for as many


@triton.jit(do_not_specialize=COUNTS)
def part_kernel(
    x, best, many, x_row, V: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
    MOST_BITS: tl.constexpr, INFINITE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The best of `many` blocks of a row, which comes as integers."""
    overlap(EARLY)
    t, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # of the first, any number
    c = tl.arange(0, BLOCK)
    least = tl.full((BLOCK,), -(2**63), tl.int64)
    top = least
    for block in range(part * many, part * many + many):
        column = block * BLOCK + c
        real = column < V
        bits = tl.load(x + t * x_row + column, mask=real, other=0)
        size = bits.to(tl.int32) & MOST_BITS  # of the number without its sign
        order = tl.where(bits < 0, -size, size)
        order = tl.where(size > INFINITE, MOST_BITS, order)
        found = (order.to(tl.int64) << 32) | (0x7FFFFFFF - column).to(tl.int64)
        top = tl.maximum(top, tl.where(real, found, least))
    tl.store(best + t * MOST + part, tl.max(top, 0))


@triton.jit(do_not_specialize=COUNTS)
def best_kernel(
    x, best, values, indices, count, x_row, MOST: tl.constexpr, LANES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The best of the `count` parts of a row."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, LANES)
    top = tl.max(tl.load(best + t * MOST + i, mask=i < count, other=-(2**63)), 0)
    column = 0x7FFFFFFF - (top & 0x7FFFFFFF)
    tl.store(indices + t, column)
    tl.store(values + t, tl.load(x + t * x_row + column))


def row_max(x: Tensor, keepdim: bool) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.row_max`; x (..., V), where V is not 0."""
    rows = as_rows(x)
    T, V = rows.shape
    shape = (*x.shape[:-1], 1) if keepdim else x.shape[:-1]
    values, indices = x.new_empty(shape), x.new_empty(shape, dtype=torch.int64)
    blocks = -(-V // BLOCK)
    parts = min(blocks, max(1, FILL * processors(x.device) // max(T, 1)))
    many = -(-blocks // parts)
    parts = -(-blocks // many)
    whole = torch.int32 if x.dtype == torch.float32 else torch.int16
    best = x.new_empty((T, blocks), dtype=torch.int64)
    x_row = rows.stride(0) if T > 1 else V
    launch(
        part_kernel, (T, parts), (rows.view(whole),), (best,), (many, x_row), early=True,
        V=V, MOST=blocks, BLOCK=BLOCK, MOST_BITS=torch.iinfo(whole).max, INFINITE=INFINITE[x.dtype],
    )  # fmt: skip
    launch(
        best_kernel, (T,), (rows, best), (values, indices), (parts, x_row), early=True,
        num_warps=1, MOST=blocks, LANES=power_of_two(blocks),
    )  # fmt: skip
    return values, indices
