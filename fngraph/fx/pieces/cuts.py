"""Split a traced graph at its primitives into pieces, and share the pieces that are equal.

A piece is what lies between two cuts, as a graph of its own. Sizes never cross between pieces: each
takes T and R as its first two arguments and computes what it needs of them. So a piece is a
function of (T, R, tensors) and serves any batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core import Dim
from fngraph.core.program import Instruction, Program, with_drops
from fngraph.errors import BranchError
from fngraph.fx.generators import drawn, has_effect
from fngraph.fx.nodes import (
    is_loop,
    is_loop_result,
    is_op,
    is_size,
    is_tensor,
    line_of,
    op_name,
    results_of,
)
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.tracing import PythonReferenceAnalysis, sympy_interp

LETTERS = "fngraph.letters"  # in a piece's meta: symbols of its sizes to letters


@dataclasses.dataclass(frozen=True)
class Cut:
    """A call of a primitive.

    Attributes:
        op: its name, "fngraph::attention".
        template: its arguments; a tensor's position holds None.
        places: the positions of the tensors.
        row_dims: for each tensor argument, its first dim if that depends on T or R, else None.
        example: fakes and constants, for the primitive's configuration.
        line: the user's, from which it is called.
    """

    op: str
    template: tuple[Any, ...]
    places: tuple[int, ...]
    row_dims: tuple[Dim | None, ...]
    example: tuple[Any, ...]
    line: str = "forward"


@dataclasses.dataclass(frozen=True)
class Piece:
    """Traced ops between two cuts: `gm(T, R, *tensors) -> tuple`."""

    gm: fx.GraphModule
    key: str

    def __repr__(self) -> str:
        ops = sum(n.op == "call_function" for n in self.gm.graph.nodes)
        return f"Piece({ops} ops)"


@dataclasses.dataclass(frozen=True)
class Pieces:
    """A program, with one `Piece` or `Cut` for each instruction; equal pieces are one object.

    Attributes:
        output_dims: the sizes of each output, in T and R.
        output_aliased: whether an output is memory of an input or of another output.
    """

    program: Program
    parts: tuple[Piece | Cut, ...]
    output_dims: tuple[tuple[Dim, ...], ...]
    output_dtypes: tuple[torch.dtype, ...]
    output_aliased: tuple[bool, ...]


def split(
    graph: Graph, cut_ops: Sequence[str], outputs: Sequence[int], by_loops: bool = False,
    apart: bool = False,
) -> Pieces:  # fmt: skip
    """Cut `graph` at each op named in `cut_ops`; return the outputs whose indices are given.

    Args:
        by_loops: whether each loop is a piece of its own.
        apart: whether equal pieces are two if primitives are called in loops of theirs.
    """
    gm = graph.gm
    given = results_of(gm.graph)
    results = [given[i] for i in outputs]
    program, parts = split_program(graph, cut_ops, results, {}, by_loops, apart)
    dims = tuple(tuple(graph.dim(s) for s in n.meta["val"].shape) for n in results)
    dtypes = tuple(n.meta["val"].dtype for n in results)
    owned = {storage_key(n.meta["val"]) for n in inputs_of_program(gm)}
    aliased = []
    for node in results:
        storage = storage_key(node.meta["val"])
        aliased.append(storage in owned)
        owned.add(storage)
    return Pieces(program, parts, dims, dtypes, tuple(aliased))


def inputs_of_program(gm: fx.GraphModule) -> list[fx.Node]:
    """A program's first values: leaves, then constants."""
    return [n for n in gm.graph.nodes if n.op in ("placeholder", "get_attr")]


def split_program(
    graph: Graph, cut_ops: Sequence[str], results: Sequence[fx.Node], shared: dict[str, Piece],
    by_loops: bool, apart: bool = False,
) -> tuple[Program, tuple[Piece | Cut, ...]]:  # fmt: skip
    """The program that gives `results`, and its parts.

    Args:
        shared: pieces by their key, of which equal ones are one; it grows.
        by_loops, apart: see `split`.
    """
    gm = graph.gm
    inputs = inputs_of_program(gm)
    numbers = {node: i for i, node in enumerate(inputs)}  # of the program's values
    regions = _regions(gm, cut_ops, results, by_loops)
    needed_after = _needed_after(regions, results)

    instructions: list[Instruction] = []
    parts: list[Piece | Cut] = []
    kinds: dict[str, int] = {}
    for (is_cut, nodes), needed in zip(regions, needed_after):
        if is_cut:
            (node,) = nodes
            part: Piece | Cut = cut_of(graph, node)
            reads: list[fx.Node] = [a for a in node.args if is_tensor(a)]  # type: ignore[misc]
            writes: list[fx.Node] = []
            key = op_name(node)
            name = key.partition("::")[2]
        else:
            writes = [n for n in nodes if n in needed]
            made, reads = ops_of(graph, nodes, writes)
            name, key = "piece", _structure(graph, made)
            if apart and any(_calls_any(node, cut_ops) for node in nodes):
                key += f"\n# call {len(instructions)}"
            if key not in shared:
                shared[key] = piece_of(graph, made, key)
            part = shared[key]
        for node in writes:
            numbers[node] = len(numbers)
        index = sum(i.name.startswith(name + " ") for i in instructions)
        instructions.append(
            Instruction(
                f"{name} {index}", is_cut, kinds.setdefault(key, len(kinds)),
                tuple(numbers[n] for n in reads), tuple(numbers[n] for n in writes),
            )
        )  # fmt: skip
        parts.append(part)
    program = Program(len(inputs), tuple(instructions), tuple(numbers[n] for n in results))
    return with_drops(program), tuple(parts)


def _calls_any(node: fx.Node, ops: Sequence[str]) -> bool:
    """Whether a node calls one of these, or is a loop that does."""
    if not is_loop(node):
        return op_name(node) in ops
    inner = [x for gm in node.target.graphs for x in gm.graph.nodes]  # type: ignore[union-attr]
    return any(_calls_any(x, ops) for x in inner)


def live_ops(gm: fx.GraphModule, results: Sequence[fx.Node]) -> list[fx.Node]:
    """Ops that `results` need, or that have an effect, in order; without sizes."""
    live: set[fx.Node] = set(results)
    ops = [n for n in gm.graph.nodes if n.op == "call_function" and not is_size(n)]
    for node in reversed(ops):
        if node in live or has_effect(node):
            live.add(node)
            live.update(a for a in node.all_input_nodes if not is_size(a))
    return [n for n in ops if n in live]


def _regions(
    gm: fx.GraphModule, cut_ops: Sequence[str], results: Sequence[fx.Node], by_loops: bool
) -> list[tuple[bool, list[fx.Node]]]:
    """Live ops in order, as (is a cut, its nodes). Sizes are left out: pieces make their own."""
    regions: list[tuple[bool, list[fx.Node]]] = []
    is_open = False  # whether the last one takes more
    ops = live_ops(gm, results)
    live = set(ops)
    for node in ops:
        loop = by_loops and is_loop(node)
        if by_loops and is_loop_result(node):
            continue
        is_cut = op_name(node) in cut_ops
        if is_cut or loop or not is_open:
            regions.append((is_cut, [node]))
        else:
            regions[-1][1].append(node)
        if loop:
            regions[-1][1].extend(x for x in node.users if x in live)
        is_open = not (is_cut or loop)
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


def cut_of(graph: Graph, node: fx.Node) -> Cut:
    """A call of a primitive, as it is in the graph."""
    template = tuple(None if is_tensor(a) else a for a in node.args)
    places = tuple(i for i, a in enumerate(node.args) if is_tensor(a))
    example: Any = tuple(a.meta["val"] if isinstance(a, fx.Node) else a for a in node.args)
    firsts = [next((graph.dim(n) for n in example[i].shape[:1]), None) for i in places]
    row_dims = tuple(dim if dim is not None and dim.letters else None for dim in firsts)
    return Cut(op_name(node), template, places, row_dims, example, line_of(node))


def piece_of(graph: Graph, made: fx.Graph, key: str = "") -> Piece:
    """What `ops_of` has made, as a piece, by a key of its own if it is given one."""
    piece = Piece(fx.GraphModule({}, made), key or _structure(graph, made))
    piece.gm.meta[LETTERS] = graph.letters
    return piece


def ops_of(
    graph: Graph, nodes: Sequence[fx.Node], writes: Sequence[fx.Node],
    first: Sequence[fx.Node] = (),
) -> tuple[fx.Graph, list[fx.Node]]:  # fmt: skip
    """A piece as a graph of its own, and the outer nodes that it reads, in argument order: `first`,
    then others.

    Args:
        writes: those of `nodes` that it gives.
    """
    inside = set(nodes)
    given = (a for n in nodes for a in n.all_input_nodes if a not in inside and not is_size(a))
    reads = list(dict.fromkeys((*first, *given)))
    new = fx.Graph()
    letters = {"T": fx.Proxy(new.placeholder("num_tokens"))}
    letters["R"] = fx.Proxy(new.placeholder("num_reqs"))
    env = {symbol: letters[letter] for symbol, letter in graph.letters.items()}
    names = {n: new.placeholder(f"x{i}") for i, n in enumerate(reads)}
    for old, placeholder in names.items():
        placeholder.meta["val"] = old.meta["val"]
    sizes: dict[Any, Any] = {}

    def lookup(arg: fx.Node) -> Any:
        if not is_size(arg):
            return names[arg]
        expr = arg.meta["val"].node.expr
        if expr not in sizes:
            sizes[expr] = _emit(
                expr, env, f"{line_of(node)}: the size {graph.text(arg.meta['val'])}"
            )
        return sizes[expr]

    for node in nodes:
        copy = new.create_node(
            "call_function",
            node.target,
            fx.map_arg(node.args, lookup),
            fx.map_arg(node.kwargs, lookup),
        )
        copy.meta = dict(node.meta)
        names[node] = copy
    new.output(tuple(names[n] for n in writes))
    new.lint()
    return new, reads


def _emit(expr: Any, env: dict[Any, fx.Proxy], what: str) -> Any:
    """A size as arithmetic over the piece's T and R, or as a number.

    Raises:
        BranchError: an expression that Python's operators do not make.
    """
    try:
        value = sympy_interp(PythonReferenceAnalysis, env, expr)
    except Exception as error:  # sympy's or fx's own, from deep inside
        raise BranchError(
            f"{what} is computed in floats or by a function, which a graph cannot recompute. "
            "Compute it on the device, from a tensor, or stay with ints"
        ) from error
    return value.node if isinstance(value, fx.Proxy) else value


def _structure(graph: Graph, piece: fx.Graph) -> str:
    """Text that is equal for pieces that compute the same from equal kinds of inputs."""
    index = {node: i for i, node in enumerate(piece.nodes)}
    lines = []
    storages: dict[int, int] = {}
    for node in piece.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            storage = storages.setdefault(storage_key(value), len(storages))
            sizes = [graph.text(s) for s in (*value.shape, *value.stride())]
            lines.append(f"in {sizes} {value.dtype} {value.device} storage {storage}")
        else:
            args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: f"%{index[n]}")
            lines.append(f"{node.op} {_target(node)} {args} {drawn(node)}")
    return "\n".join(lines)


def _target(node: fx.Node) -> str:
    if is_loop(node):
        return node.target.text  # type: ignore[union-attr]
    named = is_op(node) or isinstance(node.target, str)
    return str(node.target) if named else getattr(node.target, "__name__", str(node.target))
