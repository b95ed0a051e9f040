"""Triton kernels of linear layers with up to 64 rows of input: what decoding many multiplies.

Weights are still read once, but the input is as much as a tile of them, and each program reads all
of it that it multiplies. So tiles are large, a tensor core's 64 rows of a weight, and where that
leaves processors without one, the columns are cut into parts, whose sums in float32 are put
together by the kernel behind: a row of the result a program, in the order of parts. It adds what
the row is added to, and makes the row's norm, since it has all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.fused import normed_row, warps_for
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import ask_for, let_next, overlap, wait
from fngraph.ops.triton.products.skinny import around

_AHEAD = 2  # tiles that a program asks for before it waits: 0.2 to 0.6 us of 6 to 20 on an H200
_LINE = 128  # bytes


@triton.jit
def multiplied(
    x, at_x, live, a, b, at, real, k, K: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
    EVEN: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Rows of x by rows of a, and with GATED by those of b as well, over PART of their columns.

    Args:
        at_x: where the first columns of x are, (BLOCK, M).
        live: which of its rows there are, (M,).
        at: where those of a and b are, (ROWS, BLOCK).
        real: which of their rows there are, (ROWS, 1).
        k: the numbers of the first columns, (BLOCK,); of all there are K.

    Returns:
        Sums, (M, ROWS) in float32, of a and of b.
    """
    acc = tl.zeros((at.shape[0], at_x.shape[1]), tl.float32)
    acc_up = acc
    for start in range(0, PART, BLOCK):
        there = real
        here = live[None, :]
        if not EVEN:
            there &= (start + k < K)[None, :]
            here &= (start + k < K)[:, None]
        tile = tl.load(a + at + start, mask=there, other=0.0)
        v = tl.load(x + at_x + start, mask=here, other=0.0)
        acc = tl.dot(tile, v, acc, input_precision="ieee")
        if GATED:
            other = tl.load(b + at + start, mask=there, other=0.0)
            acc_up = tl.dot(other, v, acc_up, input_precision="ieee")
    return tl.trans(acc), tl.trans(acc_up)


@triton.jit(do_not_specialize=COUNTS)
def wide_kernel(
    x, a, b, out, T, x_row, N: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, PART: tl.constexpr, GATED: tl.constexpr,
    EVEN: tl.constexpr, AHEAD: tl.constexpr, LINE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """T <= M rows of input by ROWS rows of a weight, over PART of its columns; with GATED of two
    weights over all, gated."""
    n = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m = tl.arange(0, M)
    k = tl.program_id(1) * PART + tl.arange(0, BLOCK)
    real = (n < N)[:, None]
    at = n.to(tl.int64)[:, None] * K + k[None, :]
    at_x = m.to(tl.int64)[None, :] * x_row + k[:, None]
    let_next(EARLY)
    if AHEAD > 0:
        line = tl.program_id(1) * PART + tl.arange(0, BLOCK // LINE) * LINE
        lines = tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + line[None, :]
        for i in tl.static_range(AHEAD):
            if i * BLOCK < PART:
                ask_for(a + lines + i * BLOCK)
                if GATED:
                    ask_for(b + lines + i * BLOCK)
    wait(EARLY)
    y, y_up = multiplied(x, at_x, m < T, a, b, at, real, k, K, PART, BLOCK, EVEN, GATED)
    row = tl.program_id(1) * T + m
    into = out + row.to(tl.int64)[:, None] * N + n[None, :]
    if GATED:
        kind = out.dtype.element_ty
        y = around(y, y_up, 0.0, kind, True, False).to(kind)
    tl.store(into, y, mask=(m < T)[:, None] & (n < N)[None, :])


@triton.jit(do_not_specialize=COUNTS)
def sum_kernel(
    parts, more, norm, total, normed, T, more_row, eps, E: tl.constexpr, BLOCK: tl.constexpr,
    SPLIT: tl.constexpr, NORMS: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row t: the sum of its parts, rounded, and of `more`; with NORMS its norm as well."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    kind = total.dtype.element_ty
    by = tl.load(more + t * more_row + e, mask=real, other=0.0).to(tl.float32)
    y = tl.load(parts + t * E + e, mask=real, other=0.0)
    for i in tl.static_range(1, SPLIT):
        y += tl.load(parts + (i * T + t) * E + e, mask=real, other=0.0)
    a = (y.to(kind).to(tl.float32) + by).to(kind)
    tl.store(total + t * E + e, a, mask=real)
    if NORMS:
        made = normed_row(a.to(tl.float32), norm, e, real, eps, kind, E, CENTRED)
        tl.store(normed + t * E + e, made.to(kind), mask=real)


def product(x: Tensor, weights: Sequence[Tensor], tile: Any) -> Tensor:
    """x (T, K) @ a.t(), (T, N), of a weight a (N, K); of a and b silu(x @ a.t()) * (x @ b.t()).

    Args:
        tile: a `fused_linear.WideTile` of one part.
    """
    out = x.new_empty(x.shape[0], weights[0].shape[0])
    _launch(x, weights[0], weights[-1], out, tile, gated=len(weights) > 1)
    return out


def summed(
    x: Tensor, weight: Tensor, more: Tensor, norm: Tensor | None, eps: float, centred: bool,
    tile: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (T, K) @ weight.t() + more, (T, E), and its norm; without one, the sum again.

    Args:
        tile: a `fused_linear.WideTile`.
    """
    T, E = x.shape[0], weight.shape[0]
    parts = x.new_empty((tile.split, T, E), dtype=torch.float32)
    _launch(x, weight, weight, parts, tile, gated=False)
    total = x.new_empty((T, E))
    normed = total if norm is None else x.new_empty((T, E))
    launch(
        sum_kernel,
        (T,),
        (parts, more, more if norm is None else norm.contiguous()),
        (total, normed),
        (T, more.stride(0), eps),
        early=True,
        num_warps=warps_for(E),
        E=E,
        BLOCK=power_of_two(E),
        SPLIT=tile.split,
        NORMS=norm is not None,
        CENTRED=centred,
    )
    return total, normed


def _launch(x: Tensor, a: Tensor, b: Tensor, out: Tensor, tile: Any, *, gated: bool) -> None:
    (T, K), N = x.shape, a.shape[0]
    part = -(-K // (tile.split * tile.block)) * tile.block
    launch(
        wide_kernel,
        (-(-N // tile.rows), tile.split),
        (x, a, b),
        (out,),
        (T, x.stride(0)),
        early=True,
        num_warps=tile.warps,
        num_stages=tile.stages,
        N=N,
        K=K,
        M=power_of_two(T, at_least=16),
        ROWS=tile.rows,
        BLOCK=tile.block,
        PART=part,
        EVEN=part * tile.split == K,
        GATED=gated,
        AHEAD=_AHEAD if x.is_cuda else 0,
        LINE=_LINE // x.itemsize,
    )
