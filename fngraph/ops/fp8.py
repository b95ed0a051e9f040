"""Products of 8-bit floats: rows and weights of float8_e4m3fn with scales beside them.

A tensor x stands as values and a scale, x = values * scale, where the values are float8_e4m3fn: at
most 448, three bits behind the first. `quantize_fp8` has a scale that somebody measured before,
`quantize_fp8_rows` one that each row (token) makes of itself. A scale that a whole batch makes of
itself is not here: padding would have a say in it, and a row's bits would depend on the rows beside
it.

Each op has a plain form in torch: on the CPU that is what runs. On CUDA quantisation is a kernel of
Triton's in one launch (`triton/rounding.py`), with the bits of the plain form; the product is a
kernel of Triton's for few rows (`triton/products/fp8.py`; for one, `skinny_fp8.py` beside it), and
`torch._scaled_mm` for more, by the number of rows alone. Both add up in another order. There is no
gradient, and no rule for `torch.func`. Results are contiguous.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from fngraph.core.where import user_line
from fngraph.errors import BackendError, TransformError, TreeError
from fngraph.ops.check_shapes import Shapes
from fngraph.ops.opaque import define_op
from fngraph.ops.triton.launching import missing
from fngraph.torch_facts.names import scaled_mm

FP8 = torch.float8_e4m3fn
MAX = 448.0
"""The largest number of float8_e4m3fn, which has no infinity."""
LEAST = 2.0**-126
"""The least scale of a row, float32's least normal number."""
FEW = 16
"""The most rows that the kernel for few takes."""
STEP = 16
"""Tensor cores take widths and numbers of rows of a weight in steps of so many."""
CAPABILITY = (8, 9)
"""The first devices that multiply in fp8."""


def quantize_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, of a scale that is known before: divided in float32, cut off at +-448, rounded to
    the nearest even. An infinity becomes 448, NaN stays NaN.

    Args:
        x: (..., K) of any dtype of floats.
        scale: () float32, above 0.

    Returns:
        (..., K) float8_e4m3fn.

    Raises:
        TreeError: another shape or dtype.
        BackendError: a device that is too old for fp8.
    """
    return _QUANTIZE(x, scale)  # type: ignore[no-any-return]


def quantize_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Each row by a scale of its own: its largest absolute value / 448, in float32.

    No scale is below 2**-126, so that a row of zeros is zeros and a scale that can be divided by. A
    row with an infinity has the scale infinity, one with NaN the scale NaN; what is multiplied of
    such a row is NaN in all of its columns, and in no other row.

    Args:
        x: (..., K) of any dtype of floats.

    Returns:
        values (..., K) float8_e4m3fn, rounded as in `quantize_fp8`; scales (..., 1) float32.

    Raises:
        TreeError: another shape or dtype.
        BackendError: a device that is too old for fp8.
    """
    return _QUANTIZE_ROWS(x)  # type: ignore[no-any-return]


def scaled_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    held: bool = False,
) -> Tensor:  # fmt: skip
    """(x * x_scale) @ (weight * weight_scale).t(): products and their sum in float32, that times
    `x_scale`, then times `weight_scale`, each in float32, then rounded to `dtype`.

    On CUDA widths and numbers of rows are multiples of 16.

    Args:
        x: (T, K) float8_e4m3fn.
        x_scale: () or (T, 1) float32.
        weight: (N, K) float8_e4m3fn, contiguous.
        weight_scale: () or (N, 1) float32.
        dtype: of the result: bfloat16, float16 or float32.
        held: whether nothing writes the weight and its scale in the graph that this is recorded
            in, so that a kernel may read them before the one ahead of it has ended. The pass
            "held_fp8" knows; if in doubt: False.

    Returns:
        (T, N) of `dtype`.

    Raises:
        TreeError: another shape, dtype or layout, or widths that tensor cores cannot take.
        BackendError: a device that is too old for fp8.
    """
    return _LINEAR(x, x_scale, weight, weight_scale, dtype, held=held)  # type: ignore[no-any-return]


# --- plain forms ----------------------------------------------------------------------------------


def plain_quantize(x: Tensor, scale: Tensor) -> Tensor:
    """`quantize_fp8` in torch."""
    return (x.float() / scale).clamp(-MAX, MAX).to(FP8)


def plain_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_fp8_rows` in torch."""
    top = x.float().abs().amax(-1, keepdim=True)
    # by a tensor: torch on CUDA multiplies by the inverse of a number
    scale = (top / torch.full_like(top, MAX)).clamp(min=LEAST)
    return plain_quantize(x, scale), scale


def plain_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`scaled_linear` in torch."""
    return (x.float() @ weight.float().t() * x_scale * weight_scale.t()).to(dtype)


# --- where each runs ------------------------------------------------------------------------------


def _run_quantize(x: Tensor, scale: Tensor) -> Tensor:
    _check_quantize(x, scale)
    if x.is_cuda:
        check_device("quantize_fp8", x.device)
        if missing("cuda") is None:
            from fngraph.ops.triton import rounding  # loads Triton

            return rounding.quantize(x, scale)
    return plain_quantize(x, scale).contiguous()


def _run_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    _check_rows(x)
    if x.is_cuda:
        check_device("quantize_fp8_rows", x.device)
        if missing("cuda") is None:
            from fngraph.ops.triton import rounding  # loads Triton

            return rounding.quantize_rows(x)
    values, scale = plain_quantize_rows(x)
    return values.contiguous(), scale.contiguous()


def _run_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    held: bool = False,
) -> Tensor:  # fmt: skip
    _check_linear(x, x_scale, weight, weight_scale, dtype)
    if not x.is_cuda:
        return plain_linear(x, x_scale, weight, weight_scale, dtype)
    check_device("scaled_linear", x.device)
    return product(x, x_scale, weight, weight_scale, dtype, held)


def product(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    held: bool = False, more: Tensor | None = None, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`scaled_linear` on CUDA, by what is fastest for so many rows.

    Args:
        more: (T, N) of `dtype`, added to the rounded product.
        out: (T, N) of `dtype` to write to, as columns of a larger one. None: a new one.
    """
    if x.shape[0] <= FEW and missing("cuda") is None:
        from fngraph.ops.triton.products import fp8  # loads Triton

        given = (x, x_scale, weight, weight_scale, dtype)
        return fp8.linear(*given, held=held, more=more, out=out)
    made = tensor_cores(x, x_scale, weight, weight_scale, dtype)
    made = made if more is None else made.add_(more)
    return made if out is None else out.copy_(made)


def tensor_cores(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> Tensor:
    """`scaled_linear` by `torch._scaled_mm`, without its fast accumulation, which keeps 14 bits.

    It takes one scale for each side or one a row for each, and of rows gives bfloat16 alone: for
    another dtype the product is taken in float32 without scales, which come behind it.
    """
    T, N = x.shape[0], weight.shape[0]
    x = x.contiguous()
    if not T or not N:
        return x.new_empty((T, N), dtype=dtype)
    if not x_scale.dim() and not weight_scale.dim():
        return scaled_mm(x, weight.t(), x_scale, weight_scale, out_dtype=dtype)
    if dtype == torch.bfloat16:
        by_row = x_scale.expand(T, 1).contiguous()
        by_column = weight_scale.expand(N, 1).contiguous().t()
        return scaled_mm(x, weight.t(), by_row, by_column, out_dtype=dtype)
    one = torch.ones((), device=x.device)
    bare = scaled_mm(x, weight.t(), one, one, out_dtype=torch.float32)
    return (bare * x_scale * weight_scale.t()).to(dtype)


# --- what is refused ------------------------------------------------------------------------------

_OF_QUANTIZE = Shapes("quantize_fp8", {"scale": ""})
_OF_LINEAR = Shapes("scaled_linear", {"x": "T K", "weight": "N K"})
_RESULTS = (torch.bfloat16, torch.float16, torch.float32)


def _check_quantize(x: Tensor, scale: Tensor) -> None:
    _check_rows(x, "quantize_fp8")
    _OF_QUANTIZE.check(scale)
    _check_dtype("quantize_fp8", "scale", scale, torch.float32)


def _check_rows(x: Tensor, name: str = "quantize_fp8_rows") -> None:
    if not x.dim() or not x.is_floating_point() or x.dtype.itemsize == 1:
        raise TreeError(
            f"{user_line()}: fg.ops.{name}: x is {tuple(x.shape)} of {x.dtype}, expected (..., K) "
            "of bfloat16, float16 or float32"
        )


def _check_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype
) -> None:
    sizes = _OF_LINEAR.check(x, weight)
    for name, y in (("x", x), ("weight", weight)):
        _check_dtype("scaled_linear", name, y, FP8)
    for name, y, letter in (("x_scale", x_scale, "T"), ("weight_scale", weight_scale, "N")):
        _check_dtype("scaled_linear", name, y, torch.float32)
        if y.dim():
            _OF_LINEAR.also(name, f"{letter} 1", y, sizes)
    if dtype not in _RESULTS:
        raise TreeError(
            f"{user_line()}: fg.ops.scaled_linear: dtype={dtype}, expected one of "
            f"{', '.join(map(str, _RESULTS))}"
        )
    if not weight.is_contiguous():
        raise TreeError(
            f"{user_line()}: fg.ops.scaled_linear: weight has strides {weight.stride()}, expected "
            "(N, K) row by row in memory: weight.contiguous(), once, where it is loaded"
        )
    uneven = [n for n in weight.shape if isinstance(n, int) and n % STEP]
    if weight.is_cuda and uneven:
        raise TreeError(
            f"{user_line()}: fg.ops.scaled_linear: weight is {tuple(weight.shape)}, and tensor "
            f"cores take multiples of {STEP}. Leave this weight as it was"
        )


def _check_dtype(name: str, what: str, x: Tensor, dtype: torch.dtype) -> None:
    if x.dtype != dtype:
        raise TreeError(f"{user_line()}: fg.ops.{name}: {what} is of {x.dtype}, expected {dtype}")


def check_device(name: str, device: torch.device) -> None:
    """
    Raises:
        BackendError: a device that is too old for fp8.
    """
    found = torch.cuda.get_device_capability(device)
    if found < CAPABILITY:
        raise BackendError(
            f"{user_line()}: fg.ops.{name}: {torch.cuda.get_device_name(device)} has capability "
            f"{'.'.join(map(str, found))}; products in fp8 begin at "
            f"{'.'.join(map(str, CAPABILITY))}. Serve the weights as they were before they were "
            "quantised"
        )


# --- the ops --------------------------------------------------------------------------------------


def _fake_quantize(x: Tensor, scale: Tensor) -> Tensor:
    _check_quantize(x, scale)
    return x.new_empty(x.shape, dtype=FP8)


def _fake_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    _check_rows(x)
    values = x.new_empty(x.shape, dtype=FP8)
    return values, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


def _fake_linear(
    x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor, dtype: torch.dtype,
    held: bool = False,
) -> Tensor:  # fmt: skip
    _check_linear(x, x_scale, weight, weight_scale, dtype)
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


def _define(name: str, schema: str, run: Any, fake: Any) -> Any:
    def refuse(*args: Any) -> NoReturn:
        raise TransformError(
            f"{user_line()}: fg.ops.{name} has no gradient, and no rule for torch.func: what "
            "is rounded to 8 bits has none. Train the weights as they were before they were "
            "quantised"
        )

    return define_op(name, schema, run, fake, refuse)


_QUANTIZE = _define(
    "quantize_fp8", "(Tensor x, Tensor scale) -> Tensor", _run_quantize, _fake_quantize
)
_QUANTIZE_ROWS = _define(
    "quantize_fp8_rows", "(Tensor x) -> (Tensor, Tensor)", _run_quantize_rows, _fake_quantize_rows
)
_LINEAR = _define(
    "scaled_linear",
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, ScalarType dtype, "
    "bool held=False) -> Tensor",
    _run_linear,
    _fake_linear,
)
