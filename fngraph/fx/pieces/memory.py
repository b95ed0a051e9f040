"""What a key will need in the pool, before it is captured: the peak of its live intermediates.

Every tensor that the traced program makes is a block with a size in T and R, a birth and a death;
views and in-place results are the block of their base. What a kernel takes for itself while it runs
(a primitive's workspace in FULL, cuBLAS's) is not in the trace and not counted.
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
from fngraph.fx.pieces.cuts import Cut, Piece, Pieces
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import OpOverload

aten = torch.ops.aten
_ALIASING = {aten._unsafe_view.default, aten._reshape_alias.default}  # though their schemas deny it


@dataclasses.dataclass
class Block:
    """Memory that one op takes: bytes (an int, or sympy over T and R), first and last moment."""

    nbytes: Any
    born: int
    dies: int


@dataclasses.dataclass(frozen=True)
class Lifetimes:
    """The blocks of a program, and how many nodes it has in pieces and in cuts."""

    blocks: tuple[Block, ...]
    letters: Mapping[Any, str]
    piece_nodes: int
    cut_nodes: int

    def peak(self, sizes: Mapping[str, int]) -> int:
        """Most bytes alive at once at these sizes."""
        values = {symbol: sizes[letter] for symbol, letter in self.letters.items()}
        known: dict[Any, int] = {}
        changes: dict[int, int] = {}
        for block in self.blocks:
            if block.nbytes not in known:
                size = block.nbytes
                size = int(size if isinstance(size, int) else size.xreplace(values))
                known[block.nbytes] = -(-size // ALIGN) * ALIGN
            changes[block.born] = changes.get(block.born, 0) + known[block.nbytes]
            changes[block.dies + 1] = changes.get(block.dies + 1, 0) - known[block.nbytes]
        now = most = 0
        for moment in sorted(changes):
            now += changes[moment]
            most = max(most, now)
        return most


def lifetimes(pieces: Pieces, graph: Graph) -> Lifetimes:
    """Birth and death of all that the program makes: one moment for each op."""
    blocks: list[Block] = []
    block_of: dict[int, Block | None] = {}  # None: an input's memory
    now = piece_nodes = cut_nodes = 0
    for step, part in zip(pieces.program.instructions, pieces.parts):
        if isinstance(part, Cut):
            now, cut_nodes = now + 1, cut_nodes + 1
        elif isinstance(part, Piece):
            given = [block_of.get(value) for value in step.reads]
            now, nodes, made = _through(part.gm, given, blocks, now)
            block_of.update(zip(step.writes, made))
            piece_nodes += nodes
        for value in {*step.reads, *step.writes, *step.drops} | set(pieces.program.outputs):
            block = block_of.get(value)
            if block is not None:
                block.dies = max(block.dies, now)
    return Lifetimes(tuple(blocks), graph.symbols, piece_nodes, cut_nodes)


def _through(
    gm: fx.GraphModule, given: list[Block | None], blocks: list[Block], now: int
) -> tuple[int, int, list[Block | None]]:
    """Walk a piece; the moment after it, its nodes, and the blocks of its results."""
    found: dict[fx.Node, Block | None] = {}
    by_storage: dict[int, Block | None] = {}
    inputs = iter(given)
    nodes = 0
    made: list[Block | None] = []
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
            block = found.get(read)
            if block is not None:
                block.dies = max(block.dies, now)
        values = value if isinstance(value, tuple | list) else (value,)
        tensors = [x for x in values if isinstance(x, torch.Tensor)]
        if node.target in _ALIASING:
            found[node] = by_storage[storage_key(tensors[0])] = found.get(node.args[0])
            continue
        nodes += any(storage_key(x) not in by_storage for x in tensors) or _writes(node)
        for tensor in tensors:  # of several results the last stands for all: they die together
            storage = storage_key(tensor)
            if storage not in by_storage:
                by_storage[storage] = Block(_nbytes(tensor), now, now)
                blocks.append(by_storage[storage])  # type: ignore[arg-type]
            found[node] = by_storage[storage]
    return now, nodes, made


def _writes(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target._schema.is_mutable


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
    steps = pieces.program.instructions
    opens = not recorded or bool(recorded[0][0])  # a cut first: unpacking is a graph of its own
    closes = bool(outputs) and (not recorded or recorded[-1][-1] != len(steps) - 1)
    graphs = len(recorded) + opens + closes
    nodes = found.piece_nodes + 1 + outputs + (found.cut_nodes if mode is Mode.FULL else 0)
    return Bytes(found.peak(sizes), graphs * GRAPH_BYTES + nodes * NODE_BYTES)
