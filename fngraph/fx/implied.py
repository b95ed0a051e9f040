"""What torch does otherwise for some sizes without asking: guards that a graph implies.

`x.squeeze(0)` drops a dim if T is 1, and `x[3]` is an error if T is less than 4; in a key, neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.fx.guards import Guard
from fngraph.fx.sizes import lettered

_SQUEEZES = {"aten::squeeze", "aten::squeeze_"}


def implied(gm: fx.GraphModule, symbols: dict[Any, str]) -> Iterator[Guard]:
    """Conditions on T and R under which each op does what it did in the trace."""
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name
        if name in _SQUEEZES or name == "aten::select":
            x, *rest = node.args
            for size, least in _asked(name, list(x.meta["val"].shape), rest):
                if isinstance(size, torch.SymInt):
                    expr = lettered(size.node.expr, symbols)
                    holds = sympy.Ne(expr, 1) if least is None else expr >= least
                    yield Guard(holds, node.meta.get("stack_trace", "forward"))


def _asked(name: str, shape: list[Any], rest: list[Any]) -> list[tuple[Any, int | None]]:
    """Sizes and the least that each may be; None: anything but 1."""
    if name == "aten::select":
        dim, index = rest
        return [(shape[dim], index + 1 if index >= 0 else -index)]
    dims = range(len(shape)) if not rest else rest[0] if isinstance(rest[0], list) else rest
    return [(shape[d], None) for d in dims if shape]
