"""A sum over processes, the addition and the RMSNorm behind it: one op.

    total = x + all_reduce(h);  norm(total)      ->  fngraph::all_reduce_rms_norm(h, x, weight, ...)

That is what stands behind each half of a layer whose weights are split over processes. The sum may
be read by others, and is a result too. Where a bias comes behind the sum over processes, or a norm
before the addition (Gemma 3), nothing matches; the largest of all processes is no sum. `x` is alike
in all processes, as what earlier sums have left: where it is seen to be a process's own, nothing
matches; of arguments of forward and what is computed of them nobody knows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import fx

from fngraph.fx.pieces.collectives import is_collective
from fngraph.passes.norms import norm_of, roots, sum_and_norm_at
from fngraph.passes.pattern import call, name, replace
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten


def has_collectives(graph: fx.Graph) -> bool:
    """Whether it meets other processes; then the ops of that are there as well."""
    return any(map(is_collective, graph.nodes))


@functools.cache
def reduced_norm() -> Any:
    """The pattern, with "axis" and "group" among its names; the ops may be loaded late."""
    summed = call(
        torch.ops.fngraph.all_reduce.default, name("x"), "sum", name("axis"), name("group")
    )
    return norm_of(call(aten.add, summed, name("y"), label="total"))


def fuse_all_reduce_rms_norm(graph: fx.Graph) -> Rewritten:
    """Norms of sums of what was summed over processes."""
    if not has_collectives(graph):
        return Rewritten(graph, 0)
    matches, own = 0, own_values(graph)
    for node in roots(graph):
        one = sum_and_norm_at(node, reduced_norm())
        if one is not None and one[0]["y"] not in own:
            found, args = one
            op = torch.ops.fngraph.all_reduce_rms_norm.default
            given = (*args, found["axis"], found["group"])
            matches += replace(graph, found, op, given, "total", "normed")
    return Rewritten(graph, matches, unmatched(graph, matches))


def own_values(graph: fx.Graph) -> set[fx.Node]:
    """What is another value in each process: parts of sums over processes, and all that is computed
    of them before they are summed. What is added to a sum must be alike in all."""
    own: set[fx.Node] = set()
    for node in graph.nodes:
        if is_collective(node):
            own.update(x for x in node.all_input_nodes if x.op != "placeholder")
    for node in graph.nodes:
        if not is_collective(node) and not own.isdisjoint(node.all_input_nodes):
            own.add(node)
    return own


def unmatched(graph: fx.Graph, matches: int) -> tuple[str, ...]:
    """Why nothing matched, in a graph that has collectives, if sums are among them."""
    if matches:
        return ()
    ops = torch.ops.fngraph
    sums = [n for n in graph.nodes if n.target is ops.all_reduce.default and n.args[1] == "sum"]
    shared_out = ops.reduce_scatter_rms_norm.default
    if not sums or any(node.target is shared_out for node in graph.nodes):
        return ()
    apart = "no sum over processes has an addition and an RMSNorm behind it that are still apart"
    return (f"{apart}: pass it before those that fuse norms, as 'add_rms_norm' and 'linears' do",)
