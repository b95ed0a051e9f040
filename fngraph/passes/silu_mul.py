"""The gate of an mlp: silu(gate) * up, one op."""

from __future__ import annotations

import torch
from torch import fx

from fngraph.passes.frame import Rewritten
from fngraph.passes.pattern import call, dtype_of, is_dense, match, name, replace, sizes

aten = torch.ops.aten
_PATTERN = call(aten.mul, call(aten.silu, name("gate")), name("up"))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_silu_mul(graph: fx.Graph) -> Rewritten:
    """Products of two values of one shape and dtype; one that is broadcast is left."""
    matches = 0
    for node in list(graph.nodes):
        found = match(_PATTERN, node) if node.target is aten.mul.Tensor else None
        if found is None or not isinstance(found["up"], fx.Node):
            continue
        gate, up = found["gate"], found["up"]
        alike = sizes(gate) == sizes(up) == sizes(node)
        kinds = {dtype_of(gate), dtype_of(up), dtype_of(node)}
        if alike and len(kinds) == 1 and kinds <= set(_DTYPES) and is_dense(node):
            matches += replace(graph, found, torch.ops.fngraph.silu_mul.default, (gate, up))
    return Rewritten(graph, matches)
