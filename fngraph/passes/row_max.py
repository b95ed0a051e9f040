"""The highest of each row, of `argmax` and `max` over the last dim: the choice of a token."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_tensor
from fngraph.ops.row_max import KINDS
from fngraph.passes.pattern import Found, dtype_of, in_the_way, insert, sizes, strides
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten
LEAST = 4096  # columns: of fewer one program is as fast


def fuse_row_max(graph: fx.Graph) -> Rewritten:
    """All of rows of LEAST columns or more, that lie one number after the other."""
    matches = 0
    for node in list(graph.nodes):
        if node.target in (aten.argmax.default, aten.max.dim) and _is_of_long_rows(node):
            x, _, keepdim = _arguments(node)
            new = insert(graph, node, torch.ops.fngraph.row_max.default, (x, keepdim))
            if node.target is aten.max.dim:
                new.meta, found = dict(node.meta), new
            else:
                with graph.inserting_before(node):
                    found = graph.call_function(operator.getitem, (new, 1))
                found.meta = dict(node.meta)
            node.replace_all_uses_with(found)
            graph.erase_node(node)
            matches += 1
    return Rewritten(graph, matches)


def _arguments(node: fx.Node) -> tuple[Any, Any, Any]:
    """The tensor, the dim, whether it is kept."""
    given = dict(zip(("self", "dim", "keepdim"), node.args)) | node.kwargs
    return given["self"], given.get("dim"), given.get("keepdim", False)


def _is_of_long_rows(node: fx.Node) -> bool:
    x, dim, _ = _arguments(node)
    if not is_tensor(x) or dtype_of(x) not in KINDS or not sizes(x) or not isinstance(dim, int):
        return False
    columns = sizes(x)[-1]
    last = dim in (-1, len(sizes(x)) - 1) and strides(x)[-1] == 1
    return (
        last and isinstance(columns, int) and columns >= LEAST
        and not in_the_way(Found({}, (node,)))
    )  # fmt: skip
