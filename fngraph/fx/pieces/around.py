"""Split a traced graph around a run of its ops, primitives among them: a callable stands for it.

The result is a program of three instructions at most: what the run needs, the run, what is left.
There is no cut in it, so it is for graphs that hold the whole program.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch import fx

from fngraph.core.program import Instruction, Program, with_drops
from fngraph.fx.generators import has_effect
from fngraph.fx.nodes import is_size, is_tensor, storages_written
from fngraph.fx.pieces.cuts import Piece, inputs_of_program, live_ops, ops_of, piece_of
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.memory import storage_key


@dataclasses.dataclass(frozen=True)
class Around:
    """A program around a run of ops.

    Attributes:
        ahead: the piece of the instruction ahead of the run's, if there is one.
        run: the ops that the callable stands for, of (T, R, *reads).
        behind: as `ahead`, of the one behind it.
    """

    program: Program
    ahead: tuple[Piece, ...]
    run: fx.Graph
    behind: tuple[Piece, ...]


def split_around(
    graph: Graph, run: Sequence[fx.Node], reads: Sequence[fx.Node], result: fx.Node,
    outputs: Sequence[fx.Node],
) -> Around | str:  # fmt: skip
    """The program that gives `outputs`; or why ops cannot be moved out of the run.

    Args:
        run: in the graph's order.
        reads: all that they read, in the order in which the callable takes it.
        result: what others read of them.
    """
    inside, ops = set(run), live_ops(graph.gm, outputs)
    sources = _needed([a for n in run for a in n.all_input_nodes if a not in inside])
    before = [n for n in ops if n in sources]
    after = [n for n in ops if n not in inside and n not in sources]
    if why := _cannot_move(run, before, after):
        return why
    inputs = inputs_of_program(graph.gm)
    numbers = {node: i for i, node in enumerate(inputs)}  # of the program's values
    later = {*outputs, *(a for n in (*run, *after) for a in n.all_input_nodes)}
    instructions: list[Instruction] = []
    graphs: dict[str, fx.Graph] = {}
    for name, nodes, needed, first in (
        ("piece 0", before, later, ()), ("run 0", run, {result}, reads),
        ("piece 1", after, {*outputs}, ()),
    ):  # fmt: skip
        if not nodes:
            continue
        writes = [n for n in nodes if n in needed]
        graphs[name], taken = ops_of(graph, nodes, writes, first)
        for node in writes:
            numbers[node] = len(numbers)
        of = tuple(numbers[n] for n in taken), tuple(numbers[n] for n in writes)
        instructions.append(Instruction(name, False, len(instructions), *of))
    program = Program(len(inputs), tuple(instructions), tuple(numbers[n] for n in outputs))
    ahead = (piece_of(graph, graphs["piece 0"]),) if before else ()
    behind = (piece_of(graph, graphs["piece 1"]),) if after else ()
    return Around(with_drops(program), ahead, graphs["run 0"], behind)


def _needed(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """These and all that they come from."""
    found, left = set[fx.Node](), [n for n in nodes if not is_size(n)]
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += [a for a in node.all_input_nodes if not is_size(a)]
    return found


def _cannot_move(
    run: Sequence[fx.Node], before: Sequence[fx.Node], after: Sequence[fx.Node]
) -> str | None:
    """Why ops cannot go ahead of the run or behind it, or None.

    What has no effect may go anywhere, if nobody writes what it reads. So up to the end of the run
    nothing but the run may write, draw or meet others; and what stands among its ops, or ahead of
    it and goes behind, may read nothing that it writes.
    """
    written = storages_written(run)
    for node in (*before, *after):
        if run[-1] < node:
            continue
        if has_effect(node):
            return f"{node} writes or draws ahead of the last layer's end"
        read = {storage_key(a.meta["val"]) for a in node.all_input_nodes if is_tensor(a)}
        if read & written and (run[0] < node or node in after):
            return f"{node} reads what the layers write"
    return None
