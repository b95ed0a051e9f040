"""Triton's kernels of the fused ops against their plain form: on CUDA with `-m gpu`, else
interpreted, by test_triton_interpreter.py.

A kernel adds a row in another order, in float32, and may round once more or less at the end: 1e-5
in float32, two units in the last place of bfloat16 and float16. It is no further from the same in
float64 than twice what torch's own ops are.
"""

from __future__ import annotations

import pytest
import torch
from fused_cases import CASES, GPU, OPS, tensors
from torch import Tensor
from triton_cases import DTYPES, WHERE

from fngraph.ops import fused
from fngraph.ops.triton import fused as kernels

pytestmark = [pytest.mark.gpu] if GPU else []
ROWS = [1, 3, 8, 257, 4096] if GPU else [1, 3]
ERRORS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (1e-3, 2e-3)}
cases = pytest.mark.parametrize("case", CASES)


@cases
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_the_plain_form_within_its_error(case: str, rows: int, dtype: torch.dtype):
    name, make = CASES[case]
    args = tuple(x.to(WHERE) if isinstance(x, Tensor) else x for x in make(rows, dtype))
    exact = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
    atol, rtol = ERRORS[dtype]
    plain = tensors(fused.PLAIN[name][1](*args))
    for got, want, more in zip(
        tensors(getattr(kernels, name)(*args)), plain, tensors(fused.PLAIN[name][1](*exact))
    ):
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
        off, least = (got - more).abs().max(), (want - more).abs().max()
        assert off <= 2 * least + atol  # no further from the truth than torch's own


@pytest.mark.gpu
@cases
def test_on_cuda_an_op_runs_its_kernel(case: str):
    name, make = CASES[case]
    args = tuple(x.cuda() if isinstance(x, Tensor) else x for x in make(9, torch.bfloat16))
    got, want = (tensors(fn(*args)) for fn in (getattr(OPS, name), getattr(kernels, name)))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
