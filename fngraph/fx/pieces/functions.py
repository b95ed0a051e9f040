"""The functions of loops as programs: split at primitives and at loops, as what is around them is.

So what lies between is a piece like any other. It is compiled once, wherever it is: a body may
share it with another body, or with what is outside of loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import fx

from fngraph.core.program import Program
from fngraph.fx.loops.node import loops_of
from fngraph.fx.nodes import op_name, results_of
from fngraph.fx.pieces.cuts import Cut, Piece, split_program
from fngraph.fx.tracing.tracer import Graph


class LoopFunction(NamedTuple):
    """A function of a loop.

    Attributes:
        program: its inputs are the graph's, sizes too.
        parts: one an instruction.
        cuts: the nodes that its cuts are made of, in order.
    """

    program: Program
    parts: tuple[Piece | Cut, ...]
    cuts: tuple[fx.Node, ...]


def functions_of(
    graph: Graph, pieces: Sequence[Piece], cut_ops: Sequence[str]
) -> dict[fx.GraphModule, LoopFunction]:
    """Each function of the loops in these pieces, and of the loops in those, by its graph.

    Args:
        graph: what the pieces are of.
        cut_ops: names of primitives.
    """
    shared = {piece.key: piece for piece in pieces}
    found: dict[fx.GraphModule, LoopFunction] = {}
    left = list(pieces)
    while left:
        for gm in graphs_within(left.pop(0)):
            found[gm] = one = _function(graph, gm, cut_ops, shared)
            left += [part for part in one.parts if isinstance(part, Piece)]
    return found


def graphs_within(piece: Piece) -> list[fx.GraphModule]:
    """The functions of a piece's loops; not those of the loops in them."""
    return [gm for loop in loops_of(piece.gm) for gm in loop.graphs]


def _function(
    graph: Graph, gm: fx.GraphModule, cut_ops: Sequence[str], shared: dict[str, Piece]
) -> LoopFunction:
    own = Graph(gm, graph.letters, {}, (), ())
    results = results_of(gm.graph)
    program, parts = split_program(own, cut_ops, results, shared, by_loops=True, apart=True)
    is_cut = (node for node in gm.graph.nodes if op_name(node) in cut_ops)
    return LoopFunction(program, parts, tuple(is_cut))
