"""Whether two traces are the same graph: node for node, in targets, arguments and meta."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_map

from fngraph.fx.leaves import storage_key

SIZES = (torch.SymInt, torch.SymFloat, torch.SymBool)
NOISE = {"seq_nr"}  # counts the gradients that the thread has recorded, in other traces too


def lines(traced: Any) -> list[str]:
    """One line a node: op, target, arguments and all of its meta.

    Nodes are shown by their number, storages by the order in which they first appear, and sizes as
    expressions in T and R: of which tensor a size was asked is no part of a graph's meaning, and a
    piece makes its sizes anew.
    """
    graph, storages = traced.graph, {}
    nodes = [n for n in graph.gm.graph.nodes if not isinstance(n.meta.get("val"), SIZES)]
    number = {node: i for i, node in enumerate(nodes)}

    def brief(x: Any) -> Any:
        if isinstance(x, fx.Node):
            return _Text(f"%{number[x]}" if x in number else graph.text(x.meta["val"]))
        if isinstance(x, torch.Tensor):
            sizes = (*x.shape, *x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
            storage = storages.setdefault(storage_key(x), len(storages))
            return _Text(
                f"{x.dtype} {x.dim()} {[graph.text(n) for n in sizes]} {x.device} in {storage}"
                f" {x.requires_grad} {x.is_conj()} {x.is_neg()}"
            )
        return _Text(graph.text(x)) if isinstance(x, SIZES) else x

    def line(node: fx.Node) -> str:
        args = fx.map_arg((node.args, node.kwargs), brief)
        meta = {k: node.meta[k] for k in sorted(node.meta.keys() - NOISE - {"tensor_meta"})}
        made = tree_map(_fields, node.meta.get("tensor_meta"))
        return f"{node.op} {node.target} {args} {tree_map(brief, (meta, made))}"

    return [line(node) for node in nodes]


class _Text(str):
    """Prints without quotes."""

    __repr__ = str.__str__  # type: ignore[assignment]


def _fields(metadata: Any) -> Any:
    return list(metadata) if hasattr(metadata, "_fields") else metadata


def _asked(traced: Any) -> int:
    """How often the graph asks a tensor for its size."""
    asks = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int)
    return sum(n.target in asks for n in traced.graph.gm.graph.nodes)


def assert_alike(got: Any, want: Any) -> None:
    """Equal graphs, constants, assumptions, donation and pieces."""
    ours, theirs = lines(got), lines(want)
    for a, b in zip(ours, theirs):
        assert a == b
    assert len(ours) == len(theirs) and _asked(got) <= _asked(want)
    assert got.graph.assumptions == want.graph.assumptions
    assert got.donation == want.donation and got.returns == want.returns
    assert got.out_tree == want.out_tree
    values = [list(traced.constants.values()) for traced in (got, want)]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(*values, strict=True))
    a, b = got.split(), want.split()
    assert a.program == b.program and a.pieces.output_dims == b.pieces.output_dims
    assert [piece.key for piece in a.distinct] == [piece.key for piece in b.distinct]
