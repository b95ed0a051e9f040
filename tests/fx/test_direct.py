"""Ops called without their wrappers: the same results, and the same lines where one fails."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fngraph.fx.blame import blame
from fngraph.fx.direct import direct


def traced(fn, *args):
    """Its aten ops."""
    return make_fx(fn)(*args)


def test_no_op_is_looked_up_in_a_call():
    x = torch.randn(3, 4)
    gm = traced(lambda x: (x @ x.T).relu().add_(1).view(9)[:5], x)
    fn = direct(gm)
    assert "ops" in gm.forward.__func__.__code__.co_names
    assert "ops" not in fn.__func__.__code__.co_names
    assert torch.equal(fn(x), gm(x))


def test_overloads_of_one_op_are_told_apart():
    x = torch.tensor([4.0, 9.0])
    gm = traced(lambda x: (x.add(2), x.add(x), x.pow(2), x.pow(x), 2**x), x)
    for got, want in zip(direct(gm)(x), gm(x)):
        assert torch.equal(got, want)


def test_modes_see_the_calls():
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            names.append(str(func))
            return func(*args, **(kwargs or {}))

    names: list[str] = []
    x = torch.ones(2)
    fn = direct(traced(lambda x: x.sin().mul(3), x))
    with Seen():
        fn(x)
    assert names == ["aten.sin.default", "aten.mul.Tensor"]


def test_an_error_is_still_traced_to_its_op():
    gm = traced(lambda x, y: x.sin() + x @ y, torch.ones(2, 2), torch.ones(2, 2))
    with pytest.raises(RuntimeError) as error:
        direct(gm)(torch.ones(2, 2), torch.ones(3, 2))
    assert (blame(gm, error.value) or "").startswith("aten.mm.default, from ")
