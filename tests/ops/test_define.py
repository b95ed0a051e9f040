"""`fg.ops.define`: what a backend gets is the schema's, and what fits no schema is refused."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.errors import BackendError
from fngraph.ops import PRIMITIVES, Backend, Plan, define

GOT: list[Any] = []


def run(args: Any, host: Any) -> None:
    GOT[:] = [args, host]
    args.out.copy_(args.x)


PLAIN = Backend("plain", run, lambda config: fg.Support.ALWAYS)
SCHEMA = "(Tensor x, Tensor? more, Tensor(a!) out, float factor)"


@pytest.mark.parametrize("primitive", PRIMITIVES.values(), ids=lambda p: p.name)
def test_each_field_is_the_argument_of_its_name(primitive):
    names = tuple(a.name for a in primitive.op._schema.arguments)
    for field, value in primitive.make_args(names, "config", "plan")._asdict().items():
        assert value == (value._fields if isinstance(value, tuple) else field)


class Meta(NamedTuple):
    more: Tensor | None


class Args(NamedTuple):
    out: Tensor
    x: Tensor
    meta: Meta
    config: Any


@pytest.mark.parametrize("args", [None, Args])
def test_a_backend_gets_all_arguments_or_the_tuple_asked_for(args):
    name = f"toy_{args and args.__name__}"
    made = define(name, SCHEMA, default=PLAIN, args=args, configure=lambda *given: given[3])
    x, out = torch.rand(3), torch.empty(3)
    made.op(x, None, out, 2.0)
    got, host = GOT
    assert out.equal(x) and host is None and got.config == 2.0
    fields = ("x", "more", "out", "factor", "config", "plan") if args is None else Args._fields
    assert got._fields == fields and got.x is x and (args is None or got.meta == (None,))
    with pytest.raises(BackendError, match=f"'{name}', ...\\): there is such a primitive"):
        define(name, SCHEMA, default=PLAIN)


class Less(NamedTuple):
    x: Tensor
    out: Tensor


class Other(NamedTuple):
    x: Tensor
    more: Tensor
    outt: Tensor


@pytest.mark.parametrize(
    "schema, given, why",
    [
        ("(Tensor x)", {}, r"writes into tensors that it is given, marked as Tensor\(a!\)"),
        ("(Tensor x, Tensor(a!) out) -> Tensor", {}, "returns nothing"),
        (SCHEMA, {"args": Less}, "has the tensors more, which no field of Less names"),
        (SCHEMA, {"args": Other}, "no argument 'outt', which Other names. Did you mean 'out'"),
        (SCHEMA, {"default": Backend("plain", run, PLAIN.support, plan=Plan(("y",), run, run))},
         "its plan names 'y', and toy_odd has 'x', 'out'"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_not_made(schema, given, why):
    with pytest.raises(BackendError, match=why):
        define("toy_odd", schema, **{"default": PLAIN} | given)
    assert "fngraph::toy_odd" not in PRIMITIVES
