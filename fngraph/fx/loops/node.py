"""A loop as one node of a traced graph: its functions as graphs of their own, and how they fit.

A node calls a `Loop` with the loop's operands: what it begins with, then what its functions read of
the graph around it (tensors and sizes). It gives the results as a tuple.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.fx.blocks.fakes import fakes_like
from fngraph.fx.loops.running import run
from fngraph.torch_facts.tracing import FakeTensor


class SizeOperand(NamedTuple):
    """A size that is an operand."""

    place: int


@dataclasses.dataclass(frozen=True, eq=False)
class Loop:
    """The target of a loop's node.

    Operands, in order: `state` of them (a carry; a choice's predicate), `xs` of them (of a scan),
    then what its graphs read besides. Each graph takes what changes from turn to turn (carry, then
    a slice of each of xs; a choice's takes nothing), and then all that is read besides.

    Attributes:
        kind: "while_loop", "scan" or "cond".
        graphs: while_loop: predicate and body; scan: body; cond: one if true, one if false.
        turns: of a scan.
        results: fakes of what it gives: the carry, then what a scan stacks.
        shapes: of the results that no operand is like: what a scan stacks, or a choice gives.
        writes: indices of the operands that it writes.
        seats: indices of the carries that lie in the operand that they begin with.
        line: the user's line.
        called: what the user has called, "fg.fori_loop".
    """

    kind: str
    graphs: tuple[fx.GraphModule, ...]
    state: int
    results: tuple[torch.Tensor, ...]
    shapes: tuple[tuple[int | SizeOperand, ...], ...] = ()
    xs: int = 0
    turns: int = 0
    reverse: bool = False
    writes: tuple[int, ...] = ()
    seats: tuple[int, ...] = ()
    line: str = ""
    called: str = ""

    @property
    def __name__(self) -> str:  # by which fx writes the call
        return self.kind

    def seated(self, i: int, value: torch.Tensor) -> Loop:
        """The same, whose carry `i` lies in its operand, of which `value` is a fake."""
        results = (*self.results[:i], value, *self.results[i + 1 :])
        writes, seats = (*self.writes, i), (*self.seats, i)
        return dataclasses.replace(self, results=results, writes=writes, seats=seats)

    @property
    def own(self) -> int:
        """How many operands are the loop's own, before those that its graphs read besides."""
        return self.state + self.xs

    def __call__(self, *operands: Any) -> tuple[torch.Tensor, ...]:
        """Run it as Python would, on any device; fakes give fakes."""
        if any(isinstance(x, FakeTensor) for x in operands):
            return fakes_like(self.results, {})  # type: ignore[no-any-return]
        return run(self, [gm.forward for gm in self.graphs], None, operands)

    @property
    def text(self) -> str:
        """All that it does, as text: equal for equal loops."""
        head = (
            f"{self.kind} {self.state} {self.xs} {self.turns} {self.reverse} {self.shapes} "
            f"{self.writes} {self.seats}"
        )
        return "\n".join([head, *map(_told, self.graphs)])

    def as_text(self) -> str:
        """Its functions as Python."""
        names = NAMES[self.kind]
        parts = [
            f"# {name} of {self}, {self.line}\n{gm.code.strip()}"
            for name, gm in zip(names, self.graphs)
        ]
        return "\n\n".join([*parts, *(one.as_text() for gm in self.graphs for one in loops_of(gm))])

    def __str__(self) -> str:
        return self.called

    __repr__ = __str__


NAMES = {"while_loop": ("cond", "body"), "scan": ("body",), "cond": ("if true", "if false")}


def loops_of(gm: fx.GraphModule) -> Iterator[Loop]:
    """The loops of a graph, in order; not those in their functions."""
    for node in gm.graph.nodes:
        if isinstance(node.target, Loop):
            yield node.target


def _told(gm: fx.GraphModule) -> str:
    names = {node: i for i, node in enumerate(gm.graph.nodes)}
    lines = []
    for node, i in names.items():
        args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{names[n]}")
        target = node.target.text if isinstance(node.target, Loop) else str(node.target)
        value = node.meta.get("val")
        like = f"{value.dtype} {value.device}" if isinstance(value, torch.Tensor) else ""
        shown = target if node.op == "call_function" else ""
        lines.append(f"%{i} {node.op} {shown} {args} {like}")
    return "\n".join(lines)
