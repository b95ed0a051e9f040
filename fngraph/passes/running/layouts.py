"""Who may compute otherwise where what it reads lies otherwise, and that no pass does that to it.

An op of torch's, or of ours, reads any strides alike. One of the user's may read memory by itself,
as a kernel does; `as_strided` counts in it; and the functions of a loop were traced for strides.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fngraph.errors import PassError
from fngraph.fx.nodes import is_loop, is_op, line_of, name_of, operands
from fngraph.passes.pattern import sizes, strides
from fngraph.torch_facts.names import OpOverload

_KNOWN = ("aten", "prims", "fngraph")
ANY_STRIDES = "An op of your own that takes any strides says so: tags=(torch.Tag.flexible_layout,)"


def takes_any_strides(op: Any) -> bool:
    """Whether what an op computes does not depend on how its tensors lie."""
    if not isinstance(op, OpOverload):
        return False
    if op.namespace in _KNOWN:
        return "stride" not in op._schema.name
    return torch.Tag.flexible_layout in op.tags


def check_layouts(name: str, stays: Mapping[fx.Node, fx.Node]) -> None:
    """Raise `PassError` where what goes by layouts is given another one than it was traced with.

    Args:
        name: the pass.
        stays: nodes that were there before, and which.
    """
    for node, old in stays.items():
        if not (is_op(node) or is_loop(node)) or takes_any_strides(node.target):
            continue
        for x, was in zip(operands(node), operands(old)):
            if (now := _lies(x)) != (before := _lies(was)):
                raise PassError(
                    f"{line_of(node)}: the pass {name!r} gives {name_of(node)} a tensor that lies "
                    f"otherwise: {x.name} has {now}, and what was there {before}. It may go by "
                    "that: put a copy that lies as before between them. " + ANY_STRIDES
                )


def _lies(x: fx.Node) -> str:
    """Strides, but those of dims of one, and where in its memory it begins."""
    steps = [str(s) if n != 1 else "any" for n, s in zip(sizes(x), strides(x))]
    begins: Any = x.meta["val"].storage_offset()
    offset = begins if isinstance(begins, int) else begins.node.expr
    return f"strides ({', '.join(steps)})" + (f" from {offset} on" if offset != 0 else "")
