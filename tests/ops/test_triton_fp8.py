"""Triton's kernels of fp8 against their plain form: on CUDA with `-m gpu`, else interpreted, by
test_triton_interpreter.py. With `-m gpu` also products by `torch._scaled_mm`.

Quantising has the plain form's bits. A product adds up in another order, in float32: it is as near
to the exact one as the plain form is.
"""

from __future__ import annotations

import math

import pytest
import torch
from fp8_cases import draw, product, stated
from torch import Tensor
from triton_cases import GPU, WHERE

from fngraph.ops import fp8
from fngraph.ops.triton import rounding
from fngraph.ops.triton.products import fp8 as kernels
from fngraph.ops.triton.products.fp8 import How

pytestmark = [pytest.mark.gpu] if GPU else []
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
RESULTS = {torch.float32: 4e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""What a result is off at most, to the largest of all: sums in float32, and one rounding behind."""
ROWS = [1, 2, 5, 16]
SIZES = [(4096, 4096), (1024, 4096), (4096, 14336), (80, 528)] if GPU else [(48, 64), (80, 1040)]
HOWS = [How(8, 64, 1, 4, 3), How(16, 256, 4, 4, 2), How(64, 128, 2, 4, 4)]


def odd(count: int, width: int, dtype: torch.dtype) -> Tensor:
    """Rows of very unequal sizes; some of zeros, numbers that are almost none, and no numbers."""
    x = (draw(count, width) * draw(count, 1).mul(3).exp()).to(dtype)
    x[0], x[1], x[2, 3], x[3, 5] = 0, 1e-40, math.inf, math.nan
    x[4] = torch.linspace(-500, 500, width)
    return x.to(WHERE)


def bits(x: Tensor) -> Tensor:
    """Those of numbers; of NaN, whose sign is nobody's, one for all."""
    return x.view(torch.uint8).masked_fill(x.float().isnan(), 255)


@pytest.mark.parametrize("dtype", DTYPES if GPU else DTYPES[:1])
@pytest.mark.parametrize("width", [300, 4096, 14336] if GPU else [300])
def test_quantising_has_the_bits_of_the_plain_form(dtype: torch.dtype, width: int):
    x, scale = odd(9, width, dtype), torch.tensor(0.3, device=WHERE)
    for given in (x, x.t().contiguous().t(), x.unflatten(0, (3, 3))):
        values, scales = rounding.quantize_rows(given)
        want, want_scales = fp8.plain_quantize_rows(given)
        assert values.is_contiguous() and values.shape == given.shape
        assert torch.equal(bits(values), bits(want))
        torch.testing.assert_close(scales, want_scales, atol=0, rtol=0, equal_nan=True)
        values = rounding.quantize(given, scale)
        assert torch.equal(bits(values), bits(fp8.plain_quantize(given, scale)))
    assert rounding.quantize_rows(x[:0])[0].shape == (0, width)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("N", "K"), SIZES)
@pytest.mark.parametrize("how", [None, *HOWS])
def test_a_product_of_few_rows_is_exact_to_its_rounding(rows: int, N: int, K: int, how: How | None):
    for by_row, by_column in ((True, True), (False, False), (True, False)):
        args = tuple(x.to(WHERE) for x in product(rows, N, K, by_row, by_column))
        want = stated(*args)
        for dtype in DTYPES if GPU else DTYPES[:1]:
            got = kernels.linear(*args, dtype, how=how)
            assert got.shape == (rows, N) and got.dtype == dtype
            assert (got - want).abs().max() <= RESULTS[dtype] * want.abs().max()


def test_no_row_reaches_another():
    x, x_scale, weight, scale = (y.to(WHERE) for y in product(5, 48, 1040))
    for how in (None, *HOWS):
        clean = kernels.linear(x, x_scale, weight, scale, torch.float32, how=how)
        spoilt, by = x.clone(), x_scale.clone()
        by[1], by[3] = math.nan, math.inf
        if GPU:  # the interpreter reads NaN as 480
            spoilt.view(torch.uint8)[1, 7], by[1] = 127, x_scale[1]
        got = kernels.linear(spoilt, by, weight, scale, torch.float32, how=how)
        assert got[1].isnan().all() and not got[3].isfinite().any()
        assert torch.equal(got[[0, 2, 4]], clean[[0, 2, 4]])


def test_k_is_split_only_where_columns_are_few():
    splits = {shape: kernels.how_to(16, *shape, 132).splits for shape in
              ((28672, 4096), (6144, 4096), (4096, 14336), (1024, 4096), (64, 512))}  # fmt: skip
    assert list(splits.values()) == [1, 4, 8, 8, 1]
    assert kernels.how_to(2, 4096, 4096, 132) == kernels.how_to(16, 4096, 4096, 132)


# --- on CUDA alone --------------------------------------------------------------------------------

CUDA = pytest.mark.gpu


@CUDA
@pytest.mark.parametrize("rows", [0, 1, 16, 17, 64, 257])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
def test_on_cuda_a_product_is_exact_whatever_runs_it(
    rows: int, dtype: torch.dtype, by_row: bool, by_column: bool
):
    args = tuple(x.cuda() for x in product(rows, 1024, 4096, by_row, by_column))
    want = stated(*args)
    for run in (torch.ops.fngraph.scaled_linear, fp8.tensor_cores):
        got = run(*args, dtype)
        assert got.shape == (rows, 1024) and got.dtype == dtype
        if rows:
            off = (got - want).abs().max() / want.abs().max()
            assert off <= RESULTS[dtype] + 2**-12  # tensor cores add up in fewer bits


@CUDA
def test_on_cuda_ops_run_their_kernels_and_refuse_uneven_weights():
    from fngraph.errors import TreeError

    x = odd(9, 512, torch.bfloat16)
    values, scales = torch.ops.fngraph.quantize_fp8_rows(x.cuda())
    want, want_scales = rounding.quantize_rows(x.cuda())
    assert torch.equal(bits(values), bits(want))
    torch.testing.assert_close(scales, want_scales, atol=0, rtol=0, equal_nan=True)
    few = tuple(y.cuda() for y in product(9, 64, 512))
    got = torch.ops.fngraph.scaled_linear(*few, torch.bfloat16)
    assert torch.equal(got, kernels.linear(*few, torch.bfloat16))
    for N, K in ((40, 64), (48, 72)):
        uneven = tuple(y.cuda() for y in product(4, N, K))
        with pytest.raises(TreeError, match=r"take multiples of 16\. Leave this weight as it was"):
            torch.ops.fngraph.scaled_linear(*uneven, torch.bfloat16)
