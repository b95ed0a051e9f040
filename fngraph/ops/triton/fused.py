"""The Triton kernels of the fused ops: a program a row, or a row of heads.

They round where torch's own ops round, one after the other: what is multiplied in the model's dtype
is rounded to it before, and what is quantised to fp8 too.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.side_by_side import the_scale
from fngraph.ops.triton.launching import launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.rounding import FP8, as_fp8, as_rounded, scale_of_row
from fngraph.ops.triton.strides import by_step, step_of

FEW_HEADS = 2048  # a program each; twice as many run at once on an H100, 32 a processor
NO, KNOWN, ROWS = 0, 1, 2  # whether results are quantised: not, by a known scale, by each row's own


@triton.jit
def put(out, scale, scales, row, at, t, real, QUANT: tl.constexpr):
    """Store a row of float32, in the dtype of `out`; quantised as QUANT says."""
    if QUANT == 0:
        tl.store(out + at, row.to(out.dtype.element_ty), mask=real)
    elif QUANT == 1:
        tl.store(out + at, as_fp8(row, tl.load(scale)), mask=real)
    else:
        row = tl.where(real, row, 0.0)
        by = scale_of_row(row)
        tl.store(scales + t, by)
        tl.store(out + at, as_fp8(row, by), mask=real)


@triton.jit
def normed_row(
    wide, weight, e, real, eps, kind: tl.constexpr, E: tl.constexpr, CENTRED: tl.constexpr
):  # fmt: skip
    """A row of E in float32, zeros behind it, over its root mean square, times the weight."""
    root = tl.rsqrt(tl.sum(wide * wide) / E + eps)
    by = tl.load(weight + e, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        normed = wide * root * (1.0 + by)
    else:
        normed = (wide * root).to(kind).to(tl.float32) * by
    return normed.to(kind).to(tl.float32)


@triton.jit
def norm_kernel(
    x, y, weight, scale, total, out, scales, x_row, y_row, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, CENTRED: tl.constexpr,
    QUANT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Row t over its root mean square, times the weight; with ADDS, of x + y, which is stored."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    kind = x.dtype.element_ty
    a = tl.load(x + t * x_row + e, mask=real, other=0.0)
    if ADDS:
        b = tl.load(y + t * y_row + e, mask=real, other=0.0)
        a = (a.to(tl.float32) + b.to(tl.float32)).to(kind)
        tl.store(total + t * E + e, a, mask=real)
    normed = normed_row(a.to(tl.float32), weight, e, real, eps, kind, E, CENTRED)
    put(out, scale, scales, normed, t * E + e, t, real, QUANT)


def as_rows(x: Tensor) -> Tensor:
    """(rows, columns), where x lies; copied if it has no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def warps_for(width: int) -> int:
    return 4 if width <= 1024 else 8 if width <= 4096 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    return _norm(x, None, weight, eps, centred)[1]


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fused.PLAIN`."""
    return _norm(x, y, weight, eps, centred)[:2]


def rms_norm_fp8(
    x: Tensor, weight: Tensor, eps: float, centred: bool, scales: list[Tensor]
) -> Tensor:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _norm(x, None, weight, eps, centred, KNOWN, the_scale(scales))[1]


def rms_norm_fp8_rows(
    x: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _norm(x, None, weight, eps, centred, ROWS)[1:]


def add_rms_norm_fp8(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, scales: list[Tensor]
) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _norm(x, y, weight, eps, centred, KNOWN, the_scale(scales))[:2]


def add_rms_norm_fp8_rows(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _norm(x, y, weight, eps, centred, ROWS)


def _norm(
    x: Tensor, y: Tensor | None, weight: Tensor, eps: float, centred: bool, quant: int = NO,
    scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The sum, the norm, scales; what is not asked for is memory of another."""
    rows = as_rows(x)
    others = rows if y is None else as_rows(y)
    count, E = rows.shape
    out, scales = _results(x, quant)
    total = out if y is None else x.new_empty(x.shape)
    launch(
        norm_kernel,
        (count,),
        (rows, others, weight.contiguous(), weight if scale is None else scale),
        (total, out, scales),
        (rows.stride(0), others.stride(0), eps),
        early=True,
        num_warps=warps_for(E),
        E=E,
        BLOCK=power_of_two(E),
        ADDS=y is not None,
        CENTRED=centred,
        QUANT=quant,
    )
    return total, out, scales


def _results(x: Tensor, quant: int) -> tuple[Tensor, Tensor]:
    """Memory for values and scales."""
    out = x.new_empty(x.shape, dtype=x.dtype if quant == NO else FP8)
    if quant != ROWS:
        return out, out
    return out, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@triton.jit
def silu_mul_kernel(
    gate, up, scale, out, scales, gate_row, up_row, F: tl.constexpr, BLOCK: tl.constexpr,
    QUANT: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of row t: silu(gate) * up."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = f < F
    kind = gate.dtype.element_ty
    a = tl.load(gate + t * gate_row + f, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + t * up_row + f, mask=real, other=0.0).to(tl.float32)
    silu = tl.div_rn(a, 1.0 + tl.exp(-a)).to(kind).to(tl.float32)
    made = (silu * b).to(kind).to(tl.float32)
    put(out, scale, scales, made, t * F + f, t, real, QUANT)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    return _gate(gate, up)[0]


def silu_mul_fp8(gate: Tensor, up: Tensor, scales: list[Tensor]) -> Tensor:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _gate(gate, up, KNOWN, the_scale(scales))[0]


def silu_mul_fp8_rows(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fused_fp8.PLAIN`."""
    return _gate(gate, up, ROWS)


def _gate(
    gate: Tensor, up: Tensor, quant: int = NO, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The product and its scales; a row that has a scale of its own is one program's."""
    rows, others = as_rows(gate), as_rows(up)
    count, F = rows.shape
    out, scales = _results(gate, quant)
    block = power_of_two(F) if quant == ROWS else min(1024, power_of_two(F))
    launch(
        silu_mul_kernel,
        (count, -(-F // block)),
        (rows, others, gate if scale is None else scale),
        (out, scales),
        (rows.stride(0), others.stride(0)),
        early=True,
        num_warps=warps_for(block) if block <= 8192 else 32,
        F=F,
        BLOCK=block,
        QUANT=quant,
    )
    return out, scales


@triton.jit
def turned(
    at, d, weight, cos, sin, eps, kind: tl.constexpr,
    D: tl.constexpr, HALF: tl.constexpr, OTHER: tl.constexpr,
    NORMS: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    """Numbers d of the heads at `at`: of one its norm with NORMS, all d of which are there; then
    pairs (i, i + HALF) turned by OTHER's angles."""
    real = d < D
    first, turns = d < HALF, d < 2 * HALF
    partner = tl.where(first, d + HALF, tl.where(turns, d - HALF, d))
    angle = tl.where(first, d, d - HALF + OTHER)
    a = tl.load(at + d, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    if NORMS:
        scale = tl.rsqrt(tl.sum(a * a) / D + eps)
        by = tl.load(weight + d, mask=real, other=0.0).to(tl.float32)
        too = tl.load(weight + partner, mask=real, other=0.0).to(tl.float32)
        if CENTRED:
            a, b = a * scale * (1.0 + by), b * scale * (1.0 + too)
        else:
            a = (a * scale).to(kind).to(tl.float32) * by
            b = (b * scale).to(kind).to(tl.float32) * too
        a, b = a.to(kind).to(tl.float32), b.to(kind).to(tl.float32)
    c = tl.load(cos + angle, mask=turns & real, other=1.0).to(tl.float32)
    s = tl.load(sin + angle, mask=turns & real, other=0.0).to(tl.float32)
    straight = (a * c).to(kind).to(tl.float32)
    across = (b * s).to(kind).to(tl.float32)
    made = tl.where(first, straight - across, straight + across)
    return tl.where(turns, made, a).to(kind)


@triton.jit
def rope_kernel(
    x, weight, cos, sin, out, H, x_row, x_head, cos_row, sin_row, eps,
    D: tl.constexpr, HALF: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, CENTRED: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head of a token."""
    overlap(EARLY)
    row = tl.program_id(0).to(tl.int64)
    t, h = row // H, row % H
    d = tl.arange(0, BLOCK)
    kind: tl.constexpr = tl.float32 if WIDE else out.dtype.element_ty
    made = turned(
        x + t * x_row + h * x_head, d, weight, cos + t * cos_row, sin + t * sin_row, eps,
        kind, D, HALF, OTHER, NORMS, CENTRED,
    )  # fmt: skip
    tl.store(out + row * D + d, made.to(out.dtype.element_ty), mask=d < D)


@triton.jit
def rope_pairs_kernel(
    x, cos, sin, out, H, x_row, x_head, cos_row, sin_row,
    HALF: tl.constexpr, OTHER: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    STEP: tl.constexpr, WIDE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token, of which all columns turn: for so many tokens that a program a head
    would be busy with beginning and ending."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, BLOCK)[None, :]
    turns = i < HALF
    real = turns & (h < H)
    kind: tl.constexpr = tl.float32 if WIDE else out.dtype.element_ty
    at = x + t * by_step(x_row, STEP) + h * by_step(x_head, STEP) + i
    a = tl.load(at, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + HALF, mask=real, other=0.0).to(tl.float32)
    c = tl.load(cos + t * cos_row + i, mask=turns, other=0.0).to(tl.float32)
    s = tl.load(sin + t * sin_row + i, mask=turns, other=0.0).to(tl.float32)
    first = as_rounded(a * c, kind) - as_rounded(b * s, kind)
    if OTHER:
        c = tl.load(cos + t * cos_row + OTHER + i, mask=turns, other=0.0).to(tl.float32)
        s = tl.load(sin + t * sin_row + OTHER + i, mask=turns, other=0.0).to(tl.float32)
    second = as_rounded(b * c, kind) + as_rounded(a * s, kind)
    into = out + (t * H + h) * (2 * HALF) + i
    tl.store(into, first.to(out.dtype.element_ty), mask=real)
    tl.store(into + HALF, second.to(out.dtype.element_ty), mask=real)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    return _turn(x, x, cos, sin, 0.0, norms=False, centred=False)


def norm_rope(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, centred: bool
) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    return _turn(x, weight.contiguous(), cos, sin, eps, norms=True, centred=centred)


def _turn(
    x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float, *, norms: bool, centred: bool
) -> Tensor:
    *_, H, D = x.shape
    x_THD = x.reshape(-1, H, D)
    if x_THD.stride(-1) != 1:
        x_THD = x_THD.contiguous()
    cos, sin, out = as_rows(cos), as_rows(sin), x.new_empty(x.shape)
    half = min(cos.shape[-1], D // 2)
    wide = torch.promote_types(x.dtype, cos.dtype) != x.dtype
    if not norms and 2 * half == D and x_THD.shape[0] * H > FEW_HEADS:
        block = power_of_two(half)
        each = min(power_of_two(H), max(1, 1024 // block))
        launch(
            rope_pairs_kernel,
            (x_THD.shape[0], -(-H // each)),
            (x_THD, cos, sin),
            (out,),
            (H, *x_THD.stride()[:2], cos.stride(0), sin.stride(0)),
            early=True,
            num_warps=max(1, min(4, each * block // 256)),
            HALF=half,
            OTHER=cos.shape[-1] - half,
            HEADS=each,
            BLOCK=block,
            STEP=step_of(*x_THD.stride()[:2]),
            WIDE=wide,
        )
        return out
    launch(
        rope_kernel,
        (x_THD.shape[0] * H,),
        (x_THD, weight, cos, sin),
        (out,),
        (H, *x_THD.stride()[:2], cos.stride(0), sin.stride(0), eps),
        early=True,
        num_warps=1 if D <= 128 else 4,
        D=D,
        HALF=half,
        OTHER=cos.shape[-1] - half,
        BLOCK=power_of_two(D),
        NORMS=norms,
        CENTRED=centred,
        WIDE=wide,
    )
    return out
