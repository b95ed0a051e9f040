"""`Piece`: traced ops between two cuts, as a graph of its own.

Sizes never cross between pieces: every piece takes T and R as its first two arguments and computes
what it needs of them. So a piece is a function of (T, R, tensors) and serves any batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

from fngraph.errors import BranchError
from fngraph.fx.generators import drawn
from fngraph.fx.leaves import storage_key
from fngraph.fx.trace import Graph


@dataclasses.dataclass(frozen=True)
class Piece:
    """Traced ops between two cuts: `gm(T, R, *tensors) -> tuple`."""

    gm: fx.GraphModule
    key: str

    def __repr__(self) -> str:
        ops = sum(n.op == "call_function" for n in self.gm.graph.nodes)
        return f"Piece({ops} ops)"


def make_piece(
    graph: Graph, nodes: Sequence[fx.Node], writes: Sequence[fx.Node]
) -> tuple[fx.Graph, list[fx.Node]]:
    """A piece as a graph of its own, and the outer nodes that it reads, in argument order."""
    inside = set(nodes)
    reads = list(
        dict.fromkeys(
            a for n in nodes for a in n.all_input_nodes if a not in inside and not is_size(a)
        )
    )
    new = fx.Graph()
    letters = {"T": fx.Proxy(new.placeholder("num_tokens"))}
    letters["R"] = fx.Proxy(new.placeholder("num_reqs"))
    env = {symbol: letters[letter] for symbol, letter in graph.symbols.items()}
    names = {n: new.placeholder(f"x{i}") for i, n in enumerate(reads)}
    for old, placeholder in names.items():
        placeholder.meta["val"] = old.meta["val"]
    sizes: dict[Any, Any] = {}

    def lookup(arg: fx.Node) -> Any:
        if not is_size(arg):
            return names[arg]
        expr = arg.meta["val"].node.expr
        if expr not in sizes:
            where = node.meta.get("stack_trace", "forward")
            sizes[expr] = _emit(expr, env, f"{where}: the size {graph.text(arg.meta['val'])}")
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


def structure(graph: Graph, piece: fx.Graph) -> str:
    """Text that is equal for pieces that compute the same from equal kinds of inputs."""
    index = {node: i for i, node in enumerate(piece.nodes)}

    def brief(arg: Any) -> Any:
        return f"%{index[arg]}"

    lines = []
    storages: dict[int, int] = {}
    for node in piece.nodes:
        value = node.meta.get("val")
        if node.op == "placeholder" and isinstance(value, torch.Tensor):
            storage = storages.setdefault(storage_key(value), len(storages))
            sizes = [graph.text(s) for s in (*value.shape, *value.stride())]
            lines.append(f"in {sizes} {value.dtype} {value.device} storage {storage}")
        else:
            args = fx.map_arg((node.args, dict(node.kwargs)), lambda n: _Brief(brief(n)))
            lines.append(f"{node.op} {_target(node)} {args} {drawn(node)}")
    return "\n".join(lines)


class _Brief(str):
    """A node's number; prints without quotes."""

    __repr__ = str.__str__  # type: ignore[assignment]


def _target(node: fx.Node) -> str:
    target = node.target
    is_op = isinstance(target, str | torch._ops.OpOverload)
    return str(target) if is_op else getattr(target, "__name__", str(target))


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number made of T and R."""
    return isinstance(node.meta.get("val"), torch.SymInt | torch.SymBool | torch.SymFloat)
