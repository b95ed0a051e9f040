"""The Triton kernel of linear layers in fp8 with one row of input, with what is around them.

All that it costs is reading the weights once, as in `skinny.py`: a program takes some rows of a
weight, or of one of several, over the whole of K, and sums in float32. The norm and the rounding of
the row are made by each program for itself, between the wait and the products: so a program that
makes them takes more rows of the weights.

It rounds where the ops one by one round: norm, values in fp8, products, gate, sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import launch, power_of_two
from fngraph.ops.triton.overlapping import ask_for, let_next, wait
from fngraph.ops.triton.products.skinny import around, part_of
from fngraph.ops.triton.rounding import FP8, as_fp8, row_as_fp8, scale_of_row

WHOLE = 16384
"""The widest row that a program takes as a whole."""
ROUNDED, KNOWN, OWN = 0, 1, 2  # how a row comes to fp8: it is; by a known scale; by its own


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        columns: of the result, rows of a weight, of both of a gate.
        wide: of K at a time; all of it, but for a row that is in fp8 already and wider.
        warps: of its kernel.
    """

    columns: int
    wide: int
    warps: int


def tile_of_one(K: int, rounded: bool, gated: bool = False) -> Tile:
    """By static shapes, and whether the row is in fp8 already.

    Then it is two columns, of a gate one of both: on an H200 3.2 to 4.1 TB/s of weights. To norm
    and round a row takes some 27 instructions an element, as much as ten rows of a weight; so eight
    of these share it.
    """
    wide = min(power_of_two(K), WHOLE)
    if rounded:
        warps = 2 if wide <= 4096 and not gated else 4 if wide <= 8192 else 8
        return Tile(1 if gated and wide <= 4096 else 2, wide, warps)
    rows = 8 if wide <= 4096 else 4 if wide <= 8192 else 2
    warps = 2 if wide <= 2048 else 4 if wide <= 4096 else 8
    return Tile(max(1, rows // 2) if gated else rows, wide, warps)


@triton.jit
def one_kernel(
    x, norm, x_scale, a, b, c, a_scale, b_scale, c_scale, more, out_scale, out, A, B, C, width, eps,
    K: tl.constexpr, COLUMNS: tl.constexpr, WIDE: tl.constexpr, WEIGHTS: tl.constexpr,
    BY_ROW: tl.constexpr, INPUT: tl.constexpr, NORMS: tl.constexpr, CENTRED: tl.constexpr,
    GATED: tl.constexpr, ADDS: tl.constexpr, ROUNDS: tl.constexpr, HELD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """COLUMNS columns of one row, by one weight, with GATED by both; what is HELD is read before
    the wait. Products are rounded to the dtype of `more`.

    K stands in the masks as a number of the launch, `width`: where a whole part of WIDE is known to
    lie behind K, ptxas 12.8 makes other numbers than 0 of what was not read: the upper half of a
    word, in `mov.b32 {_, %rs}`.
    """
    let_next(EARLY)
    wait(EARLY and not HELD)
    weight, row, size, first = part_of(a, b, c, A, B, C, COLUMNS, WEIGHTS, GATED)
    scale, row, size, first = part_of(
        a_scale, b_scale, c_scale, A, B, C, COLUMNS, WEIGHTS, GATED
    )  # fmt: skip
    n = row + tl.arange(0, COLUMNS)
    k = tl.arange(0, WIDE)
    real = n < size
    live = k < width
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    there = real[:, None] & live[None, :]
    tile = tl.load(weight + at, mask=there, other=0.0)
    other = tl.load(b + at, mask=there, other=0.0) if GATED else tile
    by_column = tl.load(scale + n * BY_ROW, mask=real, other=0.0)
    by_other = tl.load(b_scale + n * BY_ROW, mask=real, other=0.0) if GATED else by_column
    if EARLY and HELD and NORMS:
        EACH: tl.constexpr = 1024 // norm.dtype.element_ty.primitive_bitwidth  # a line of 128 bytes
        line = tl.arange(0, (WIDE + EACH - 1) // EACH) * EACH
        ask_for(norm + tl.where(line < K, line, 0))
    wait(EARLY and HELD)
    by = tl.load(more + first + n, mask=real, other=0.0).to(tl.float32) if ADDS else 0.0
    if WIDE >= K:  # it has been read
        v = tl.load(x + k, mask=live, other=0.0).to(tl.float32)
        if NORMS:
            v = _normed(v, norm + k, live, K, eps, x.dtype.element_ty, CENTRED)
        if INPUT == 2:
            by_row = scale_of_row(v)
        else:
            by_row = tl.load(x_scale)
        if INPUT != 0:
            v = row_as_fp8(v, by_row).to(tl.float32)
        y = tl.sum(tile.to(tl.float32) * v[None, :], 1)
        up = tl.sum(other.to(tl.float32) * v[None, :], 1) if GATED else y
    else:
        tl.static_assert(INPUT == 0 and not GATED)
        by_row = tl.load(x_scale)
        total = tl.zeros((COLUMNS, WIDE), tl.float32)
        for start in range(0, K, WIDE):
            now = tile
            there = real[:, None] & (start + WIDE + k < K)[None, :]
            tile = tl.load(weight + at + start + WIDE, mask=there, other=0.0)
            v = tl.load(x + start + k, mask=start + k < K, other=0.0).to(tl.float32)
            total += now.to(tl.float32) * v[None, :]
        y = tl.sum(total, 1)
        up = y
    y = y * by_row * by_column
    up = up * by_row * by_other
    kind = more.dtype.element_ty
    y = around(y, up, by, kind, GATED, ADDS).to(kind)
    if ROUNDS:
        tl.store(out + first + n, as_fp8(y.to(tl.float32), tl.load(out_scale)), mask=real)
    else:
        tl.store(out + first + n, y, mask=real)


@triton.jit
def _normed(v, norm, live, K: tl.constexpr, eps, kind: tl.constexpr, CENTRED: tl.constexpr):
    """A row over its root mean square, times a weight, rounded as by `fused.norm_kernel`."""
    root = tl.rsqrt(tl.sum(v * v, 0) / K + eps)
    by = tl.load(norm, mask=live, other=0.0).to(tl.float32)
    v = v * root * (1.0 + by) if CENTRED else (v * root).to(kind).to(tl.float32) * by
    return v.to(kind).to(tl.float32)


def run(
    x: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor], out: Tensor, dtype: torch.dtype,
    *, norm: Tensor | None = None, x_scale: Tensor | None = None, more: Tensor | None = None,
    out_scale: Tensor | None = None, eps: float = 0.0, centred: bool = False, gated: bool = False,
    held: bool = False, tile: Tile | None = None,
) -> None:  # fmt: skip
    """x (1, K) by weights (N, K) into out (1, sum of N), or (1, N) if gated; see
    `fused_linear_fp8`.

    Args:
        scales: of the weights: () each, or (N, 1) each.
        x_scale: of x, or by which it is rounded; None: by its own.
        held: whether nothing writes weights and scales while a graph that this is recorded in runs.
    """
    K, by_row = x.shape[1], scales[0].dim() > 0
    how = ROUNDED if x.dtype == FP8 else OWN if x_scale is None else KNOWN
    tile = tile or tile_of_one(K, how == ROUNDED, gated)
    left = 3 - len(weights)
    three, by = (*weights, *[weights[0]] * left), (*scales, *[scales[0]] * left)
    sizes = [*(w.shape[0] for w in weights), *[0] * left]
    blocks = sum(-(-n // tile.columns) for n in (sizes[:1] if gated else sizes))
    given = lambda y: by[0] if y is None else y  # noqa: E731
    added = x.new_empty(0, dtype=dtype) if more is None else more
    launch(
        one_kernel,
        (blocks,),
        (x, given(norm), given(x_scale), *three, *by, added, given(out_scale)),
        (out,),
        (*sizes, K, eps),
        num_warps=tile.warps,
        early=True,
        K=K,
        COLUMNS=tile.columns,
        WIDE=tile.wide,
        WEIGHTS=len(weights),
        BY_ROW=int(by_row),
        INPUT=how,
        NORMS=norm is not None,
        CENTRED=centred,
        GATED=gated,
        ADDS=more is not None,
        ROUNDS=out_scale is not None,
        HELD=held and x.is_cuda and torch.cuda.is_current_stream_capturing(),
    )
