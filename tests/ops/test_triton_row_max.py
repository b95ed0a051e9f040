"""Triton's kernels of `row_max` against torch's `max`, bit for bit: on CUDA with `-m gpu`, else
interpreted, by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from fused_cases import GPU, OPS, draw
from triton_cases import WHERE

from fngraph.ops.row_max import KINDS, MOST_ROWS
from fngraph.ops.triton import highest as kernels

pytestmark = [pytest.mark.gpu] if GPU else []
ROWS = [1, 2, 64, 700] if GPU else [1, 3]
COLUMNS = [1, 80, 2048, 5000, 128256] if GPU else [1, 80, 2048, 5000]


def same(x: torch.Tensor) -> None:
    """Both results, of rows with numbers that are NaN too."""
    for keepdim in (False, True):
        want, got = x.max(-1, keepdim), kernels.row_max(x, keepdim)
        for a, b in zip(got, want, strict=True):
            assert a.dtype == b.dtype and a.is_contiguous()
            torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(got[1].squeeze(-1), x.argmax(-1))


@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_the_highest_of_each_row_and_the_first_of_equal_ones(
    rows: int, columns: int, dtype: torch.dtype
):
    x = draw(rows, columns, dtype=dtype).to(WHERE)
    same(x)
    same(x.round())  # many that are equal
    same(-x.abs() - 1)
    same(x[:, : columns // 2 + 1])  # of rows that lie further apart
    same(x.unflatten(0, (1, rows)))


@pytest.mark.parametrize("dtype", KINDS, ids=str)
def test_rows_with_no_number_and_zeros_of_both_signs(dtype: torch.dtype):
    rows = 8
    x = draw(rows, 5000, dtype=dtype).to(WHERE)
    x[:, [7, 900]] = float("-inf")  # as what masks logits has it
    same(x)
    x[:, 40], x[:, 4000] = float("inf"), float("nan")
    same(x)
    x = draw(rows, 5000, dtype=dtype).to(WHERE)
    x[0] = float("-inf")
    x[1] = 0.0
    x[1, ::2] = -0.0  # equal to 0, and first
    x[2, [17, 4999]] = float("inf")
    x[3, [4000, 2500]] = float("nan")
    x[4, 2100] = float("-nan")
    x[5] = float("nan")
    x[6] = torch.finfo(dtype).tiny / 4  # below the least normal one
    x[6, 3000] *= 2
    x[7], x[7, 4321] = torch.finfo(dtype).min, -1
    same(x)
    values, indices = kernels.row_max(x, False)
    assert indices[:6].tolist() == [0, 0, 17, 2500, 2100, 0]
    assert torch.signbit(values[1])


def test_it_is_what_the_op_runs_on():
    x = draw(2, 3, 5000).to(WHERE)
    values, indices = OPS.row_max(x, False)
    assert values.shape == indices.shape == (2, 3)
    assert torch.equal(indices, x.argmax(-1)) and torch.equal(values, x.amax(-1))
    assert OPS.row_max(x[:0], True)[0].shape == (0, 3, 1)
    assert OPS.row_max(x[0, 0, 0], True)[0].shape == ()


@pytest.mark.skipif(not GPU, reason="of what the op runs on a GPU")
@pytest.mark.parametrize(("rows", "ours"), [(MOST_ROWS, True), (MOST_ROWS + 1, False)])
def test_many_rows_are_torch_s(rows: int, ours: bool, monkeypatch: pytest.MonkeyPatch):
    launched: list[int] = []
    launch = kernels.launch
    monkeypatch.setattr(kernels, "launch", lambda *a, **b: (launched.append(1), launch(*a, **b)))
    x = draw(rows, 5000).to(WHERE)
    torch.testing.assert_close(OPS.row_max(x, False), tuple(x.max(-1)))
    assert bool(launched) is ours


@pytest.mark.skipif(not GPU, reason="many programs")
def test_more_rows_than_a_grid_has_in_its_second_dim():
    x = draw(70_000, 40, dtype=torch.bfloat16).to(WHERE)
    same(x)
