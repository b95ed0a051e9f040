"""The gate of an mlp: silu(gate) * up, one op."""

from __future__ import annotations

import torch
from torch import fx

from fngraph.passes.pattern import Found, call, dtype_of, is_dense, match, name, replace, sizes
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten
_PATTERN = call(aten.mul, call(aten.silu, name("gate")), name("up"))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def gate_at(node: fx.Node) -> tuple[Found, tuple[fx.Node, fx.Node]] | None:
    """The gate that ends in a node, of two values of one shape and dtype, and the arguments of its
    op; one that is broadcast is none."""
    found = match(_PATTERN, node) if node.target is aten.mul.Tensor else None
    if found is None or not isinstance(found["up"], fx.Node):
        return None
    gate, up = found["gate"], found["up"]
    alike = sizes(gate) == sizes(up) == sizes(node)
    kinds = {dtype_of(gate), dtype_of(up), dtype_of(node)}
    if not (alike and len(kinds) == 1 and kinds <= set(_DTYPES) and is_dense(node)):
        return None
    return found, (gate, up)


def fuse_silu_mul(graph: fx.Graph) -> Rewritten:
    """All gates."""
    matches = 0
    for node in list(graph.nodes):
        if (one := gate_at(node)) is not None:
            matches += replace(graph, one[0], torch.ops.fngraph.silu_mul.default, one[1])
    return Rewritten(graph, matches)
