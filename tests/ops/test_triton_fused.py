"""Triton's kernels of the fused ops against their plain form: on CUDA with `-m gpu`, else
interpreted, by test_triton_interpreter.py.

A kernel adds a row in another order, in float32, and may round once more or less at the end: 1e-5
in float32, two units in the last place of bfloat16 and float16. It is no further from the same in
float64 than twice what torch's own ops are.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fused_cases import CASES, FP8_CASES, GPU, OPS, PLAIN, on, tensors
from torch import Tensor
from triton_cases import DTYPES, WHERE

from fngraph.ops.triton import fused as kernels

pytestmark = [pytest.mark.gpu] if GPU else []
ROWS = [1, 3, 8, 257, 4096] if GPU else [1, 3]
ERRORS = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1e-2, 1.6e-2), torch.float16: (1e-3, 2e-3)}
cases = pytest.mark.parametrize("case", CASES)


@cases
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_the_plain_form_within_its_error(case: str, rows: int, dtype: torch.dtype):
    held_to_plain(case, rows, dtype)


@pytest.mark.parametrize("case", [case for case in CASES if case.startswith("rope")])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_so_is_that_of_many_heads(
    case: str, rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
):
    launched = []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "FEW_HEADS", 0)
    monkeypatch.setattr(kernels, "launch", lambda *a, **b: (launched.append(a[0]), launch(*a, **b)))
    held_to_plain(case, rows, dtype)
    whole = case != "rope of a share"  # of which all columns turn
    assert launched == [kernels.rope_pairs_kernel if whole else kernels.rope_kernel]


def held_to_plain(case: str, rows: int, dtype: torch.dtype) -> None:
    """A kernel's results beside torch's ops' and the truth."""
    name, make = CASES[case]
    args = on(WHERE, make(rows, dtype))
    exact = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
    atol, rtol = ERRORS[dtype]
    plain = tensors(PLAIN[name][1](*args))
    for got, want, more in zip(
        tensors(getattr(kernels, name)(*args)), plain, tensors(PLAIN[name][1](*exact))
    ):
        assert got.dtype == dtype and got.is_contiguous()
        torch.testing.assert_close(got, want, atol=atol, rtol=rtol)
        off, least = (got - more).abs().max(), (want - more).abs().max()
        assert off <= 2 * least + atol  # no further from the truth than torch's own


def compare(name: str, args: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """What a kernel that rounds to fp8 gives, held to the plain form.

    A row that is rounded otherwise before may have another scale by as much, and values next to the
    right ones: one in ten at most.
    """
    atol, rtol = ERRORS[dtype]
    got, want = (tensors(fn(*args)) for fn in (getattr(kernels, name), PLAIN[name][1]))
    for a, b in zip(got, want, strict=True):
        assert a.is_contiguous() and a.dtype == b.dtype and a.shape == b.shape
        if a.dtype == torch.float8_e4m3fn:
            assert torch.equal(a.float().isnan(), b.float().isnan())
            off = (_steps(a) - _steps(b)).abs()[~a.float().isnan()]
            assert not off.numel() or (off.max() <= 1 and (off > 0).float().mean() <= 0.1)
        else:
            close = {"atol": 0, "rtol": rtol} if a.shape[-1] == 1 else {"atol": atol, "rtol": rtol}
            torch.testing.assert_close(a, b, equal_nan=True, **close)
    return got


def _steps(x: Tensor) -> Tensor:
    """Numbers of float8_e4m3fn counted from zero."""
    bits = x.view(torch.uint8).int()
    return torch.where(bits < 128, bits, 128 - bits)


@pytest.mark.parametrize("case", FP8_CASES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_rounds_to_fp8_as_the_plain_form_does(case: str, rows: int, dtype: torch.dtype):
    name, make = FP8_CASES[case]
    args = on(WHERE, make(rows, dtype))
    compare(name, args, dtype)


@pytest.mark.parametrize("case", FP8_CASES)
def test_what_is_no_number_stays_in_its_row(case: str):
    name, make = FP8_CASES[case]
    first, *rest = on(WHERE, make(4, torch.float32))
    wrong = first.clone()
    calm = compare(name, (first, *rest), torch.float32)
    rows = wrong.transpose(0, -2)
    rows[1, ..., 3], rows[2, ..., 5] = math.inf, math.nan
    for a, b in zip(compare(name, (wrong, *rest), torch.float32), calm):
        if a.dim():
            assert a[..., 2, :].float().isnan().any() and not b.float().isnan().any()
            assert torch.equal(a[..., [0, 3], :].float(), b[..., [0, 3], :].float())


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES | FP8_CASES)
def test_on_cuda_an_op_runs_its_kernel(case: str):
    name, make = (CASES | FP8_CASES)[case]
    args = on("cuda", make(9, torch.bfloat16))
    got, want = (tensors(fn(*args)) for fn in (getattr(OPS, name), getattr(kernels, name)))
    assert all(torch.equal(a.float(), b.float()) for a, b in zip(got, want, strict=True))
