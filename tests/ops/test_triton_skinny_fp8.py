"""Triton's kernel of linear layers in fp8 of one row, with what is around them: on CUDA with
`-m gpu`, else interpreted, by test_triton_interpreter.py. So are the kernels for 2 to 16 rows, with
a sum in them.

They add up in another order, in float32: as near to the exact result as in test_triton_fp8.py, and
where a number of the input lies almost between two of fp8, off by its step as well.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from fp8_cases import INPUTS, LAYERS, draw, exact, layer, moved, nearest
from torch import Tensor
from triton_cases import ALL, GPU, WHERE

from fngraph.ops import fused_linear_fp8, lay_side_by_side
from fngraph.ops.triton import rounding
from fngraph.ops.triton.products import skinny_fp8
from fngraph.ops.triton.products.skinny_fp8 import Tile

pytestmark = [pytest.mark.gpu] if GPU else []
kinds = pytest.mark.parametrize("kind", LAYERS)
inputs = pytest.mark.parametrize("given", INPUTS)
F32 = torch.float32
ADDED = 2.0**-12  # of its terms a sum of torch's for many rows is off: it keeps some 14 bits


def by_kernel(args: list[Any], tile: Tile | None = None) -> Tensor:
    x, weights, scales, norm, x_scales, more, out_scales, eps, centred, gated, dtype, *_ = args
    columns = sum(w.shape[0] for w in weights[: 1 if gated else None])
    kind = rounding.FP8 if out_scales else dtype
    out = torch.zeros(1, columns, device=WHERE).to(kind)
    skinny_fp8.run(
        x, weights, scales, out, dtype, norm=norm, x_scale=x_scales[0] if x_scales else None,
        more=more, out_scale=out_scales[0] if out_scales else None, eps=eps, centred=centred,
        gated=gated, tile=tile,
    )  # fmt: skip
    return out


def check(got: Tensor, args: list[Any], kind: str) -> None:
    want, slack = exact(args)
    off = slack + 8e-6 * want.abs().amax(1, keepdim=True)
    if args[6]:
        want, off, got = want / args[6][0], off / args[6][0], got.float()
        off = off + (nearest(want) - want).abs()
        want = want.clamp(-448, 448)
    assert got.isfinite().all()
    assert ((got - want).abs() <= off).all(), (kind, (got - want).abs().max(), off.min())


@kinds
@inputs
def test_one_row_is_exact_to_its_roundings(kind: str, given: str):
    for K, by_column, tile in ((64, True, None), (300, False, None), (80, True, Tile(2, 128, 4))):
        args = moved(layer(kind, given, 1, K, F32, by_column), WHERE)
        check(by_kernel(args, tile), args, kind)


@kinds
def test_a_row_wider_than_a_program_takes_is_read_in_turns(kind: str):
    if "gate" not in LAYERS[kind][1]:
        args = moved(layer(kind, "rounded", 1, 300, F32), WHERE)
        check(by_kernel(args, Tile(4, 64, 4)), args, kind)


@kinds
@inputs
@pytest.mark.parametrize(("rows", "K"), [(2, 1040), (8, 528)])
def test_more_rows_go_through_other_kernels(kind: str, given: str, rows: int, K: int):
    """The wider is split in two."""
    args = moved(layer(kind, given, rows, K, F32), WHERE)
    check(fused_linear_fp8.by_parts(*args), args, kind)
    names = ["a", "b", "c"][: len(args[1])]
    for i in (1, 2):
        args[i] = list(lay_side_by_side(dict(zip(names, args[i])), [names]).values())
    if kind != "alone":
        check(fused_linear_fp8.by_parts(*args[:-1], True), args, kind)


@pytest.mark.parametrize("given", ["known", "own", "norm known", "norm own", "centred own"])
def test_what_is_no_number_is_in_all_of_the_result(given: str):
    for value in (math.nan, math.inf, -math.inf):
        for kind in ("q, k and v", "gate and up"):
            args = moved(layer(kind, given, 1, 80, F32), WHERE)
            args[0] = args[0].clone()
            args[0][0, 3] = value
            got = by_kernel(args)
            if given == "known" and not math.isnan(value):  # cut off at 448 as any large number
                args[0][0, 3] = math.copysign(1e30, value)
                check(got, args, kind)
            elif GPU:
                assert got.isnan().all(), (given, value, kind)
            elif "known" not in given:  # the interpreter reads NaN of fp8 as 480, but not the scale
                assert not got.isfinite().any(), (given, value, kind)


@pytest.mark.gpu
@kinds
@inputs
@pytest.mark.parametrize("dtype", ALL)
def test_on_cuda_the_op_is_near_its_plain_form(kind: str, given: str, dtype: torch.dtype):
    for rows, K in ((1, 4096), (1, 5120), (2, 512), (16, 512), (17, 512)):
        args = moved(layer(kind, given, rows, K, dtype, times=16), "cuda")
        got = torch.ops.fngraph.fused_linear_fp8(*args).float()
        want = fused_linear_fp8.plain(*args).float()
        off = (got - want).abs()
        if args[6]:  # now and then the next number of fp8
            slack = exact(args, ADDED if rows > 16 else 0.0)[1] / args[6][0]
            assert (off <= want.abs() / 8 + 2**-9 + slack).all()
            assert (off > 0).float().mean() <= 0.05
        else:
            assert off.norm() <= 2**-7 * want.norm()


@pytest.mark.gpu
def test_weights_that_nobody_holds_are_read_after_they_are_written():
    """In one graph: a kernel writes the weight, the next reads it. A read ahead would be stale."""
    OPS, one = torch.ops.fngraph, torch.ones((), device="cuda")
    x = draw(1, 2048, dtype=torch.bfloat16).cuda()
    new = draw(4096, 2048).cuda().to(torch.float8_e4m3fn).view(torch.uint8)
    w = torch.zeros_like(new)

    def step() -> Tensor:
        h = OPS.rms_norm(x, x[0], 1e-5, False)  # of ours: the next may start before it ends
        w.copy_(new)
        given = [w.view(torch.float8_e4m3fn)], [one], None, [], None, []
        return OPS.fused_linear_fp8(h, *given, 0.0, False, False, torch.bfloat16, False, False)

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(20):
        w.zero_()
        graph.replay()
        assert torch.equal(got, want)
