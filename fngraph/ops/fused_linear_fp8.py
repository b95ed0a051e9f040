"""A linear layer in fp8 with what is around it in one op: norm and rounding before, gate, sum or
rounding behind.

    rounded(norm(x)) @ [w_q; w_k; w_v].t()
    silu(rounded(norm(x)) @ w_gate.t()) * (rounded(norm(x)) @ w_up.t()), rounded for w_down
    rounded(x) @ w_o.t() + residual

Its plain form is the ops that it stands for in their order (`fp8.py`, `fused.py`), and what runs on
the CPU, bit for bit. On CUDA one row, which is decoding alone, is one launch
(`triton/products/skinny_fp8.py`), or two where the row is wide; more are the kernels of those ops:
norm and rounding in one, products with the sum in them, gate and rounding in one. All round where
the plain form rounds, and add up in another order. There is no gradient.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fngraph.ops.fp8 import (
    FP8,
    check_device,
    plain_linear,
    plain_quantize,
    plain_quantize_rows,
    product,
)
from fngraph.ops.fused import plain_rms_norm, plain_silu_mul
from fngraph.ops.fused_linear import MOST_WEIGHTS
from fngraph.ops.side_by_side import as_one, define_merged, the_scale, why_apart
from fngraph.ops.triton.launching import missing

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPS = torch.ops.fngraph
WIDEST = 2048
"""The widest row that is normed and rounded in the products' launch. Each program does so for
itself; on an H200 a launch before it is as fast at 2048, and at 4096 a gate takes 31 us in place
of 41."""
WHOLE = 16384
"""The widest row of which a launch makes a gate."""


def plain(
    x: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], norm: Tensor | None,
    x_scales: Sequence[Tensor], more: Tensor | None, out_scales: Sequence[Tensor], eps: float,
    centred: bool, gated: bool, dtype: torch.dtype, held: bool = False, together: bool = False,
) -> Tensor:  # fmt: skip
    """The ops that the op stands for."""
    by = _one(x_scales)
    if norm is not None:
        x = plain_rms_norm(x, norm, eps, centred)
    if x.dtype != FP8:
        x, by = plain_quantize_rows(x) if by is None else (plain_quantize(x, by), by)
    assert by is not None  # of what is in fp8 already
    made = [plain_linear(x, by, w, scale, dtype) for w, scale in zip(weights, weight_scales)]
    y = plain_silu_mul(*made) if gated else made[0] if len(made) == 1 else torch.cat(made, 1)
    y = y if more is None else y + more
    return plain_quantize(y, the_scale(out_scales)) if out_scales else y


def _one(scales: Sequence[Tensor]) -> Tensor | None:
    return the_scale(scales) if scales else None


def _run(
    x: Tensor, weights: list[Tensor], weight_scales: list[Tensor], norm: Tensor | None,
    x_scales: list[Tensor], more: Tensor | None, out_scales: list[Tensor], eps: float,
    centred: bool, gated: bool, dtype: torch.dtype, held: bool, together: bool,
) -> Tensor:  # fmt: skip
    given = (x, weights, weight_scales, norm, x_scales, more, out_scales, eps, centred, gated)
    if not x.is_cuda:
        return plain(*given, dtype).contiguous()
    check_device("fused_linear_fp8", x.device)
    if missing("cuda") is not None or not has_kernel(x, weights, weight_scales, more, gated, dtype):
        return by_parts(*given, dtype, held, together)
    from fngraph.ops.triton.products import skinny_fp8  # loads Triton

    out, by = _fake(*given, dtype, held, together), _one(x_scales)
    if not rounds_inside(x, norm):
        (x, by), norm = _rounded(x, norm, by, eps, centred), None
    skinny_fp8.run(
        x.contiguous(), weights, weight_scales, out, dtype, norm=norm, x_scale=by, more=more,
        out_scale=_one(out_scales), eps=eps, centred=centred, gated=gated, held=held,
    )  # fmt: skip
    return out


def has_kernel(
    x: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], more: Tensor | None,
    gated: bool, dtype: torch.dtype,
) -> bool:  # fmt: skip
    """Whether one launch makes the products and what is behind them: of one row, by what products
    are given."""
    T, K = x.shape
    plain = all(w.dtype == FP8 and w.is_contiguous() for w in weights) and dtype in _DTYPES
    alike = len({scale.dim() for scale in weight_scales}) == 1 and len(weights) <= MOST_WEIGHTS
    added = more is None or (more.dtype == dtype and more.stride(-1) == 1)
    return T == 1 and 0 < K and (K <= WHOLE or not gated) and plain and alike and added


def rounds_inside(x: Tensor, norm: Tensor | None) -> bool:
    """Whether the norm and the rounding of a row are of the products' launch."""
    if x.dtype == FP8:
        return True
    normed = norm is None or (norm.dtype == x.dtype and norm.is_contiguous())
    return x.shape[1] <= WIDEST and normed and x.dtype in _DTYPES


def by_parts(
    x: Tensor, weights: Sequence[Tensor], weight_scales: Sequence[Tensor], norm: Tensor | None,
    x_scales: Sequence[Tensor], more: Tensor | None, out_scales: Sequence[Tensor], eps: float,
    centred: bool, gated: bool, dtype: torch.dtype, held: bool, together: bool,
) -> Tensor:  # fmt: skip
    """What the op does with more rows: the kernels of other ops; a sum is in the products'."""
    x, by = _rounded(x, norm, _one(x_scales), eps, centred)
    rows = [w.shape[0] for w in weights]
    if together and why_apart(weights) is None and why_apart(weight_scales) is None:
        weights, weight_scales = [as_one(weights)], [as_one(weight_scales)]
    if gated:
        made = [product(x, by, w, s, dtype, held) for w, s in zip(weights, weight_scales)]
        made = made if len(made) == 2 else list(made[0].split(rows, 1))
        if out_scales and more is None:
            return _OPS.silu_mul_fp8(*made, list(out_scales))  # type: ignore[no-any-return]
        y = _OPS.silu_mul(*made)
        y = y if more is None else y.add_(more)
    else:
        y = _products(x, by, weights, weight_scales, more, dtype, held)
    return _OPS.quantize_fp8(y, the_scale(out_scales)) if out_scales else y  # type: ignore[no-any-return]


def _rounded(
    x: Tensor, norm: Tensor | None, by: Tensor | None, eps: float, centred: bool
) -> tuple[Tensor, Tensor]:
    """Rows in fp8 and their scale."""
    if x.dtype == FP8:
        assert by is not None
        return x, by
    if norm is None:
        return _OPS.quantize_fp8_rows(x) if by is None else (_OPS.quantize_fp8(x, by), by)
    given = (x, norm, eps, centred)
    return _OPS.rms_norm_fp8_rows(*given) if by is None else (_OPS.rms_norm_fp8(*given, [by]), by)


def _products(
    x: Tensor, by: Tensor, weights: Sequence[Tensor], scales: Sequence[Tensor],
    more: Tensor | None, dtype: torch.dtype, held: bool,
) -> Tensor:  # fmt: skip
    """Side by side in one result, each written where it belongs."""
    more = more if more is None or more.stride(-1) == 1 else more.contiguous()
    if len(weights) == 1:
        return product(x, by, weights[0], scales[0], dtype, held, more)
    rows = [w.shape[0] for w in weights]
    out = x.new_empty((x.shape[0], sum(rows)), dtype=dtype)
    added = [None] * len(rows) if more is None else more.split(rows, 1)
    for w, scale, plus, part in zip(weights, scales, added, out.split(rows, 1)):
        product(x, by, w, scale, dtype, held, plus, part)
    return out


def _fake(
    x: Tensor, weights: list[Tensor], weight_scales: list[Tensor], norm: Tensor | None,
    x_scales: list[Tensor], more: Tensor | None, out_scales: list[Tensor], eps: float,
    centred: bool, gated: bool, dtype: torch.dtype, held: bool, together: bool,
) -> Tensor:  # fmt: skip
    columns = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    return x.new_empty((x.shape[0], columns), dtype=FP8 if out_scales else dtype)


define_merged(
    "fused_linear_fp8",
    "(Tensor x, Tensor[] weights, Tensor[] weight_scales, Tensor? norm, Tensor[] x_scales, "
    "Tensor? more, Tensor[] out_scales, float eps, bool centred, bool gated, ScalarType dtype, "
    "bool held, bool together) -> Tensor",
    _run,
    _fake,
    "fg.ops.scaled_linear",
)
"""x (T, K); up to three weights (N, K) float8_e4m3fn with scales () or (N, 1) float32; the result
is (T, sum of N) of `dtype`, to which each product is rounded.

x: float8_e4m3fn, with its scale () or (T, 1); or of a dtype of floats, and rounded by the one known
    scale (), or by each row's own where none is given.
x_scales, out_scales: all one memory, as the scales of several weights' inputs are.
norm: (K,), of an RMSNorm of x with `eps`, before it is rounded; with `centred` it is 1 + norm.
gated: of two weights, silu of the one times the other; the result is (T, N).
more: (T, N) of `dtype`, added.
out_scales: the result is rounded by this known scale, to float8_e4m3fn.
held: whether nothing writes weights and their scales in the graph that this is recorded in, so that
    a kernel may read them before the one ahead of it has ended. A pass knows; if in doubt: False.
together: whether the weights lay side by side, and so their scales, when that was traced: more rows
    look whether they still do, and are one product then.
"""
