"""Split a traced graph at its primitives into pieces, and share the pieces that are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import Dim
from fngraph.core.program import Program, Step, with_drops
from fngraph.fx.generators import drawn
from fngraph.fx.leaves import storage_key
from fngraph.fx.piece import Piece, is_size, make_piece, structure
from fngraph.fx.trace import Graph


@dataclasses.dataclass(frozen=True)
class Cut:
    """A call of a primitive.

    Attributes:
        op: its name, "fngraph::attention".
        template: its arguments; a tensor's position holds None.
        places: the positions of the tensors.
        rows: for each tensor argument, its first dim if that depends on T or R, else None.
        example: fakes and constants, for the primitive's configuration.
    """

    op: str
    template: tuple[Any, ...]
    places: tuple[int, ...]
    rows: tuple[Dim | None, ...]
    example: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A program, with one `Piece` or `Cut` for each of its steps; equal pieces are one object.

    Attributes:
        output_dims: of each output, in T and R.
        output_aliased: whether an output is memory of an input or of another output.
    """

    program: Program
    parts: tuple[Piece | Cut, ...]
    output_dims: tuple[tuple[Dim, ...], ...]
    output_dtypes: tuple[torch.dtype, ...]
    output_aliased: tuple[bool, ...]


def split(graph: Graph, cut_ops: Sequence[str], outputs: Sequence[int]) -> Pieces:
    """Cut `graph` at each op named in `cut_ops`; return the outputs whose indices are given."""
    gm = graph.gm
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    results = [output.args[0][i] for i in outputs]
    inputs = [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]
    numbers = {node: i for i, node in enumerate(inputs)}  # of the program's values
    regions = _regions(gm, cut_ops, results)
    needed_after = _needed_after(regions, results)

    steps: list[Step] = []
    parts: list[Piece | Cut] = []
    kinds: dict[str, int] = {}
    shared: dict[str, Piece] = {}
    for (is_cut, nodes), needed in zip(regions, needed_after):
        if is_cut:
            (node,) = nodes
            part: Piece | Cut = _cut(graph, node)
            reads: list[fx.Node] = [a for a in node.args if _is_tensor(a)]  # type: ignore[misc]
            writes: list[fx.Node] = []
            key = _op_name(node)
            name = key.partition("::")[2]
        else:
            writes = [n for n in nodes if n in needed]
            piece, reads = make_piece(graph, nodes, writes)
            name, key = "piece", structure(graph, piece)
            if key not in shared:
                shared[key] = Piece(fx.GraphModule({}, piece), key)
            part = shared[key]
        for node in writes:
            numbers[node] = len(numbers)
        index = sum(s.name.startswith(name + " ") for s in steps)
        steps.append(
            Step(
                f"{name} {index}", is_cut, kinds.setdefault(key, len(kinds)),
                tuple(numbers[n] for n in reads), tuple(numbers[n] for n in writes),
            )
        )  # fmt: skip
        parts.append(part)
    program = Program(len(inputs), tuple(steps), tuple(numbers[n] for n in results))
    dims = tuple(tuple(graph.dim(s) for s in n.meta["val"].shape) for n in results)
    dtypes = tuple(n.meta["val"].dtype for n in results)
    owned = {storage_key(n.meta["val"]) for n in inputs}
    aliased = []
    for node in results:
        storage = storage_key(node.meta["val"])
        aliased.append(storage in owned)
        owned.add(storage)
    return Pieces(with_drops(program), tuple(parts), dims, dtypes, tuple(aliased))


def _op_name(node: fx.Node) -> str:
    return node.target._schema.name if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_tensor(arg: Any) -> bool:
    return isinstance(arg, fx.Node) and not isinstance(arg.meta["val"], torch.SymInt)


def _regions(
    gm: fx.GraphModule, cut_ops: Sequence[str], results: Sequence[fx.Node]
) -> list[tuple[bool, list[fx.Node]]]:
    """Live ops in order, as (is a cut, its nodes). Sizes are left out: pieces make their own."""
    live: set[fx.Node] = set(results)
    ops = [n for n in gm.graph.nodes if n.op == "call_function" and not is_size(n)]
    for node in reversed(ops):
        mutable = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node in live or mutable or drawn(node) is not None:
            live.add(node)
            live.update(a for a in node.all_input_nodes if not is_size(a))
    regions: list[tuple[bool, list[fx.Node]]] = []
    for node in ops:
        if node not in live:
            continue
        is_cut = _op_name(node) in cut_ops
        if is_cut or not regions or regions[-1][0]:
            regions.append((is_cut, [node]))
        else:
            regions[-1][1].append(node)
    return regions


def _needed_after(
    regions: Sequence[tuple[bool, list[fx.Node]]], results: Sequence[fx.Node]
) -> list[set[fx.Node]]:
    """For each region, the nodes that later regions or the caller read."""
    needed: set[fx.Node] = set(results)
    found = []
    for _, nodes in reversed(regions):
        found.append(set(needed))
        for node in nodes:
            needed.update(node.all_input_nodes)
    return found[::-1]


def _cut(graph: Graph, node: fx.Node) -> Cut:
    rows: list[Dim | None] = []
    for arg in node.args:
        if _is_tensor(arg):
            shape = arg.meta["val"].shape  # type: ignore[union-attr]
            dim = graph.dim(shape[0]) if len(shape) else None
            rows.append(dim if dim is not None and dim.letters else None)
    template = tuple(None if _is_tensor(a) else a for a in node.args)
    places = tuple(i for i, a in enumerate(node.args) if _is_tensor(a))
    example = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
    return Cut(_op_name(node), template, places, tuple(rows), example)
