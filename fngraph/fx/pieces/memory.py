"""What a key will need in the pool, before it is captured: the peak of its live intermediates.

Every tensor that the traced program makes is an allocation with a size in T and R, a birth and a
death; views and in-place results are that of their base. What a kernel takes for itself while it
runs (a primitive's workspace in FULL, cuBLAS's) is not in the trace and not counted.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fngraph.core.memory import ALIGN, GRAPH_BYTES, NODE_BYTES, Bytes
from fngraph.core.modes import Mode
from fngraph.core.program import groups
from fngraph.fx.nodes import is_loop, is_tensor, mutates
from fngraph.fx.pieces.cuts import Cut, Piece, Pieces
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_ALIASING = {aten._unsafe_view.default, aten._reshape_alias.default}  # though their schemas deny it


@dataclasses.dataclass
class Allocation:
    """Memory that one op takes: bytes (an int, or sympy over T and R), first and last moment."""

    nbytes: Any
    born: int
    dies: int


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """The allocations of a program, and how many nodes it has in pieces and in cuts."""

    allocations: tuple[Allocation, ...]
    letters: Mapping[Any, str]
    piece_nodes: int
    cut_nodes: int

    def peak(self, sizes: Mapping[str, int]) -> int:
        """Most bytes alive at once at these sizes."""
        values = {symbol: sizes[letter] for symbol, letter in self.letters.items()}
        known: dict[Any, int] = {}
        changes: dict[int, int] = {}
        for made in self.allocations:
            if made.nbytes not in known:
                size = made.nbytes
                size = int(size if isinstance(size, int) else size.xreplace(values))
                known[made.nbytes] = -(-size // ALIGN) * ALIGN
            changes[made.born] = changes.get(made.born, 0) + known[made.nbytes]
            changes[made.dies + 1] = changes.get(made.dies + 1, 0) - known[made.nbytes]
        now = most = 0
        for moment in sorted(changes):
            now += changes[moment]
            most = max(most, now)
        return most


def lifetimes(pieces: Pieces, graph: Graph) -> Lifetimes:
    """Birth and death of all that the program makes: one moment for each op."""
    allocations: list[Allocation] = []
    made_in: dict[int, Allocation | None] = {}  # None: an input's memory
    now = piece_nodes = cut_nodes = 0
    outputs = pieces.program.outputs
    for line, part in zip(pieces.program.instructions, pieces.parts):
        if isinstance(part, Cut):
            now, cut_nodes = now + 1, cut_nodes + 1
        elif isinstance(part, Piece):
            given = [made_in.get(value) for value in line.reads]
            now, nodes, made = _through(part.gm, given, allocations, now)
            made_in.update(zip(line.writes, made))
            piece_nodes += nodes
        for value in {*line.reads, *line.writes, *line.drops, *outputs}:
            allocation = made_in.get(value)
            if allocation is not None:
                allocation.dies = max(allocation.dies, now)
    return Lifetimes(tuple(allocations), graph.letters, piece_nodes, cut_nodes)


def _through(
    gm: fx.GraphModule, given: list[Allocation | None], allocations: list[Allocation], now: int
) -> tuple[int, int, list[Allocation | None]]:
    """Walk a piece; the moment after it, its nodes, and the allocations of its results."""
    found: dict[fx.Node, Allocation | None] = {}
    by_storage: dict[int, Allocation | None] = {}
    inputs = iter(given)
    nodes = 0
    made: list[Allocation | None] = []
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if node.op == "output":
            made = [found.get(x) for x in node.args[0]]
            continue
        if node.op == "placeholder":
            if isinstance(value, torch.Tensor):
                found[node] = by_storage[storage_key(value)] = next(inputs)
            continue
        now += 1
        for read in node.all_input_nodes:
            allocation = found.get(read)
            if allocation is not None:
                allocation.dies = max(allocation.dies, now)
        for inner in node.target.graphs if is_loop(node) else ():  # type: ignore[union-attr]
            own = [None] * node.target.own  # type: ignore[union-attr]
            rest = node.args[len(own) :]
            around = [found.get(x) for x in rest if is_tensor(x)]  # type: ignore[arg-type]
            now, more, _ = _through(inner, [*own, *around], allocations, now)
            nodes += more
            for allocation in around:  # each turn reads it again
                if allocation is not None:
                    allocation.dies = max(allocation.dies, now)
        values = value if isinstance(value, tuple | list) else (value,)
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if node.target in _ALIASING:
            found[node] = by_storage[storage_key(tensors[0])] = found.get(node.args[0])
            continue
        nodes += any(storage_key(x) not in by_storage for x in tensors) or mutates(node)
        for tensor in tensors:  # of several results the last stands for all: they die together
            storage = storage_key(tensor)
            if storage not in by_storage:
                by_storage[storage] = Allocation(_nbytes(tensor), now, now)
                allocations.append(by_storage[storage])  # type: ignore[arg-type]
            found[node] = by_storage[storage]
    return now, nodes, made


def _nbytes(tensor: torch.Tensor) -> Any:
    size = tensor.untyped_storage().nbytes()
    return size.node.expr if isinstance(size, torch.SymInt) else size


def estimate(
    pieces: Pieces, found: Lifetimes, mode: Mode, sizes: Mapping[str, int], outputs: int
) -> Bytes:
    """Bytes of a key of these sizes.

    Args:
        outputs: how many results are copied out.
    """
    recorded = [indices for is_graph, indices in groups(pieces.program, mode) if is_graph]
    last = len(pieces.program.instructions) - 1
    opens = not recorded or bool(recorded[0][0])  # a cut first: unpacking is a graph of its own
    closes = bool(outputs) and (not recorded or recorded[-1][-1] != last)
    graphs = len(recorded) + opens + closes
    nodes = found.piece_nodes + 1 + outputs + (found.cut_nodes if mode is Mode.FULL else 0)
    return Bytes(found.peak(sizes), graphs * GRAPH_BYTES + nodes * NODE_BYTES)
