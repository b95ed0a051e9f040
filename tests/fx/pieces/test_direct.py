"""Ops called without their wrappers: the same results, and the same lines where one fails."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from fngraph.fx.pieces.code import blame, direct


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


def test_a_view_of_what_lies_otherwise_than_torchs_rule_says_is_a_copy():
    """As `channel_shuffle` of what is expanded does: eagerly `reshape` copies there."""
    fn = direct(traced(lambda x: x.view(6) + 1, torch.ones(2, 3)))
    turned = torch.arange(6.0).view(3, 2).t()
    assert torch.equal(fn(turned), turned.reshape(6) + 1)
    viewed = direct(traced(lambda x: x.view(6), torch.ones(2, 3)))
    assert viewed(dense := torch.ones(2, 3)).data_ptr() == dense.data_ptr()


def test_ops_whose_names_join_to_one_are_not_confused():
    kept = []
    for namespace, name, by in (("joined", "ary_op", 2.0), ("joined_ary", "op", 100.0)):
        library = torch.library.Library(namespace, "DEF")
        library.define(f"{name}(Tensor x) -> Tensor")
        library.impl(name, lambda x, by=by: x * by, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{namespace}::{name}", torch.empty_like, lib=library)
        kept.append(library)
    both = lambda x: (torch.ops.joined.ary_op(x), torch.ops.joined_ary.op(x))  # noqa: E731
    two, hundred = direct(traced(both, torch.ones(2)))(torch.ones(2))
    assert two.tolist() == [2, 2] and hundred.tolist() == [100, 100]


def test_a_node_may_be_called_as_an_op_is_bound():
    graph = torch.fx.Graph()
    x = graph.placeholder("bound_0")
    graph.output(graph.call_function(torch.ops.aten.sin.default, (x,)))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    assert torch.equal(direct(gm)(torch.ones(2)), torch.ones(2).sin())
