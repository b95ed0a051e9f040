"""Triton kernels of grouped rows: few rows in each of many groups, which is experts in decoding.

Rows are sorted by counting: each compares its group with all others'. A product's programs are
rows of a weight by up to `most` rows of its group; there are as many as the rows may need, however
they are grouped, and each finds its group by the ends of all. So weights of groups that have rows
are read once, of others not at all, and nothing waits for the host.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.products.skinny import around
from fngraph.ops.triton.products.wide import multiplied

_SHARE = 32  # rows, or groups, that a program counts for


@triton.jit(do_not_specialize=COUNTS)
def count_kernel(
    group, numbers, order, ends, back, T, X: tl.constexpr, BLOCK: tl.constexpr,
    SHARE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Where SHARE of T rows come among all; programs behind these: the ends of SHARE groups."""
    overlap(EARLY)
    tile = tl.program_id(0)
    j = tl.arange(0, BLOCK)
    theirs = tl.load(group + j, mask=j < T, other=0)[None, :]
    there = (j < T)[None, :]
    one = tl.arange(0, SHARE)
    tiles = tl.cdiv(T, SHARE)
    if tile < tiles:
        i = tile * SHARE + one
        own = tl.load(group + i, mask=i < T, other=0)[:, None]
        ahead = (theirs < own) | ((theirs == own) & (j[None, :] < i[:, None]))
        rank = tl.sum((ahead & there).to(tl.int32), 1)
        tl.store(back + i, rank.to(tl.int64), mask=i < T)
        tl.store(order + rank, i.to(tl.int64), mask=i < T)
    else:
        x = (tile - tiles) * SHARE + one
        number = tl.load(numbers + x, mask=x < X, other=0)[:, None]
        tl.store(ends + x, tl.sum(((theirs <= number) & there).to(tl.int32), 1), mask=x < X)


@triton.jit(do_not_specialize=COUNTS)
def group_kernel(
    x, order, ends, a, b, out, x_row, chosen, X: tl.constexpr, O: tl.constexpr, K: tl.constexpr,
    M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Up to M rows of one group by ROWS rows of its weight, (X, O, K); with GATED of two, gated,
    and rows are those of x by `order`, which has `chosen` of each."""
    overlap(EARLY)
    unit = tl.program_id(1)
    g = tl.arange(0, LANES)
    end = tl.load(ends + g, mask=g < X, other=0)
    begin = tl.load(ends + g - 1, mask=(g > 0) & (g < X), other=0)
    units = tl.where(g < X, (end - begin + M - 1) // M, 0)
    own = tl.sum((tl.cumsum(units, 0) <= unit).to(tl.int32), 0)
    if own >= X:
        return
    before = tl.sum(tl.where(g < own, units, 0), 0)
    first = tl.sum(tl.where(g == own, begin, 0), 0) + (unit - before) * M
    last = tl.sum(tl.where(g == own, end, 0), 0)
    m = first + tl.arange(0, M)
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)
    is_row = m < last
    row = m.to(tl.int64)
    if GATED:
        row = tl.load(order + m, mask=is_row, other=0) // chosen
    real = (n < O)[:, None]
    at = (own.to(tl.int64) * O + n)[:, None] * K + k[None, :]
    at_x = row[None, :] * x_row + k[:, None]
    y, y_up = multiplied(x, at_x, is_row, a, b, at, real, k, K, K, BLOCK, EVEN, GATED)
    kind = out.dtype.element_ty
    if GATED:
        y = around(y, y_up, 0.0, kind, True, False)
    into = out + m.to(tl.int64)[:, None] * O + n[None, :]
    tl.store(into, y.to(kind), mask=is_row[:, None] & (n < O)[None, :])


def group_rows(group: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """See `fngraph.ops.grouped`; up to `MOST_ROWS` rows."""
    (N,), (X,) = group.shape, numbers.shape
    order, back = (torch.empty_like(group, dtype=torch.int64) for _ in range(2))
    ends = torch.empty_like(numbers, dtype=torch.int32)
    launch(
        count_kernel,
        (-(-N // _SHARE) + -(-X // _SHARE),),
        (group, numbers),
        (order, ends, back),
        (N,),
        early=True,
        X=X,
        BLOCK=power_of_two(N, at_least=16),
        SHARE=_SHARE,
    )
    return order, ends, back


def gated(
    x: Tensor, order: Tensor, ends: Tensor, gate: Tensor, up: Tensor, out: Tensor, chosen: int,
    tile: Any,
) -> None:  # fmt: skip
    """x (T, I) by gate and up (X, O, I) into out (N, O), rows of x in `order`.

    Args:
        tile: a `grouped.GroupTile`.
    """
    _launch(x, order, ends, gate, up, out, chosen, tile, gated=True)


def linear(x: Tensor, ends: Tensor, weight: Tensor, out: Tensor, tile: Any) -> None:
    """x (N, I) by weight (X, O, I) into out (N, O).

    Args:
        tile: a `grouped.GroupTile`.
    """
    _launch(x, ends, ends, weight, weight, out, 1, tile, gated=False)


def _launch(
    x: Tensor, order: Tensor, ends: Tensor, a: Tensor, b: Tensor, out: Tensor, chosen: int,
    tile: Any, *, gated: bool,
) -> None:  # fmt: skip
    (N, O), (X, _, K) = out.shape, a.shape
    units = min(N, X) + N // tile.most
    block = min(tile.block, power_of_two(K, at_least=16))
    launch(
        group_kernel,
        (-(-O // tile.rows), units),
        (x, order, ends, a, b),
        (out,),
        (x.stride(0), chosen),
        early=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
        X=X,
        O=O,
        K=K,
        M=tile.most,
        ROWS=tile.rows,
        BLOCK=block,
        LANES=power_of_two(X),
        EVEN=K % block == 0,
        GATED=gated,
    )
