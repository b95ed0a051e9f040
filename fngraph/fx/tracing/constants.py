"""What a trace took from outside of its arguments for good: literals, and the default dtype.

`torch.tensor([1., 2.], device="cuda")` is traced as a CPU tensor, a copy of it and a transfer,
which a graph would replay from memory that may be gone. So tensors made from literals become inputs
that are made once. Where nothing writes into the copy, the chain is folded to its result; else the
copy stays, and copies the constant. Dtypes that ops took from torch's default, which may be another
one at replay, are written out.
"""

from __future__ import annotations

import torch
from torch import fx

from fngraph.errors import AmbientError
from fngraph.fx.nodes import is_op, is_tensor, line_of, operands, storages_written
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
COPIES = {aten.lift_fresh_copy.default, aten.lift_fresh.default, aten._to_copy.default,
           aten.clone.default, aten.detach.default, aten.alias.default}  # fmt: skip


@torch.inference_mode(False)
def hoist(gm: fx.GraphModule) -> dict[str, torch.Tensor]:
    """Fold copies of constants in place; returns node name to value, one a get_attr node."""
    mutated = storages_written(gm.graph.nodes)
    values: dict[fx.Node, torch.Tensor] = {}
    for node in list(gm.graph.nodes):
        if node.op == "get_attr":
            values[node] = getattr(gm, str(node.target)).detach().clone()
            continue
        source = node.args[0] if node.args else None
        if (
            node.target in COPIES
            and isinstance(source, fx.Node)
            and source in values
            and storage_key(node.meta["val"]) not in mutated
        ):
            fake = node.meta["val"]
            with gm.graph.inserting_before(node):
                folded = gm.graph.get_attr(str(source.target))
            folded.meta = dict(node.meta)
            values[folded] = values[source].to(fake.dtype).reshape(fake.shape)
            node.replace_all_uses_with(folded)
            gm.graph.erase_node(node)
    for node in reversed(list(values)):
        if not node.users:
            gm.graph.erase_node(node)
            del values[node]
    gm.graph.lint()
    return {node.name: value for node, value in values.items()}


def pin(gm: fx.GraphModule, default: torch.dtype) -> None:
    """Give each op its dtype as an argument, in place.

    Args:
        default: the dtype that ops will find when they run.

    Raises:
        AmbientError: an op without such an argument took another default, set inside `forward`.
    """
    for node in gm.graph.nodes:
        if not is_op(node) or not is_tensor(node):
            continue
        value = node.meta["val"]
        if not value.is_floating_point() or _has_floats(node):
            continue
        names = [a.name for a in node.target._schema.arguments]
        if "dtype" in names[len(node.args) :]:
            if node.kwargs.get("dtype") is None:
                node.kwargs = {**node.kwargs, "dtype": value.dtype}
        elif value.dtype is not default and "dtype" not in names:
            raise AmbientError(
                f"{line_of(node)}: {node.target} makes {value.dtype} of integers, by a default "
                f"dtype that forward sets for itself. Say it: x.to({value.dtype})"
            )


def _has_floats(node: fx.Node) -> bool:
    dtypes = [x.meta["val"].dtype for x in operands(node)]
    return any(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
