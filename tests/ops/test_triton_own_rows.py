"""The kernel that sums, adds and norms a process's own rows against its plain form: on CUDA with
`-m gpu`, else interpreted, by test_triton_interpreter.py."""

from __future__ import annotations

import pytest
import torch
from fused_cases import GPU, draw
from triton_cases import DTYPES, WHERE

from fngraph.ops.triton.own_rows import own_rows_rms_norm
from fngraph.ranks.rows import plain_own_rows_rms_norm

pytestmark = [pytest.mark.gpu] if GPU else []
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.parametrize("processes", [1, 2, 3])
@pytest.mark.parametrize(("rows", "size"), [(6, 2), (7, 3), (1, 2), (4, 3), (0, 2)])
def test_it_is_the_plain_form_among_zeros(
    rows: int, size: int, processes: int, centred: bool, dtype: torch.dtype
):
    """Of every process, with rows past the last that count for nothing, and of one without any."""
    k, width = -(-rows // size), 70
    y = draw(rows, width + 3, dtype=dtype, seed=1).to(WHERE)[:, :width]
    weight = draw(width, dtype=dtype, seed=2).to(WHERE)
    for rank in range(size):
        parts = draw(processes, k, width, dtype=dtype, seed=3 + rank).to(WHERE)
        parts[:, max(0, rows - rank * k) :] = float("nan")  # of no row
        args = (parts, y, weight, 1e-5, centred, rank * k)
        exact = (x.double() if isinstance(x, torch.Tensor) else x for x in args)
        for got, want in zip(own_rows_rms_norm(*args), plain_own_rows_rms_norm(*exact)):
            assert got.dtype == dtype and got.is_contiguous() and got.shape == y.shape
            off = CLOSE[dtype] * (2 if dtype == torch.bfloat16 and not GPU else 1)  # it cuts off
            torch.testing.assert_close(got.double(), want, atol=off, rtol=off)
            elsewhere = torch.cat([got[: rank * k], got[(rank + 1) * k :]])
            assert not elsewhere.any(), "the sum over processes would not be all of it"


@pytest.mark.parametrize("first", [0, 4])
def test_what_others_have_is_not_read(first: int):
    """No number, of their rows of y, does not get into zeros."""
    y = draw(8, 16).to(WHERE)
    y[:first], y[first + 4 :] = float("nan"), float("inf")
    args = (draw(2, 4, 16).to(WHERE), y, draw(16, seed=1).to(WHERE), 1e-5, False, first)
    for fn in (own_rows_rms_norm, plain_own_rows_rms_norm):
        for made in fn(*args):
            assert made.isfinite().all() and not made[4 - first :][:4].any()
