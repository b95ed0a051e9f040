"""Constants: tensors from literals are hoisted, made once, frozen and listed, however written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg

MODES = ["NONE", "PIECEWISE", "FULL"]


def forward_of(fn: Callable[[Tensor], Any]) -> Callable[..., Any]:
    """`fn` of (T, 2) hidden states, with a primitive in front and behind."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        out = fn(toys.double(p["w"][b.token_ids][:, :2]))
        return (toys.double(out) if isinstance(out, Tensor) else out), s

    return forward


def traced(fn: Callable[[Tensor], Any]) -> Any:
    made = fg.graphify(forward_of(fn), donate="s", stage="b", limits=toys.LIMITS)
    return made.trace(toys.tally_params(), {}, batch=toys.batch(2))


def targets(stage: Any) -> list[str]:
    """Ops of the graph, by name."""
    return [str(n.target) for n in stage.graph.gm.graph.nodes if n.op == "call_function"]


def written(t: Tensor) -> Tensor:
    """Through a view."""
    t[:1].fill_(5)
    return t


# how it is written -> the constants that are listed
LITERALS: dict[str, tuple[Callable[[Tensor], Tensor], list[Any]]] = {
    "tensor": (lambda x: x + torch.tensor([1.0, 2.0]), [[1.0, 2.0]]),
    "scalar": (lambda x: x * torch.tensor(2.0), [2.0]),
    "nested": (lambda x: x @ torch.tensor([[0.0, 1.0], [1.0, 0.0]]), [[[0.0, 1.0], [1.0, 0.0]]]),
    "new_tensor": (lambda x: x + x.new_tensor([1, 2]), [[1.0, 2.0]]),
    "as_tensor": (lambda x: x + torch.as_tensor([1.0, 2.0]), [[1.0, 2.0]]),
    "from numpy": (lambda x: x + torch.from_numpy(np.ones(2, np.float32)), [[1.0, 1.0]]),
    "bool": (lambda x: torch.where(torch.tensor([True, False]), x, 0.0), [[True, False]]),
    "index": (lambda x: x[:, torch.tensor([1, 0])], [[1, 0]]),
    "empty": (lambda x: x + torch.tensor([]).sum(), [[]]),
    "two": (lambda x: x * torch.stack([torch.tensor(3.0), torch.tensor(4.0)]), [3.0, 4.0]),
    "twice the same": (lambda x: x * torch.tensor(3.0) + torch.tensor(3.0), [3.0, 3.0]),
    "copies of copies": (
        lambda x: x + torch.tensor([1, 2]).clone().double().detach().float(),
        [[1.0, 2.0]],
    ),
    "read and converted": (
        lambda x: (lambda t: x + t + t.double().float())(torch.tensor([1.0, 2.0])),
        [[1.0, 2.0], [1.0, 2.0]],
    ),
    "written": (lambda x: x + written(torch.tensor([1.0, 2.0])), [[1.0, 2.0]]),
    "written, then converted": (
        lambda x: x + written(torch.tensor([1.0, 2.0])).double().float(),
        [[1.0, 2.0]],
    ),
    "a converted copy written": (
        lambda x: (lambda t: x + written(t.double()).float() + t)(torch.tensor([1.0, 2.0])),
        [[1.0, 2.0]],
    ),
    "under vmap": (
        lambda x: torch.func.vmap(lambda row: row + torch.tensor([1.0, 2.0]))(x),
        [[1.0, 2.0]],
    ),
    "unused": (lambda x: (torch.tensor([7.0]), x * 1)[1], []),
}  # fmt: skip


@pytest.mark.parametrize("name", LITERALS)
def test_literals_are_listed_with_their_values(name: str):
    fn, want = LITERALS[name]
    constants = traced(fn).constants
    assert sorted(map(str, (c.tolist() for c in constants.values()))) == sorted(map(str, want))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", LITERALS)
def test_literals_compute_what_they_say(name: str, modes: str):
    """At each call anew, whatever was written into the last one's results."""
    forward = forward_of(LITERALS[name][0])
    fast = fg.graphify(forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=(8,))
    params = toys.tally_params()
    for rows in ((3, 1), (1,), (2, 2)):
        got, _ = fast(params, {}, toys.batch(*rows))
        want, _ = toys.bare(forward, params, {}, toys.batch(*rows))
        toys.assert_trees(got, want)
        got.fill_(99)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + torch.arange(2),
        lambda x: x @ torch.eye(2),
        lambda x: x * torch.full((2,), 3.0) + torch.ones(2) + torch.zeros_like(x[0]),
        lambda x: x * torch.scalar_tensor(2.0) + torch.linspace(0, 1, 2),
    ],
)
def test_factories_are_ops_and_no_constants(fn: Any):
    """They hold no memory between replays, so there is nothing to freeze."""
    stage = traced(fn)
    assert dict(stage.constants) == {}


def test_one_float_among_the_operands_says_the_dtype():
    """It is not torch's default that makes a float64 of a float64 and whole numbers."""
    stage = traced(lambda x: x.double() / torch.arange(2) + torch.arange(2) * x.double())
    assert stage.graph.gm.graph.output_node().args[0][0].meta["val"].dtype is torch.float64


def test_a_copy_that_nobody_writes_is_no_op_of_the_graph():
    for name in ("tensor", "copies of copies", "new_tensor"):
        ops = " ".join(targets(traced(LITERALS[name][0])))
        assert not any(copy in ops for copy in ("lift_fresh", "copy", "clone", "detach"))
    assert "aten.lift_fresh_copy.default" in targets(traced(LITERALS["written"][0]))


def test_listed_constants_are_the_callers_to_read_alone():
    """A piece holds no tensor: each constant is an input of the program, in the order listed."""
    stage = traced(LITERALS["two"][0])
    split = stage.split()
    held = len(stage.args.leaves)
    constants = set(range(held, held + 2))
    assert constants <= {slot for step in split.program.instructions for slot in step.reads}
    assert all(n.op != "get_attr" for piece in split.distinct for n in piece.gm.graph.nodes)


def test_an_output_that_is_a_literal_is_the_callers_own():
    forward = forward_of(lambda x: {"x": x * 1, "literal": torch.tensor([3, 4])})
    fast = fg.graphify(forward, modes="FULL", donate="s", stage="b", limits=toys.LIMITS, sizes=(8,))
    params = toys.tally_params()
    first, _ = fast(params, {}, toys.batch(2))
    first["literal"].fill_(99)
    second, _ = fast(params, {}, toys.batch(3))
    assert second["literal"].tolist() == [3, 4]
