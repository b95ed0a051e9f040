"""Loops of a graph that is about to run: each told who records."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from fngraph.fx.loops.node import Loop
from fngraph.fx.loops.running import Control, run
from fngraph.fx.nodes import is_loop
from fngraph.fx.pieces.code import direct

Asked = Callable[[torch.device], Control | None]


def with_control(gm: fx.GraphModule, control: Asked) -> fx.GraphModule:
    """The same module, whose loops ask who records when they run; itself where it has none."""
    if not any(map(is_loop, gm.graph.nodes)):
        return gm
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    for node in filter(is_loop, graph.nodes):
        node.target = Bound(node.target, control)  # type: ignore[arg-type]
    return fx.GraphModule({}, graph)


class Bound:
    """A loop, with its functions as code."""

    def __init__(self, loop: Loop, control: Asked) -> None:
        self.loop, self.control, self.__name__ = loop, control, loop.kind
        self.writes = loop.writes
        self.graphs = [with_control(gm, control) for gm in loop.graphs]
        self.runs = [direct(gm) for gm in self.graphs]

    def __call__(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        device = next((x.device for x in operands if isinstance(x, torch.Tensor)), None)
        control = None if device is None else self.control(device)
        return run(self.loop, self.runs, control, operands)

    def __str__(self) -> str:
        return str(self.loop)
