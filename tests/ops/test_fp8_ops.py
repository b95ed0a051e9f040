"""Quantising to float8_e4m3fn and products of it, against the same arithmetic stated in float64.
Their kernels are in test_triton_fp8.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fp8_cases import F64, draw, nearest, product, stated

import fngraph as fg
from fngraph.errors import BackendError, RowsError, TransformError, TreeError
from fngraph.ops import fp8

FP8 = torch.float8_e4m3fn
INF, NAN = math.inf, math.nan
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ERRORS = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}
"""Of a result, to the largest in its row: float32 sums of 64, and one rounding behind."""


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_known_scale_divides_and_cuts_off(dtype: torch.dtype):
    x, scale = (draw(40, 33) * draw(40, 1).mul(4).exp()).to(dtype), torch.tensor(0.3)
    got = fg.ops.quantize_fp8(x, scale)
    assert got.dtype == FP8 and got.shape == x.shape
    assert (got.to(F64).abs() == 448).any()
    assert torch.equal(got.to(F64), nearest(x.float() / scale))
    odd = fg.ops.quantize_fp8(torch.tensor([INF, -INF, NAN, 0.0, 465.0, -1e30]), torch.tensor(1.0))
    assert torch.equal(odd.float()[[0, 1, 3, 4, 5]], torch.tensor([448.0, -448, 0, 448, -448]))
    assert odd.float()[2].isnan()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_a_scale_of_its_own(dtype: torch.dtype):
    x = (draw(3, 40, 33) * draw(3, 40, 1).mul(4).exp()).to(dtype)
    x[0, 0], x[0, 1] = 0, 1e-40
    values, scales = fg.ops.quantize_fp8_rows(x)
    assert scales.shape == (3, 40, 1) and values.shape == x.shape
    assert (scales.dtype, values.dtype) == (torch.float32, FP8)
    assert torch.equal(scales, (x.float().abs().amax(-1, True) / 448).clamp(min=2.0**-126))
    assert torch.equal(values.to(F64), nearest(x.float() / scales))
    assert (values[1:].to(F64).abs().amax(-1) == 448).all()  # the whole range is used
    off = (values.to(F64) * scales - x.to(F64)).abs() / x.to(F64).abs().amax(-1, True)
    assert off[1:].max() <= 2**-4 / (1 + 2**-4)  # half of a last place of 448


def test_a_row_that_is_no_number_stays_in_its_row():
    x = draw(4, 32)
    x[1, 3], x[2, 5] = INF, NAN
    values, scales = fg.ops.quantize_fp8_rows(x)
    assert scales[1] == INF and scales[2].isnan()
    weight = draw(16, 32).to(FP8)
    got = fg.ops.scaled_linear(values, scales, weight, torch.tensor(1.0), torch.float32)
    assert got[1:3].isnan().all() and got[[0, 3]].isfinite().all()
    calm, calm_scales = fg.ops.quantize_fp8_rows(x[[0, 3]])
    one = torch.tensor(1.0)
    assert torch.equal(values[[0, 3]].float(), calm.float()) and torch.equal(
        scales[[0, 3]], calm_scales
    )
    want = fg.ops.scaled_linear(calm, calm_scales, weight, one, torch.float32)
    torch.testing.assert_close(got[[0, 3]], want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("by_row", [True, False])
@pytest.mark.parametrize("by_column", [True, False])
def test_a_product_is_that_of_the_numbers_it_stands_for(
    dtype: torch.dtype, by_row: bool, by_column: bool
):
    args = product(7, 48, 64, by_row, by_column)
    got, want = fg.ops.scaled_linear(*args, dtype), stated(*args)
    assert got.shape == (7, 48) and got.dtype == dtype and got.is_contiguous()
    off = (got.to(F64) - want).abs() / want.abs().amax()
    assert off.max() <= ERRORS[dtype]


@pytest.mark.parametrize("rows", [0, 3])
def test_ops_keep_what_torch_asks_of_ops(rows: int):
    one, ops = torch.tensor(1.0), torch.ops.fngraph
    values, scales = fg.ops.quantize_fp8_rows(draw(3, 32)[:rows])
    for op, args in (
        (ops.quantize_fp8.default, (draw(3, 32)[:rows], one)),
        (ops.quantize_fp8_rows.default, (draw(3, 2, 32)[:rows],)),
        (ops.scaled_linear.default, (values, scales, draw(16, 32).to(FP8), one, torch.bfloat16)),
    ):
        # it takes no fp8 for the schema, for which it needs to draw numbers
        also = () if args[0].dtype == FP8 else ("test_schema",)
        torch.library.opcheck(op, args, test_utils=("test_faketensor", *also))


X, W = draw(4, 32).to(FP8), draw(16, 32).to(FP8)
ONE, ROWS, COLUMNS = torch.tensor(1.0), torch.ones(4, 1), torch.ones(16, 1)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: fg.ops.quantize_fp8(X, ONE), r"x is \(4, 32\) of torch.float8_e4m3fn, expected"),
        (lambda: fg.ops.quantize_fp8_rows(ONE), r"x is \(\) of torch.float32, expected \(..., K\)"),
        (lambda: fg.ops.quantize_fp8_rows(torch.ones(3).long()), r"x is \(3,\) of torch.int64"),
        (lambda: fg.ops.quantize_fp8(draw(4, 32), ROWS), r"scale is a tensor float32 \(4, 1\)"),
        (lambda: fg.ops.quantize_fp8(draw(4, 32), ONE.half()), r"scale is of torch.float16"),
        (lambda: fg.ops.scaled_linear(X, ROWS, W[:, :16], ONE, torch.float32), r"N = 16, K = 32"),
        (lambda: fg.ops.scaled_linear(X.float(), ONE, W, ONE, torch.float32), r"x is of .*float32"),
        (lambda: fg.ops.scaled_linear(X, COLUMNS, W, ONE, torch.float32), r"\(T, 1\) with T = 4"),
        (lambda: fg.ops.scaled_linear(X, ONE, W, ROWS, torch.float32), r"\(N, 1\) with N = 16"),
        (lambda: fg.ops.scaled_linear(X, ONE, W, ONE.double(), torch.float32), r"weight_scale is"),
        (lambda: fg.ops.scaled_linear(X, ONE, W, ONE, torch.float64), r"dtype=torch.float64, exp"),
        (
            lambda: fg.ops.scaled_linear(X, ONE, draw(32, 16).to(FP8).t(), ONE, torch.float32),
            r"strides \(1, 16\), expected .*weight.contiguous\(\), once",
        ),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_at_its_line(call: Callable[[], Any], words: str):
    with pytest.raises(TreeError, match=words) as error:
        call()
    assert "test_fp8_ops.py:" in str(error.value) and "fg.ops." in str(error.value)


def test_what_a_gpu_cannot_take_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "an A100")
    with pytest.raises(BackendError, match=r"an A100 has capability 8.0; .* begin at 8.9"):
        fp8.check_device("scaled_linear", torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    fp8.check_device("scaled_linear", torch.device("cuda"))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: fg.ops.quantize_fp8(x, ONE),
        lambda x: fg.ops.quantize_fp8_rows(x),
        lambda x: fg.ops.scaled_linear(X, x[:, :1] * ROWS, W, ONE, torch.float32),
    ],
)
def test_there_is_no_gradient_and_no_transform(call: Callable[[Any], Any]):
    with pytest.raises(TransformError, match=r"test_fp8_ops.py:\d+: fg.ops.\w+ has no gradient"):
        call(draw(4, 32).requires_grad_())
    with pytest.raises(TransformError, match=r"no rule for torch.func"):
        torch.vmap(call)(draw(2, 4, 32))


@fg.struct
class Batch:
    """Rows of any kind."""

    x: torch.Tensor = fg.buffer("T 32", "float32")
    spec: fg.BatchSpec = fg.host()


KEPT: dict[str, Callable[..., Any]] = {
    "by rows": lambda w, s, b: fg.ops.scaled_linear(
        *fg.ops.quantize_fp8_rows(b.x), w, s, torch.float32),
    "by a known scale": lambda w, s, b: fg.ops.scaled_linear(
        fg.ops.quantize_fp8(b.x, s), s, w, s, torch.float32),
}  # fmt: skip
MIXED: dict[str, Callable[..., Any]] = {
    "rows that are features": lambda w, s, b: fg.ops.quantize_fp8_rows(b.x.t())[0].float().t() * 1,
    "sums over tokens, side by side": lambda w, s, b: torch.ops.fngraph.scaled_linear_side_by_side(
        fg.ops.quantize_fp8(b.x.t(), s).contiguous(), [s],
        [fg.ops.quantize_fp8(b.x.t(), s).contiguous()],
        [b.x.t().contiguous()[:, :1]], torch.float32),
    "a sum over tokens": lambda w, s, b: fg.ops.scaled_linear(
        fg.ops.quantize_fp8(b.x.t(), s).contiguous(), s,
        fg.ops.quantize_fp8(b.x.t(), s).contiguous(), s, torch.float32),
}  # fmt: skip


def trace(fn: Callable[..., Any]) -> Any:
    args = W, torch.tensor(0.1), Batch(draw(5, 32), fg.BatchSpec(5, 5))
    return fg.graphify(fn, stage="b", limits=fg.Limits(8, 8)).trace(*args[:2], batch=args[2])


@pytest.mark.parametrize("name", KEPT)
def test_rows_stay_apart(name: str):
    args = W, torch.tensor(0.1), Batch(draw(5, 32), fg.BatchSpec(5, 5))
    fg.check(KEPT[name], *args[:2], args[2], stage="b", rehearse=True)
    trace(KEPT[name])


@pytest.mark.parametrize("name", MIXED)
def test_what_mixes_rows_is_refused(name: str):
    with pytest.raises(RowsError, match="test_fp8_ops"):
        trace(MIXED[name])
