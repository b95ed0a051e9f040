"""What somebody writes on his first day, and what he reads then: each was an error of Python's or
torch's own, or was taken and meant nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import fngraph as fg
from fngraph import core, errors
from fngraph.core import BatchSpec, Mode

X = torch.ones(3)
LIMITS = fg.Limits(64, 16)
LADDERS = core.ladders((1, 2, 4, 8))
TABLE = core.build_table("FULL", LADDERS, LIMITS)
YES = torch.tensor(True)


def graph(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """What it gives under graphify."""
    return fg.graphify(forward, **{"stage": "x"} | options)(*args)


def backward(w: Any, x: Any) -> Any:
    (x * w).sum().backward()
    return w.grad * 1


def a_cost_of_none(size: int) -> Any:
    """A return that was forgotten."""


FUNCTIONS: list[tuple[Callable[[], Any], str]] = [
    (lambda: graph(lambda x: None, X), "forward returns None, which holds no tensor"),
    (lambda: graph(lambda x: (), X), "forward returns (), which holds no tensor"),
    (lambda: graph(lambda x: {}, X), "forward returns {}, which holds no tensor"),
    (lambda: graph(torch.relu, X, stage=0), "cannot read which parameters relu has"),
    (lambda: graph(X, X), "is a Tensor. Pass a function"),
    (lambda: graph(lambda w, x: x, X, X, donate=1.0), "donate=1.0 is a float"),
    (lambda: graph(lambda w, x: x, X, X, donate=True), "donate=True is no parameter of forward"),
    (lambda: graph(backward, X.clone().requires_grad_(), X), "asks for no gradient, also where"),
    (lambda: fg.graphify(lambda w, x: x, stage="x").bind(v=X), "bind takes 1 arguments, ['w']"),
    (lambda: fg.cond(YES, X, X), "a=float32 (3,) on cpu, expected a function: fg.cond(pred, a, b"),
    (lambda: fg.cond(YES, lambda a, b: a, lambda a: a, X),
     "a takes (a, b), and is called as a(args[0]). Both functions are given what comes behind"),
    (lambda: fg.cond(YES, lambda: X, lambda a: a), "b takes (a), and is called as b()"),
    (lambda: fg.while_loop(lambda c: c.sum() < 3, None, X), "body=None, expected a function"),
    (lambda: fg.while_loop(X, lambda c: c, X), "cond=float32 (3,) on cpu, expected a function"),
    (lambda: fg.while_loop(lambda a, b: a.sum() < 9, lambda c: c, (X, X)),
     "cond takes (a, b), and is called as cond(carry). A carry of several tensors is one tree"),
    (lambda: fg.scan(X, lambda c, x: (c, x), X), "body=float32 (3,) on cpu, expected a function"),
    (lambda: fg.scan(lambda c: (c, c), X, X), "body takes (c), and is called as body(carry, x)"),
    (lambda: fg.scan(lambda c, x: (c, x), X[0], X, reverse="no"), "reverse='no', expected True"),
    (lambda: fg.fori_loop(0, 3, lambda c: c, X), "is called as body(i, carry)"),
    (lambda: fg.fori_loop(0, 3, 4, X), "body=4, expected a function"),
    (lambda: fg.checkpoint(3), "body=3 is an int. Pass a function"),
    (lambda: fg.block(None), "body=None is a NoneType. Pass a function"),
]  # fmt: skip

PLANS: list[tuple[Callable[[], Any], str]] = [
    (lambda: core.plan_sizes({3: 1, 20: 2}, 2, lambda s: float("nan")), "cost(3) is nan"),
    (lambda: core.plan_sizes({3: 1, 20: 2}, 2, a_cost_of_none), "cost(3) is None. Give a number"),
    (lambda: core.plan_sizes({3: 1}, memory_budget=100, bytes_per_size=0), "bytes_per_size=0"),
    (lambda: core.plan_sizes({3: 1}, memory_budget=float("nan"), bytes_per_size=1), "=nan holds"),
    (lambda: core.plan_sizes({3: 1}, memory_budget=9, bytes_per_size=a_cost_of_none),
     "bytes_per_size(3) is None"),
    (lambda: core.agree([core.Proposal(Mode.FULL, -3, 3, 1)]), "num_tokens=-3"),
    (lambda: core.agree([core.Proposal("FULL", 3, 3, 1)]), "proposals[0].mode='FULL' is a str"),
    (lambda: core.agree(core.propose(TABLE, BatchSpec(3, 3))), "proposals[0]=Mode.FULL"),
    (lambda: core.settle(TABLE, BatchSpec(3, 3), "FULL"), "Pass what fg.core.agree gives"),
    (lambda: core.Flight((1, 2)), "specs[0]=1 is an int. Pass batch.spec"),
    (lambda: core.Flight(BatchSpec(3, 3)), "specs[0]=3 is an int"),
    (lambda: core.Flight([BatchSpec(3, 3)]).histogram(query_len="1"), "query_len='1' is a str"),
    (lambda: core.Flight.loads(None), "dumped=None is a NoneType. Pass what dumps() gave"),
    (lambda: core.Log.loads(3), "dumped=3 is an int. Pass what dumps() gave"),
    (lambda: core.Constants.loads(3), "Pass what dumps() gave: path.read_text()"),
    (lambda: core.Field("u", core.Equal), "Pass fg.core.Equal(), fg.core.AtLeast() or another"),
    (lambda: core.Field(3, core.Equal()), "name=3 is an int. Pass a str"),
    (lambda: core.build_table("FULL", LADDERS, LIMITS, adapters=None), "adapters=None"),
    (lambda: core.build_table("FULL", LADDERS, LIMITS, fields=("ub",)), "fields[0]='ub' is a str"),
    (lambda: core.build_table("FULL", LADDERS, LIMITS, cost="x"), "cost='x' is a str"),
    (lambda: core.predict(None, None, "FULL"), "parts=None is a NoneType"),
    (lambda: core.Ladders("13"), "mixed='13' is a str. Pass a list of ints"),
    (lambda: fg.resolve("FULL", support="ALWAYS"), "'ALWAYS' is no level of support"),
    (lambda: fg.resolve("FULL", support=7), "7 is no level of support"),
    (lambda: core.default_sizes(LIMITS, dense="no"), "dense='no' is a str. Pass True or False"),
]  # fmt: skip

PADS = [("uint8", 300), ("uint8", -1), ("int8", 1000), ("bool", 7), ("int64", 2**63),
        ("float32", [0]), ("float32", torch.tensor(0)), ("int32", None)]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "text"), [*FUNCTIONS, *PLANS], ids=[text[:40] for _, text in [*FUNCTIONS, *PLANS]]
)
def test_it_is_refused_in_words(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(errors.FnGraphError) as caught:
        call()
    assert text in str(caught.value)


@pytest.mark.parametrize(("dtype", "pad"), PADS[:-1], ids=repr)
def test_a_pad_that_no_row_can_hold(dtype: str, pad: Any) -> None:
    with pytest.raises(errors.FieldError, match=f"pad=.* of {dtype}: a .*number"):
        fg.buffer("T", dtype, pad=pad)


def test_a_pad_below_what_is_said_of_every_number() -> None:
    with pytest.raises(errors.FieldError, match="pad=-1 is below min=0"):
        fg.buffer("T", "int64", pad=-1, min=0)


def test_what_is_right_is_taken() -> None:
    fg.buffer("T", "uint8", pad=255), fg.buffer("T", "bool", pad=True)
    (
        fg.buffer("T", "int32", min=1),
        fg.buffer("T", "float32", pad=float("nan")),
        fg.buffer("R + 1", "int32", pad="stride", min=0),
    )
    sizes = core.plan_sizes(np.array([3, 7]), k=2)
    assert sizes == (3, 7) and {type(size) for size in sizes} == {int}
    assert core.Flight([BatchSpec(3, 3)]) == core.Flight((BatchSpec(3, 3),))
    fast = fg.graphify(lambda w, x: w * x, stage="x")
    step = fast.bind(w=X * 2).capture(batch=X, progress=False)
    assert torch.equal(step(X), X * 2)
    assert torch.equal(graph(lambda w, x: (None, w * x), X * 2, X)[1], X * 2)
    assert fg.cond(True, lambda *args: args, lambda *args: args, 1, 2) == (1, 2)
