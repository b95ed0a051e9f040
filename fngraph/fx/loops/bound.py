"""Loops of a graph that is about to run: each is told who records, and what runs primitives in it.

A piece that has loops takes one argument more, before all others: the context of its call, which
loops hand on to what is in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fngraph.fx.loops.node import Loop
from fngraph.fx.loops.running import Control, run
from fngraph.fx.nodes import is_loop, is_op
from fngraph.fx.pieces.code import direct

Asked = Callable[[torch.device], Control | None]
Calls = Mapping[fx.Node, Callable[..., Any]]
"""By the node of a primitive within a loop: `call(context, *tensors)`, which runs it."""


def has_loops(gm: fx.GraphModule) -> bool:
    """Whether there is a loop in a graph."""
    return any(map(is_loop, gm.graph.nodes))


def primitives_within(gm: fx.GraphModule, names: Mapping[str, Any]) -> list[tuple[Loop, fx.Node]]:
    """The primitives in a graph's loops, in order, each with the loop that it is in.

    Args:
        names: of primitives, "fngraph::attention".
    """
    found: list[tuple[Loop, fx.Node]] = []
    for node in filter(is_loop, gm.graph.nodes):
        for inner in node.target.graphs:  # type: ignore[union-attr]
            found += [
                (node.target, x)  # type: ignore[misc]
                for x in inner.graph.nodes
                if is_op(x) and x.target._schema.name in names
            ]
            found += primitives_within(inner, names)
    return found


def with_control(
    gm: fx.GraphModule, control: Asked, calls: Calls, within: bool = False
) -> fx.GraphModule:
    """The same module, whose loops ask who records when they run; itself where it has none.

    Args:
        calls: those of primitives within its loops, each with its tensors in order.
        within: whether it is in a loop itself.
    """
    if not (within or has_loops(gm)):
        return gm
    graph = fx.Graph()
    context = graph.placeholder("context")
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, node in copies.items():
        if is_loop(node):
            node.target = Bound(node.target, control, calls)  # type: ignore[arg-type]
            node.args = (context, *node.args)
        elif old in calls:
            given = [x for x in node.args if isinstance(x, fx.Node)]
            node.target, node.args, node.kwargs = Call(calls[old]), (context, *given), {}
    return fx.GraphModule({}, graph)


class Call:
    """A primitive within a loop."""

    __name__ = "primitive"

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, context: Any, *tensors: torch.Tensor) -> None:
        self.call(context, *tensors)

    def __str__(self) -> str:
        return str(self.call)


class Bound:
    """A loop, with its functions as code."""

    def __init__(self, loop: Loop, control: Asked, calls: Calls) -> None:
        self.loop, self.control, self.__name__ = loop, control, loop.kind
        self.graphs = [with_control(gm, control, calls, within=True) for gm in loop.graphs]
        self.forwards = [direct(gm) for gm in self.graphs]

    @property
    def writes(self) -> tuple[int, ...]:
        """Which of its arguments it writes: the first one is the context."""
        return tuple(i + 1 for i in self.loop.writes)

    def __call__(self, context: Any, *operands: Any) -> tuple[torch.Tensor, ...]:
        device = next((x.device for x in operands if isinstance(x, torch.Tensor)), None)
        control = None if device is None else self.control(device)
        runs = [functools.partial(forward, context) for forward in self.forwards]
        return run(self.loop, runs, control, operands)

    def __str__(self) -> str:
        return str(self.loop)
