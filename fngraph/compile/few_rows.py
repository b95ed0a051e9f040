"""Ops with a kernel for few rows: kept for those, and taken apart where there are more.

A decode step reads weights and does nothing else that takes time, so a layer in one launch is the
best there is. With more rows what is around its product is work, which Inductor fuses with what is
around that. So a piece with such ops is compiled for few tokens apart from the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fngraph.core.compiling import Range, Span, of_batches
from fngraph.fx.nodes import inputs_of
from fngraph.ops.fused_linear import for_many_rows, most_rows
from fngraph.ops.triton.launching import missing
from fngraph.torch_facts.tracing import make_fx

_OP = torch.ops.fngraph.fused_linear.default
DEVICES = ("cuda",)  # on which the op has a kernel, where there is Triton


def few(gm: fx.GraphModule, within: Range, sizes: Iterable[tuple[int, int]]) -> list[Range]:
    """What is compiled apart: up to as many tokens as each kind of op has a kernel for, where
    sizes come that no smaller one serves; []: no such op, or no such sizes."""
    sizes = tuple(sizes)
    parts: list[Range] = []
    served = 1  # one token is apart anyhow
    for most in sorted({_most(node) for node in gm.graph.nodes if _has_kernel(node)}):
        rows = Span(within.tokens.low, min(most, within.tokens.high))
        part = of_batches(rows, within.reqs)
        if part != within and any(part.covers(*size) and size[0] > served for size in sizes):
            parts.append(part)
            served = most
    return parts


def _has_kernel(node: fx.Node) -> bool:
    if node.target is not _OP or (device := node.meta["val"].device.type) not in DEVICES:
        return False
    return device != "cuda" or missing("cuda") is None


def _most(node: fx.Node) -> int:
    _, _, norm, _, _, _, gated, *_ = node.args
    return most_rows(norm is not None, bool(gated))


def taken_apart(gm: fx.GraphModule, part: Range) -> fx.GraphModule:
    """`gm`, edited in place, with torch's ops in place of those that `part` is too large for."""
    graph = gm.graph
    for node in list(graph.nodes):
        if node.target is _OP and not (_has_kernel(node) and part.tokens.high <= _most(node)):
            with graph.inserting_before(node):
                node.replace_all_uses_with(_inlined(graph, node))
            graph.erase_node(node)
    gm.recompile()
    return gm


def _inlined(graph: fx.Graph, node: fx.Node) -> Any:
    """The ops that a call stands for, which say nothing of the number of rows."""
    x, weights, norm, more, *options = node.args
    given = [y for y in (x, *weights, norm, more) if y is not None]  # type: ignore[misc]
    fakes = [torch.empty(_shape(y), dtype=y.meta["val"].dtype, device="meta") for y in given]

    def call(*tensors: torch.Tensor) -> torch.Tensor:
        left = list(tensors)
        first, *ws = [left.pop(0) for _ in range(1 + len(weights))]  # type: ignore[arg-type]
        by = left.pop(0) if norm is not None else None
        return for_many_rows(first, ws, by, left.pop(0) if left else None, *options)  # type: ignore[arg-type]

    traced = make_fx(call)(*fakes).graph
    env = dict(zip(inputs_of(traced), given))
    known = set(graph.nodes)
    result: Any = graph.graph_copy(traced, env)
    for new in graph.nodes:
        if new not in known:
            new.meta = {key: value for key, value in node.meta.items() if key != "val"}
    result.meta["val"] = node.meta["val"]
    return result


def _shape(x: Any) -> list[int]:
    """With a number in place of T: that of no other dim."""
    return [n if isinstance(n, int) else 7919 for n in x.meta["val"].shape]
