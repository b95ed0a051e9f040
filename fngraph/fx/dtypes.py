"""Write out the dtypes that ops took from torch's default, which may be another one at replay."""

from __future__ import annotations

import torch
from torch import fx

from fngraph.errors import AmbientError
from fngraph.fx.rows.state import operands


def pin(gm: fx.GraphModule, default: torch.dtype) -> None:
    """Give each op its dtype as an argument, in place.

    Args:
        default: the dtype that ops will find when they run.

    Raises:
        AmbientError: an op without such an argument took another default, set inside `forward`.
    """
    for node in gm.graph.nodes:
        value = node.meta.get("val")
        if not isinstance(node.target, torch._ops.OpOverload) or not isinstance(
            value, torch.Tensor
        ):
            continue
        if not value.is_floating_point() or _has_floats(node):
            continue
        names = [a.name for a in node.target._schema.arguments]
        if "dtype" in names[len(node.args) :]:
            if node.kwargs.get("dtype") is None:
                node.kwargs = {**node.kwargs, "dtype": value.dtype}
        elif value.dtype is not default and "dtype" not in names:
            line = node.meta.get("stack_trace", "forward")
            raise AmbientError(
                f"{line}: {node.target} makes {value.dtype} of integers, by a default dtype that "
                f"forward sets for itself. Say it: x.to({value.dtype})"
            )


def _has_floats(node: fx.Node) -> bool:
    dtypes = [x.meta["val"].dtype for x in operands(node)]
    return any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
