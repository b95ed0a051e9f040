"""Ops with kernels for few rows: kept for those, and taken apart where there are more.

A decode step reads weights and does nothing else that takes time, so a layer in one launch, or in
two, is the best there is. With more rows what is around its product is work, which Inductor fuses
with what is around that. So a piece with such ops is compiled for few tokens apart from the rest.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from fngraph.core.compiling import Range, Span, of_batches
from fngraph.fx.nodes import inputs_of
from fngraph.ops import fused_linear, grouped, paired_linears
from fngraph.ops.fused_linear import MOST_ROWS
from fngraph.ops.triton.launching import missing
from fngraph.torch_facts.tracing import make_fx

APART: dict[Any, Any] = {
    torch.ops.fngraph.fused_linear.default: fused_linear.for_many_rows,
    torch.ops.fngraph.paired_linears.default: paired_linears.for_many_rows,
    torch.ops.fngraph.group_rows.default: grouped.plain_group_rows,
    torch.ops.fngraph.grouped_gate.default: grouped.plain_grouped_gate,
    torch.ops.fngraph.grouped_linear.default: grouped.plain_grouped_linear,
}
"""Such ops, and what each stands for where there are more rows."""
DEVICES = ("cuda",)  # on which they have kernels, where there is Triton


def few(gm: fx.GraphModule, within: Range, sizes: Iterable[tuple[int, int]]) -> list[Range]:
    """What is compiled apart: as many tokens as there are kernels for, where such sizes come of
    more than one; []: no such op, or no such sizes."""
    rows = Span(within.tokens.low, min(MOST_ROWS, within.tokens.high))
    part = of_batches(rows, within.reqs)
    comes = part != within and any(part.covers(*size) and size[0] > 1 for size in sizes)
    return [part] if comes and any(map(_has_kernel, gm.graph.nodes)) else []


def _has_kernel(node: fx.Node) -> bool:
    if node.target not in APART:
        return False
    device = node.args[0].meta["val"].device.type  # type: ignore[union-attr]
    return device in DEVICES and (device != "cuda" or missing("cuda") is None)


def taken_apart(gm: fx.GraphModule, part: Range) -> fx.GraphModule:
    """`gm`, edited in place, with torch's ops in place of those that `part` is too large for."""
    graph = gm.graph
    for node in list(graph.nodes):
        is_few = part.tokens.high <= MOST_ROWS
        if node.target in APART and not (is_few and _has_kernel(node)):
            with graph.inserting_before(node):
                made = _inlined(graph, node)
            if isinstance(made, fx.Node):
                node.replace_all_uses_with(made)
            for user in list(node.users):  # of one that has several results
                user.replace_all_uses_with(made[user.args[1]])
                graph.erase_node(user)
            graph.erase_node(node)
    gm.recompile()
    return gm


def _inlined(graph: fx.Graph, node: fx.Node) -> Any:
    """The ops that a call stands for, which say nothing of the number of rows; their results."""
    given: list[fx.Node] = []
    fx.map_arg(node.args, given.append)
    fakes = [torch.empty(_shape(x), dtype=x.meta["val"].dtype, device="meta") for x in given]

    def call(*tensors: torch.Tensor) -> Any:
        left = iter(tensors)
        return APART[node.target](*fx.map_arg(node.args, lambda _: next(left)))

    traced = make_fx(call)(*fakes).graph
    env = dict(zip(inputs_of(traced), given))
    known = set(graph.nodes)
    results: Any = graph.graph_copy(traced, env)
    for new in graph.nodes:
        if new not in known:
            new.meta = {key: value for key, value in node.meta.items() if key != "val"}
    value = node.meta["val"]
    for made, like in [(results, value)] if isinstance(results, fx.Node) else zip(results, value):
        made.meta["val"] = like
    return results


def _shape(x: Any) -> list[int]:
    """With a number in place of T: that of no other dim."""
    return [n if isinstance(n, int) else 7919 for n in x.meta["val"].shape]
