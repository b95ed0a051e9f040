"""Triton's kernels of linear layers of few rows: on CUDA with `-m gpu`, else interpreted, by
test_triton_interpreter.py.

They apply a norm's scale to sums in float32, and round once where the ops one by one round twice:
no further from the same in float64 than 1.5 times what torch's own ops are.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from fused_cases import OPS, draw
from linear_cases import KINDS, arguments, exact
from torch import Tensor
from triton_cases import DTYPES, GPU, WHERE

from fngraph.ops import lay_side_by_side
from fngraph.ops.fused_linear import plain, tile_of
from fngraph.ops.triton.products import skinny

pytestmark = [pytest.mark.gpu] if GPU else []
kinds = pytest.mark.parametrize("kind", KINDS)
ROWS = [1, 2, 3, 4, 5, 8, 16] if GPU else [1, 2, 3, 5, 16]
WIDE = [64, 80, 2048, 4096, 8200] if GPU else [64, 80, 300]


@kinds
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_kernel_is_as_near_to_float64_as_torch(kind: str, dtype: torch.dtype):
    ran, squares = set(), []
    for rows, K in itertools.product(ROWS, WIDE):
        args = arguments(kind, rows, K, dtype, WHERE)
        x, weights, norm, more, eps, centred, gated, held, _ = args
        tile = tile_of(rows, K, gated, norm is not None, dtype.itemsize)
        if tile is None or (dtype == torch.float16 and norm is not None):
            continue
        want, torchs = exact(args), plain(*args)
        got = torch.full_like(torchs, float("nan"))
        skinny.run(
            x,
            weights,
            norm,
            more,
            got,
            eps,
            tile,
            centred=centred,
            gated=gated,
            held=held,
        )
        off, theirs = ((y.double() - want).norm() / want.norm() for y in (got, torchs))
        one_by_one = 2.0**-24 * K**0.5  # float32 sums of K, none put together before the last
        assert off <= 2.0 * theirs + one_by_one, (rows, K, off, theirs)  # of some 40 numbers
        squares.append((float(off - one_by_one) ** 2, float(theirs) ** 2))
        ran.add(bool(tile.parts))
    if squares and dtype != torch.float32:  # whose sums are in another order alone
        ours, torchs_own = (sum(column) for column in zip(*squares))
        assert ours <= 1.2**2 * torchs_own
    assert ran == {False, True} or dtype == torch.float16


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("rows", [1, 4, 16, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_on_cuda_any_number_of_rows_is_right(kind: str, rows: int, dtype: torch.dtype):
    args = arguments(kind, rows, 512, dtype, "cuda")
    want, theirs = exact(args), plain(*args)
    off = lambda y: (y.double() - want).norm() / want.norm()  # noqa: E731
    for weights in (args[1], list(lay_side_by_side(dict(zip("abc", args[1])), ["abc"]).values())):
        got = OPS.fused_linear(args[0], weights, *args[2:])
        assert off(got) <= 1.5 * off(theirs) and got.is_contiguous() and got.dtype == dtype


@pytest.mark.gpu
def test_weights_that_nobody_holds_are_read_after_they_are_written():
    """In one graph: a kernel writes the weight, the next reads it. A read ahead would be stale."""
    x, w = draw(1, 2048, dtype=torch.bfloat16).cuda(), torch.zeros(4096, 2048).bfloat16().cuda()
    new = draw(4096, 2048, dtype=torch.bfloat16).cuda()

    def step() -> Tensor:
        h = OPS.rms_norm(x, new[0], 1e-5, False)  # of ours: the next may start before it ends
        w.copy_(new)
        return OPS.fused_linear(h, [w], None, None, 0.0, False, False, False, False)

    want = step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = step()
    for _ in range(20):
        w.zero_()
        graph.replay()
        assert torch.equal(got, want)
