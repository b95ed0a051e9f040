"""RMSNorm, with the addition before it: one op each.

    x + y, (x + y).float() * rsqrt(mean of its squares + eps), rounded, * weight
                                              ->  fngraph::add_rms_norm(x, y, weight, eps)

The norm is computed in float32, as models do; one in half precision is another one and is left.
Weights are of the dtype of `x`. With `1 + weight.float()` in place of the weight, and rounded after
it, it is the centred norm of Gemma and Qwen3-Next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fngraph.passes.pattern import (
    Found,
    call,
    dtype_of,
    either,
    is_dense,
    match,
    name,
    replace,
    sizes,
)
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten


def norm_of(x: Any) -> Any:
    """The pattern of a norm of the pattern `x`, with "weight", "eps" and, if it is centred,
    "centred" among its names."""
    weight, eps = name("weight"), name("eps")
    norms = []
    for wide, narrow in ((_cast(x), rounded), (x, lambda y: y)):
        mean = call(aten.mean, call(aten.pow, wide, 2), [-1], True)
        scaled = call(aten.mul, wide, call(aten.rsqrt, call(aten.add, mean, eps)))
        own = _cast(weight) if narrow is rounded else weight
        one = either(
            call(aten.add, own, 1, label="centred"), call(aten.add, own, 1.0, label="centred")
        )
        # centred first: 1 + weight is a weight as well
        norms += [narrow(call(aten.mul, scaled, one)), call(aten.mul, narrow(scaled), weight)]
    return either(*norms)


def _cast(x: Any) -> Any:
    return call(aten._to_copy, x, dtype=torch.float32)


def rounded(x: Any) -> Any:
    """The pattern of `x` in half precision, where it was not."""
    return either(*[call(aten._to_copy, x, dtype=d) for d in (torch.bfloat16, torch.float16)])


def is_norm(found: Found, x: fx.Node, made: fx.Node) -> bool:
    """Whether a match of `norm_of` is the norm of `x` that the op computes."""
    weight, eps = found["weight"], found["eps"]
    if not isinstance(eps, float) or not isinstance(weight, fx.Node):
        return False
    kinds = {dtype_of(x), dtype_of(weight), dtype_of(made)}
    wide = any(n.target is aten._to_copy.default for n in found.inside) == (
        dtype_of(x) != torch.float32
    )
    rows = len(sizes(weight)) == 1 and sizes(weight)[-1] == sizes(x)[-1]
    return len(kinds) == 1 and wide and rows and sizes(x) == sizes(made) and is_dense(made)


_X, _Y = name("x"), name("y")
_NORM = norm_of(_X)
_ADDED = norm_of(call(aten.add, _X, _Y, label="total"))


Args = tuple[Any, ...]


def roots(graph: fx.Graph) -> Iterator[fx.Node]:
    """Nodes that may be the last of a norm."""
    for node in list(graph.nodes):
        if node.target in (aten.mul.Tensor, aten._to_copy.default) and node.users:
            yield node


def sum_and_norm_at(node: fx.Node, pattern: Any = _ADDED) -> tuple[Found, Args] | None:
    """The norm of a sum that ends in a node, both among what is found, as "total" and "normed";
    and the arguments of its op.

    Args:
        pattern: of the norm of a "total", with the names "x" and "y" of what it adds.
    """
    found = match(pattern, node, keeps=("total",))
    if found is None:
        return None
    x, y, total = found["x"], found["y"], found["total"]
    if not (isinstance(x, fx.Node) and isinstance(y, fx.Node)):
        return None
    alike = sizes(x) == sizes(y) == sizes(total) and dtype_of(x) == dtype_of(y)
    if not (alike and is_dense(total) and is_norm(found, total, node)):
        return None
    labelled = dataclasses.replace(found, values={**found.values, "normed": node})
    return labelled, (x, y, found["weight"], found["eps"], "centred" in found.values)


def norm_at(node: fx.Node) -> tuple[Found, Args] | None:
    """The norm that ends in a node, and the arguments of its op."""
    found = match(_NORM, node)
    if found is None or not is_norm(found, found["x"], node):
        return None
    return found, (found["x"], found["weight"], found["eps"], "centred" in found.values)


def fuse_add_rms_norm(graph: fx.Graph) -> Rewritten:
    """Norms of sums; the sum itself may be read by others, and is a result too."""
    op = torch.ops.fngraph.add_rms_norm.default
    matches = 0
    for node in roots(graph):
        if (one := sum_and_norm_at(node)) is not None:
            matches += replace(graph, one[0], op, one[1], "total", "normed")
    return Rewritten(graph, matches)


def fuse_rms_norm(graph: fx.Graph) -> Rewritten:
    """Norms of anything else."""
    matches = 0
    for node in roots(graph):
        if (one := norm_at(node)) is not None:
            matches += replace(graph, one[0], torch.ops.fngraph.rms_norm.default, one[1])
    return Rewritten(graph, matches)
