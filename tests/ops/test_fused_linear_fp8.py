"""A linear layer in fp8 with what is around it: bit for bit the ops that it stands for on the CPU.
Its kernels are in test_triton_skinny_fp8.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from fp8_cases import INPUTS, LAYERS, layer, moved
from torch import Tensor
from torch.nn.functional import silu

from fngraph.errors import AddressError, TransformError
from fngraph.ops import fused_linear_fp8

OPS = torch.ops.fngraph
kinds = pytest.mark.parametrize("kind", LAYERS)


def one_by_one(args: list[Any]) -> Tensor:
    """By the ops that a model calls."""
    x, weights, scales, norm, x_scales, more, out_scales, eps, centred, gated, dtype, *_ = args
    if norm is not None:
        x = OPS.rms_norm(x, norm, eps, centred)
    if x.dtype == torch.float8_e4m3fn:
        by = x_scales[0]
    elif x_scales:
        x, by = OPS.quantize_fp8(x, x_scales[0]), x_scales[0]
    else:
        x, by = OPS.quantize_fp8_rows(x)
    made = [OPS.scaled_linear(x, by, w, s, dtype) for w, s in zip(weights, scales)]
    y = silu(made[0]) * made[1] if gated else torch.cat(made, 1)
    y = y if more is None else more + y
    return OPS.quantize_fp8(y, out_scales[0]) if out_scales else y


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.itemsize == 1 else x


@kinds
@pytest.mark.parametrize("given", INPUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_the_ops_one_by_one_bit_for_bit(kind: str, given: str, dtype: torch.dtype):
    for rows, K, by_column in itertools.product((1, 2, 8, 17, 0), (80,), (True, False)):
        args = layer(kind, given, rows, K, dtype, by_column)
        got, want = OPS.fused_linear_fp8(*args), one_by_one(args)
        assert got.dtype == want.dtype and got.is_contiguous() and got.shape == want.shape
        assert torch.equal(bits(got), bits(want))
        fake = OPS.fused_linear_fp8(*moved(args, "meta"))
        assert fake.shape == got.shape and fake.dtype == got.dtype
        if rows and "rounded" not in (kind, given):
            wrong = list(args)
            wrong[1] = [w.flip(0) for w in args[1]]
            assert not torch.equal(bits(OPS.fused_linear_fp8(*wrong)), bits(want))


@kinds
def test_it_keeps_what_torch_asks_of_ops(kind: str):
    op = OPS.fused_linear_fp8.default
    args = layer(kind, "norm own", 4, 48, torch.float32)
    torch.library.opcheck(op, tuple(args), test_utils=("test_faketensor",))
    with pytest.raises(TransformError, match=r"has no gradient\. Write fg\.ops\.scaled_linear"):
        op(args[0].clone().requires_grad_(), *args[1:])


def test_scales_that_are_not_one_memory_any_more_are_refused():
    args = layer("q, k and v", "known", 2, 48, torch.float32)
    args[4] = [x.clone() for x in args[4]]
    with pytest.raises(AddressError, match=r"3 scales by which one input .* passes linears_fp8"):
        OPS.fused_linear_fp8(*args)


def test_one_launch_is_for_one_row_of_what_products_take():
    def takes(kind: str = "a residual", T: int = 1, K: int = 64, **changed: Any) -> bool:
        names = ("x", "weights", "weight_scales", "more", "gated", "dtype")
        x, weights, scales, _, _, more, _, _, _, gated, dtype, *_ = layer(
            kind, "rounded", T, K, torch.bfloat16
        )
        given = dict(zip(names, (x, weights, scales, more, gated, dtype))) | changed
        return fused_linear_fp8.has_kernel(**given)

    assert takes() and takes(K=20000) and takes("gate and up") and not takes("gate and up", K=20000)
    assert not takes(T=2) and not takes(T=0) and not takes(dtype=torch.float64)
    assert not takes(more=torch.ones(1, 24)) and takes(more=None)
    assert not takes("two", weight_scales=[torch.ones(9, 1), torch.ones(())])
    bf16, f64, f8 = torch.bfloat16, torch.float64, fused_linear_fp8.FP8
    for dtype, K, want in ((bf16, 2048, 1), (f64, 64, 0), (bf16, 2064, 0), (f8, 4112, 1)):
        assert fused_linear_fp8.rounds_inside(torch.zeros(1, K).to(dtype), None) == want
    assert not fused_linear_fp8.rounds_inside(torch.zeros(1, 64).bfloat16(), torch.ones(64))
