"""Two linear layers in one op: bit for bit its plain form on the CPU; on CUDA near to float64 for
any number of rows. Its kernels are in test_triton_wide.py."""

from __future__ import annotations

import pytest
import torch
from fused_cases import OPS
from pair_cases import KINDS, arguments, exact, moved, off, plain
from torch import Tensor

from fngraph.ops import lay_side_by_side

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_its_plain_form_bit_for_bit(kind: str, dtype: torch.dtype):
    args = arguments(kind, 5, 48, dtype)
    got, want = OPS.paired_linears(*args), plain(*args)
    like = OPS.paired_linears(*moved(args, lambda y: y.to("meta")))
    for a, b, c in zip(got, want, like, strict=True):
        assert torch.equal(a, b) and a.is_contiguous() and a.dtype == dtype and a.shape == c.shape


@kinds
def test_it_keeps_what_torch_asks_of_ops(kind: str):
    args = tuple(arguments(kind, 4, 24, torch.float32))
    op = OPS.paired_linears.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    assert not op(*arguments(kind, 0, 24, torch.float32))[1].numel()
    loss = lambda fn: lambda x: sum(y.square().sum() for y in fn(x, *args[1:]))  # noqa: E731
    want = torch.func.grad(loss(plain))(args[0])
    torch.testing.assert_close(torch.func.grad(loss(op))(args[0]), want)
    leaf = args[0].detach().clone().requires_grad_()
    loss(op)(leaf).backward()
    torch.testing.assert_close(leaf.grad, want)


@pytest.mark.gpu
@kinds
@pytest.mark.parametrize("E", [80, 2048, 2560])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_cuda_any_number_of_rows_is_right(kind: str, E: int, dtype: torch.dtype):
    """Few of them, and from how many on others take over: with columns, and with rows, cut."""
    squares: list[list[tuple[float, float]]] = [[], []]
    for rows in (1, 2, 3, 8, 9, 16, 33, 64, 65, 100):
        for K in (96, 2048, 3000, *([14336] if rows == 1 else [])):  # cut in one row too
            args = arguments(kind, rows, K, dtype, "cuda", E)
            want, theirs = exact(args), off(plain(*args), exact(args))
            laid = lay_side_by_side(dict(zip("abc", args[4])), ["abc"[: len(args[4])]])
            for weights, beside in ((args[4], False), (list(laid.values()), True)):
                got = OPS.paired_linears(*args[:4], weights, *args[5:8], beside)
                assert all(y.is_contiguous() and y.dtype == dtype for y in got)
                for i, (ours, torchs) in enumerate(zip(off(got, want), theirs)):
                    least = 2.0**-24 * (K + E) ** 0.5
                    most = (3 if rows < 8 else 1.5) * torchs  # of some ten numbers, or of more
                    assert ours <= most + 2 * least, (rows, K, i, ours, torchs)
                    squares[i].append((max(ours - 2 * least, 0) ** 2, torchs**2))
    for pairs in squares:
        ours, torchs = (sum(column) for column in zip(*pairs))
        assert ours <= 1.2**2 * torchs


@pytest.mark.gpu
def test_a_row_is_the_same_beside_any_others():
    """Of 64 rows, by kernels that cut columns: whoever else there is."""
    args = arguments("gate and up", 64, 4096, torch.bfloat16, "cuda", 2048)
    whole = OPS.paired_linears(*args)
    other = moved(args, Tensor.clone)
    for i in (0, 2):
        other[i][:40] = float("nan")
    for a, b in zip(OPS.paired_linears(*other), whole, strict=True):
        assert b[:40].isfinite().all() and a[:40].isnan().any() and torch.equal(a[40:], b[40:])
