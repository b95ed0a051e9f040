"""Loops of a graph that is about to run: each is told who records, and what runs primitives in it.

A piece that has loops takes one argument more, before all others: the context of its call, which
loops hand on to what is in them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from fngraph.fx.loops.node import Loop
from fngraph.fx.loops.running import Control, run
from fngraph.fx.nodes import is_loop, op_name
from fngraph.fx.pieces.code import direct

Asked = Callable[[torch.device], Control | None]
Calls = Mapping[fx.Node, Callable[..., Any]]
"""By the node of a primitive within a loop: `call(context, *tensors)`, which runs it."""


def has_loops(gm: fx.GraphModule) -> bool:
    """Whether there is a loop in a graph."""
    return any(map(is_loop, gm.graph.nodes))


def calls_of(
    gm: fx.GraphModule, names: Container[str], loop: Loop | None = None
) -> Iterator[tuple[Loop | None, fx.Node]]:
    """The primitives that a graph calls, in order, with those in its loops; each with the loop that
    it is in, None: it is in none.

    Args:
        names: of primitives, "fngraph::attention".
        loop: that the graph is of.
    """
    for node in gm.graph.nodes:
        if is_loop(node):
            for inner in node.target.graphs:
                yield from calls_of(inner, names, node.target)
        elif op_name(node) in names:
            yield loop, node


def primitives_within(gm: fx.GraphModule, names: Container[str]) -> list[tuple[Loop, fx.Node]]:
    """Those in a graph's loops alone."""
    return [(loop, node) for loop, node in calls_of(gm, names) if loop is not None]


def with_control(
    gm: fx.GraphModule, control: Asked, calls: Calls, within: bool = False,
    made: Mapping[fx.GraphModule, Callable[..., Any]] | None = None,
) -> fx.GraphModule:  # fmt: skip
    """The same module, whose loops ask who records when they run; itself where it has none.

    Args:
        calls: those of primitives within its loops, each with its tensors in order.
        within: whether it is in a loop itself.
        made: for its loops' graphs, what runs in place of each: `f(context, *operands)`; those that
            it lacks run as they were traced.
    """
    if not (within or has_loops(gm)):
        return gm
    graph = fx.Graph()
    context = graph.placeholder("context")
    copies: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, copies))
    for old, node in copies.items():
        if is_loop(node):
            node.target = BoundLoop(node.target, control, calls, made or {})  # type: ignore[arg-type]
            node.args = (context, *node.args)
        elif old in calls:
            given = [x for x in node.args if isinstance(x, fx.Node)]
            node.target, node.args, node.kwargs = BoundCall(calls[old]), (context, *given), {}
    return fx.GraphModule({}, graph)


class BoundCall:
    """A primitive within a loop."""

    __name__ = "primitive"

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call

    def __call__(self, context: Any, *tensors: torch.Tensor) -> None:
        self.call(context, *tensors)

    def __str__(self) -> str:
        return str(self.call)


class BoundLoop:
    """A loop, with its functions as code."""

    def __init__(
        self, loop: Loop, control: Asked, calls: Calls,
        made: Mapping[fx.GraphModule, Callable[..., Any]],
    ) -> None:  # fmt: skip
        self.loop, self.control, self.__name__ = loop, control, loop.kind
        self.graphs: list[fx.GraphModule] = []  # those that run as they were traced
        self.forwards = []
        for gm in loop.graphs:
            if gm not in made:
                self.graphs.append(with_control(gm, control, calls, within=True))
            self.forwards.append(made[gm] if gm in made else direct(self.graphs[-1]))

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
