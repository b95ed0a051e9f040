"""Sums of a process's own rows, the addition and the RMSNorm behind them, in one kernel: a program
a row, of its own and of all others, which are zeros."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fngraph.ops.triton.fused import as_rows, normed_row, warps_for
from fngraph.ops.triton.launching import COUNTS, launch, power_of_two
from fngraph.ops.triton.overlapping import overlap
from fngraph.ops.triton.rounding import as_rounded

_COUNTED = (*COUNTS, "first")


@triton.jit(do_not_specialize=_COUNTED)
def own_rows_kernel(
    parts, y, weight, total, out, y_row, eps, first, count,
    PARTS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr, CENTRED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Row t of both results. `count` rows from the `first` on are this process's, of each part."""
    overlap(EARLY)
    t = tl.program_id(0).to(tl.int64)
    own = t - first
    is_own = (own >= 0) & (own < count)
    e = tl.arange(0, BLOCK)
    real = (e < E) & is_own
    kind = y.dtype.element_ty
    wide = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(PARTS):
        row = i * tl.cast(count, tl.int64) + own
        wide += tl.load(parts + row * E + e, mask=real, other=0.0).to(tl.float32)
    b = tl.load(y + t * y_row + e, mask=real, other=0.0).to(tl.float32)
    a = as_rounded(as_rounded(wide, kind) + b, kind)
    normed = normed_row(a, weight, e, real, eps, kind, E, CENTRED)
    tl.store(total + t * E + e, a.to(kind), mask=e < E)
    tl.store(out + t * E + e, tl.where(real, normed, 0.0).to(kind), mask=e < E)


def own_rows_rms_norm(
    parts: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, first: int
) -> tuple[Tensor, Tensor]:
    """See `fngraph.ranks.rows.plain_own_rows_rms_norm`."""
    others, (count, E) = as_rows(y), parts.shape[1:]
    total, out = y.new_empty(y.shape), y.new_empty(y.shape)
    launch(
        own_rows_kernel,
        (len(others),),
        (parts.contiguous(), others, weight.contiguous()),
        (total, out),
        (others.stride(0), eps, first, count),
        early=True,
        num_warps=warps_for(E),
        PARTS=len(parts),
        E=E,
        BLOCK=power_of_two(E),
        CENTRED=centred,
    )
    return total, out
