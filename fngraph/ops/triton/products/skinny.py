"""Triton kernels of linear layers with few rows of input: what decoding multiplies.

All that such a product costs is reading its weights once. A program takes some rows of a weight, or
of one of several, over the whole of K, so that no sums are put together afterwards: a row's bits
depend on itself alone. The norm in front, the gate, and the sum behind are of the same launch.

A norm's scale is one number for each row of input, so it is applied to the sums, in float32:
nothing waits for it, and the input is read once.

Weights that nothing writes while a graph runs (`HELD`) are read before the wait for the kernel
ahead, which hides that kernel's end behind the memory's latency. With more rows on tensor cores
that does not pay: docs/performance.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import let_next, overlap, wait
from fngraph.ops.triton.rounding import as_rounded


@triton.jit(do_not_specialize=COUNTS)
def vector_kernel(
    x, norm, a, b, c, more, out, T, A, B, C, x_row, more_row, out_row, eps,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    WEIGHTS: tl.constexpr, NORMS: tl.constexpr, CENTRED: tl.constexpr, GATED: tl.constexpr,
    ADDS: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """T <= M rows of input by ROWS rows of one weight, with GATED of both.

    Tiles are (M, ROWS, BLOCK), of which a weight's have one of the first dim.
    """
    if M <= 2:
        T = M  # as it is by `power_of_two`: masks fall away, 0.5 us of 10 at one row
    let_next(EARLY)
    weight, row, size, first = part_of(a, b, c, A, B, C, ROWS, WEIGHTS, GATED)
    m = tl.arange(0, M)
    n = row + tl.arange(0, ROWS)
    k = tl.arange(0, BLOCK)[None, None, :]
    real = (n < size)[None, :, None]
    at = n.to(tl.int64)[None, :, None] * K + k
    wait(EARLY and not HELD)
    tile = tl.load(weight + at, mask=real & (k < K), other=0.0)
    other = tl.load(b + at, mask=real & (k < K), other=0.0) if GATED else tile
    wait(EARLY and HELD)
    rows = x + m.to(tl.int64)[:, None, None] * x_row
    live = (m < T)[:, None, None]
    if BLOCK >= K:  # all of it has been read
        by = added(more, m, first + n, T, n < size, more_row, ADDS)
        v = tl.load(rows + k, mask=live & (k < K), other=0.0).to(tl.float32)
        if NORMS:
            scale = tl.rsqrt(tl.sum(v * v, 2) / K + eps)
            g = tl.load(norm + k, mask=k < K, other=0.0).to(tl.float32)
            v *= 1.0 + g if CENTRED else g
        y = tl.sum(tile.to(tl.float32) * v, 2)
        up = tl.sum(other.to(tl.float32) * v, 2) if GATED else y
    else:
        acc = tl.zeros((M, ROWS, BLOCK), tl.float32)
        acc_up = tl.zeros((M, ROWS, BLOCK), tl.float32)
        squares = tl.zeros((M, 1, BLOCK), tl.float32)
        for start in range(0, K, BLOCK):
            now, now_up = tile, other
            there = real & (start + BLOCK + k < K)
            tile = tl.load(weight + at + start + BLOCK, mask=there, other=0.0)
            if GATED:
                other = tl.load(b + at + start + BLOCK, mask=there, other=0.0)
            v = tl.load(rows + start + k, mask=live & (start + k < K), other=0.0).to(tl.float32)
            if NORMS:
                squares += v * v
                g = tl.load(norm + start + k, mask=start + k < K, other=0.0).to(tl.float32)
                v *= 1.0 + g if CENTRED else g
            acc += now.to(tl.float32) * v
            if GATED:
                acc_up += now_up.to(tl.float32) * v
        by = added(more, m, first + n, T, n < size, more_row, ADDS)
        y = tl.sum(acc, 2)
        up = tl.sum(acc_up, 2) if GATED else y
        if NORMS:
            scale = tl.rsqrt(tl.sum(squares, 2) / K + eps)
    if NORMS:
        y *= scale
        up *= scale
    _finish(y, up, by, out, m, first + n, T, n < size, out_row, GATED, ADDS)


@triton.jit(do_not_specialize=COUNTS)
def rows_kernel(
    x, norm, a, b, c, more, out, T, A, B, C, x_row, more_row, out_row, eps,
    K: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PARTS: tl.constexpr, WEIGHTS: tl.constexpr, NORMS: tl.constexpr, CENTRED: tl.constexpr,
    GATED: tl.constexpr, ADDS: tl.constexpr, FLOAT32: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """T <= M rows of input by ROWS rows of one weight, with GATED of both, on tensor cores.

    Each of PARTS parts of the columns has sums of its own, so that warps share K. The input is
    multiplied by a norm's weight and rounded; the norm's scale is applied to the sums.
    """
    weight, row, size, first = part_of(a, b, c, A, B, C, ROWS, WEIGHTS, GATED)
    n = row + tl.arange(0, ROWS)
    m = tl.arange(0, M)
    part = tl.arange(0, PARTS)[:, None, None] * BLOCK
    k = part + tl.arange(0, BLOCK)[None, None, :]
    k_v = part + tl.arange(0, BLOCK)[None, :, None]
    real = (n < size)[None, :, None]
    live = (m < T)[None, None, :]
    at = n.to(tl.int64)[None, :, None] * K + k
    at_v = m.to(tl.int64)[None, None, :] * x_row + k_v
    overlap(EARLY)
    by = added(more, m, first + n, T, n < size, more_row, ADDS)
    acc = tl.zeros((PARTS, ROWS, M), tl.float32)
    acc_up = acc
    squares = tl.zeros((PARTS, BLOCK, M), tl.float32)
    precision: tl.constexpr = "ieee" if FLOAT32 else "tf32"
    for start in range(0, K, PARTS * BLOCK):
        there = real & (start + k < K)
        tile = tl.load(weight + at + start, mask=there, other=0.0)
        v = tl.load(x + at_v + start, mask=live & (start + k_v < K), other=0.0)
        if NORMS:
            wide = v.to(tl.float32)
            squares += wide * wide
            g = tl.load(norm + start + k_v, mask=start + k_v < K, other=0.0).to(tl.float32)
            v = (wide * (1.0 + g if CENTRED else g)).to(v.dtype)
        acc = tl.dot(tile, v, acc, input_precision=precision)
        if GATED:
            other = tl.load(b + at + start, mask=there, other=0.0)
            acc_up = tl.dot(other, v, acc_up, input_precision=precision)
    y = tl.trans(tl.sum(acc, 0))
    up = tl.trans(tl.sum(acc_up, 0)) if GATED else y
    if NORMS:
        scale = tl.rsqrt(tl.sum(tl.sum(squares, 1), 0) / K + eps)[:, None]
        y *= scale
        up *= scale
    _finish(y, up, by, out, m, first + n, T, n < size, out_row, GATED, ADDS)


@triton.jit
def added(more, m, column, T, real, more_row, ADDS: tl.constexpr):
    """What the result is added to, read before the sums are made; 0.0: nothing."""
    if ADDS:
        there = (m < T)[:, None] & real[None, :]
        at = m.to(tl.int64)[:, None] * more_row + column[None, :]
        by = tl.load(more + at, mask=there, other=0.0).to(tl.float32)
    else:
        by = 0.0
    return by


@triton.jit
def _finish(
    y, up, by, out, m, column, T, real, out_row, GATED: tl.constexpr, ADDS: tl.constexpr
):  # fmt: skip
    """Sums (M, ROWS), gated and added to as is asked, into the result; rounded where the ops one by
    one round."""
    kind = out.dtype.element_ty
    y = around(y, up, by, kind, GATED, ADDS)
    at = m.to(tl.int64)[:, None] * out_row + column[None, :]
    tl.store(out + at, y.to(kind), mask=(m < T)[:, None] & real[None, :])


@triton.jit
def around(y, up, by, kind: tl.constexpr, GATED: tl.constexpr, ADDS: tl.constexpr):
    """Sums in float32, gated, and with `by` as is asked; what comes is still to be rounded."""
    if GATED:
        gate = y.to(kind).to(tl.float32)
        silu = tl.div_rn(gate, 1.0 + tl.exp(-gate)).to(kind).to(tl.float32)
        y = silu * up.to(kind).to(tl.float32)
    if ADDS:
        if GATED:
            y = as_rounded(y, kind)
        y = y.to(kind).to(tl.float32) + by
    return y


@triton.jit
def part_of(
    a, b, c, A, B, C, ROWS: tl.constexpr, WEIGHTS: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Of this program: its weight, the first row there, the weight's rows, and its first column."""
    tile = tl.program_id(0)
    weight = a
    size = A
    first = 0
    if WEIGHTS > 1 and not GATED:
        tiles = tl.cdiv(A, ROWS)
        if tile >= tiles:
            tile -= tiles
            weight = b
            size = B
            first = A
            if WEIGHTS > 2:
                tiles = tl.cdiv(B, ROWS)
                if tile >= tiles:
                    tile -= tiles
                    weight = c
                    size = C
                    first = A + B
    return weight, tile * ROWS, size, first


def run(
    x: Tensor, weights: Sequence[Tensor], norm: Tensor | None, more: Tensor | None, out: Tensor,
    eps: float, tile: Any, *, centred: bool, gated: bool, held: bool,
) -> None:  # fmt: skip
    """x (T, K) by weights (N, K) into out (T, sum of N), or (T, N) if gated; see `fused_linear`.

    Args:
        tile: a `fused_linear.Tile`.
        held: whether nothing writes the weights while a graph that this is recorded in runs.
    """
    T, K = x.shape
    a, b, c = (*weights, *[weights[0]] * (3 - len(weights)))
    sizes = [w.shape[0] if i < len(weights) else 0 for i, w in enumerate((a, b, c))]
    grid = (sum(-(-n // tile.rows) for n in (sizes[:1] if gated else sizes)),)
    beside = x if more is None else more
    reads = (x, x if norm is None else norm, a, b, c, beside)
    numbers = (T, *sizes, x.stride(0), beside.stride(0), out.stride(0), eps)
    constants: dict[str, Any] = {
        "K": K, "ROWS": tile.rows, "BLOCK": tile.block, "WEIGHTS": len(weights),
        "NORMS": norm is not None, "CENTRED": centred, "GATED": gated, "ADDS": more is not None,
        "num_warps": tile.warps,
    }  # fmt: skip
    if tile.parts:
        launch(
            rows_kernel, grid, reads, (out,), numbers, early=True, num_stages=tile.stages,
            M=power_of_two(T, at_least=8), PARTS=tile.parts, FLOAT32=x.dtype == torch.float32,
            **constants,
        )  # fmt: skip
        return
    held = held and x.is_cuda and torch.cuda.is_current_stream_capturing()
    launch(
        vector_kernel, grid, reads, (out,), numbers, early=True, M=power_of_two(T), HELD=held,
        **constants,
    )  # fmt: skip
