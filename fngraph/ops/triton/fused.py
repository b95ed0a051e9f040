"""The Triton kernels of the ops of `fngraph.ops.fused`: a program a row, or a row of heads.

They round where torch's own ops round, one after the other: what is multiplied in the model's dtype
is rounded to it before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.launching import launch, power_of_two


@triton.jit
def norm_kernel(
    x, y, weight, total, out, x_row, y_row, eps,
    E: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Row t over its root mean square, times the weight; with ADDS, of x + y, which is stored."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    real = e < E
    a = tl.load(x + t * x_row + e, mask=real, other=0.0)
    if ADDS:
        b = tl.load(y + t * y_row + e, mask=real, other=0.0)
        a = (a.to(tl.float32) + b.to(tl.float32)).to(total.dtype.element_ty)
        tl.store(total + t * E + e, a, mask=real)
    wide = a.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / E + eps)
    by = tl.load(weight + e, mask=real, other=0.0).to(tl.float32)
    if CENTRED:
        normed = wide * scale * (1.0 + by)
    else:
        normed = (wide * scale).to(out.dtype.element_ty).to(tl.float32) * by
    tl.store(out + t * E + e, normed.to(out.dtype.element_ty), mask=real)


def _rows(x: Tensor) -> Tensor:
    """(rows, columns), where x lies; copied if it has no such view."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _warps(width: int) -> int:
    return 4 if width <= 1024 else 8 if width <= 4096 else 16


def rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    rows, out = _rows(x), x.new_empty(x.shape)
    _norm(rows, rows, weight, out, out, eps, adds=False, centred=centred)
    return out


def add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """See `fngraph.ops.fused.PLAIN`."""
    total, out = x.new_empty(x.shape), x.new_empty(x.shape)
    _norm(_rows(x), _rows(y), weight, total, out, eps, adds=True, centred=centred)
    return total, out


def _norm(
    x: Tensor, y: Tensor, weight: Tensor, total: Tensor, out: Tensor, eps: float, *,
    adds: bool, centred: bool,
) -> None:  # fmt: skip
    count, E = x.shape
    launch(
        norm_kernel,
        (count,),
        (x, y, weight.contiguous()),
        (total, out),
        (x.stride(0), y.stride(0), eps),
        early=True,
        num_warps=_warps(E),
        E=E,
        BLOCK=power_of_two(E),
        ADDS=adds,
        CENTRED=centred,
    )


@triton.jit
def silu_mul_kernel(
    gate, up, out, gate_row, up_row, F: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """BLOCK columns of row t: silu(gate) * up."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    t = tl.program_id(0).to(tl.int64)
    f = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = f < F
    a = tl.load(gate + t * gate_row + f, mask=real, other=0.0).to(tl.float32)
    b = tl.load(up + t * up_row + f, mask=real, other=0.0).to(tl.float32)
    silu = tl.div_rn(a, 1.0 + tl.exp(-a)).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + t * F + f, (silu * b).to(out.dtype.element_ty), mask=real)


def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """See `fngraph.ops.fused.PLAIN`."""
    rows, others, out = _rows(gate), _rows(up), gate.new_empty(gate.shape)
    count, F = rows.shape
    block = min(1024, power_of_two(F))
    launch(
        silu_mul_kernel,
        (count, -(-F // block)),
        (rows, others),
        (out,),
        (rows.stride(0), others.stride(0)),
        early=True,
        F=F,
        BLOCK=block,
    )
    return out


@triton.jit
def rope_kernel(
    x, weight, cos, sin, out, H, x_row, x_head, cos_row, sin_row, eps,
    D: tl.constexpr, HALF: tl.constexpr, OTHER: tl.constexpr, BLOCK: tl.constexpr,
    NORMS: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A head of a token: its norm with NORMS, then pairs (i, i + HALF) turned by OTHER's angles."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    t, h = row // H, row % H
    d = tl.arange(0, BLOCK)
    real = d < D
    first, turns = d < HALF, d < 2 * HALF
    partner = tl.where(first, d + HALF, tl.where(turns, d - HALF, d))
    angle = tl.where(first, d, d - HALF + OTHER)
    at = x + t * x_row + h * x_head
    a = tl.load(at + d, mask=real, other=0.0).to(tl.float32)
    b = tl.load(at + partner, mask=real, other=0.0).to(tl.float32)
    kind = out.dtype.element_ty
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
    c = tl.load(cos + t * cos_row + angle, mask=turns & real, other=1.0).to(tl.float32)
    s = tl.load(sin + t * sin_row + angle, mask=turns & real, other=0.0).to(tl.float32)
    straight = (a * c).to(kind).to(tl.float32)
    across = (b * s).to(kind).to(tl.float32)
    turned = tl.where(first, straight - across, straight + across)
    tl.store(out + row * D + d, tl.where(turns, turned, a).to(kind), mask=real)


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
    cos, sin, out = _rows(cos), _rows(sin), x.new_empty(x.shape)
    half = min(cos.shape[-1], D // 2)
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
    )
    return out
