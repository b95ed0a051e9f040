"""A linear layer with what is around it: bit for bit its plain form on the CPU. Its kernels are in
test_triton_skinny.py."""

from __future__ import annotations

import pytest
import torch
from fused_cases import OPS
from linear_cases import KINDS, arguments
from torch import Tensor

from fngraph.ops.fused_linear import plain

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_it_is_its_plain_form_bit_for_bit(kind: str, dtype: torch.dtype):
    args = arguments(kind, 5, 48, dtype)
    got = OPS.fused_linear(*args)
    assert torch.equal(got, plain(*args)) and got.is_contiguous() and got.dtype == dtype
    meta = [[w.to("meta") for w in x] if isinstance(x, list) else
            x.to("meta") if isinstance(x, Tensor) else x for x in args]  # fmt: skip
    assert OPS.fused_linear(*meta).shape == got.shape


@kinds
def test_it_keeps_what_torch_asks_of_ops(kind: str):
    args = tuple(arguments(kind, 4, 24, torch.float32))
    op = OPS.fused_linear.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
    assert not op(*arguments(kind, 0, 24, torch.float32)).numel()
    loss = lambda fn: lambda x: fn(x, *args[1:]).square().sum()  # noqa: E731
    want = torch.func.grad(loss(plain))(args[0])
    torch.testing.assert_close(torch.func.grad(loss(op))(args[0]), want)
    leaf = args[0].detach().clone().requires_grad_()
    loss(op)(leaf).backward()
    torch.testing.assert_close(leaf.grad, want)
    twice = torch.vmap(lambda x: op(x, *args[1:]))(torch.stack([args[0], args[0] * 2]))
    torch.testing.assert_close(twice[1], plain(args[0] * 2, *args[1:]))
