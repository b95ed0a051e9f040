"""A sum over processes, the addition and the RMSNorm behind it: one op.

    total = x + all_reduce(h);  norm(total)      ->  fngraph::all_reduce_rms_norm(h, x, weight, ...)

That is what stands behind each half of a layer whose weights are split over processes. The sum may
be read by others, and is a result too. Where a bias comes behind the sum over processes, or a norm
before the addition (Gemma 3), nothing matches; the largest of all processes is no sum.
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
    matches = 0
    for node in roots(graph) if has_collectives(graph) else ():
        if (one := sum_and_norm_at(node, reduced_norm())) is not None:
            found, args = one
            op = torch.ops.fngraph.all_reduce_rms_norm.default
            given = (*args, found["axis"], found["group"])
            matches += replace(graph, found, op, given, "total", "normed")
    return Rewritten(graph, matches)
