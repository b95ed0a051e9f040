"""What a node of a traced graph says: its op, its value, its arguments, and the user's line."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import OpOverload
from fngraph.torch_facts.schemas import written

SIZES = (torch.SymInt, torch.SymBool, torch.SymFloat)
"""Types of the numbers that are made of T and R."""
_NESTS = (list, tuple, dict)
REFUSED = "fngraph.refused"
"""A mark on nodes of an op that a trace has refused: of its rows nothing more is asked."""


STAYS = "fngraph.stays"
"""A mark on nodes that nobody reads and that stay, for the error that they may raise."""


def line_of(node: fx.Node) -> str:
    """The user's line that a node comes from."""
    return node.meta.get("stack_trace", "forward")  # type: ignore[no-any-return]


def name_of(node: fx.Node) -> str:
    """An op as messages call it, "aten.mm.default", "fg.scan"; one of its results as itself."""
    if node.target is operator.getitem and isinstance(source := node.args[0], fx.Node):
        return name_of(source)
    return str(node.target)


def is_op(node: fx.Node) -> bool:
    """Whether a node calls an op of torch's dispatcher, and not arithmetic or one of its kin."""
    return isinstance(node.target, OpOverload)


def op_name(node: fx.Node) -> str:
    """`aten::sum` of a call of aten.sum.dim_IntList; "" of what calls no op."""
    return node.target._schema.name if is_op(node) else ""  # type: ignore[union-attr]


def inputs_of(graph: fx.Graph) -> list[fx.Node]:
    """A graph's placeholders, in order."""
    return graph.find_nodes(op="placeholder")


def results_of(graph: fx.Graph) -> Sequence[fx.Node]:
    """What a graph gives."""
    return graph.output_node().args[0]  # type: ignore[return-value]


def is_tensor(x: Any) -> bool:
    """Whether an argument is a node of a tensor."""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), torch.Tensor)


def is_size(x: Any) -> bool:
    """Whether an argument is a node of a number that is made of T and R."""
    return isinstance(x, fx.Node) and isinstance(x.meta.get("val"), SIZES)


def flat(x: Any) -> list[Any]:
    """What is in lists, tuples and dicts, such as an op's arguments are nested in; all else is
    itself. Torch's own looks for every kind of tree."""
    if not isinstance(x, _NESTS):
        return [x]
    found: list[Any] = []
    for item in x.values() if isinstance(x, dict) else x:
        if isinstance(item, _NESTS):
            found += flat(item)
        else:
            found.append(item)
    return found


def operands(node: fx.Node) -> list[fx.Node]:
    """The tensors among the arguments, in order, those in lists too; one that is twice, twice."""
    found: list[fx.Node] = []
    fx.map_arg(node.args, found.append)
    fx.map_arg(node.kwargs, found.append)
    return [x for x in found if is_tensor(x)]


def given_to(node: fx.Node, values: Mapping[fx.Node, Any]) -> tuple[Sequence[Any], dict[str, Any]]:
    """A node's arguments, with values in the places of nodes."""
    return fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)  # type: ignore[arg-type,return-value]


def computed(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """What a node's call gives where what it reads is these values."""
    args, kwargs = given_to(node, values)
    return node.target(*args, **kwargs)  # type: ignore[operator]


def is_loop(node: fx.Node) -> bool:
    """Whether a node is a loop or a choice: see `fngraph.fx.loops.node`."""
    return hasattr(node.target, "writes")


def is_loop_result(node: fx.Node) -> bool:
    """Whether a node is one of the results of a loop."""
    return node.target is operator.getitem and is_loop(node.args[0])  # type: ignore[arg-type]


def mutates(node: fx.Node) -> bool:
    """Whether a node's op writes any of its arguments."""
    if is_op(node):
        return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]
    return bool(written_by(node))


def written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node's op writes."""
    if is_op(node):
        return written(node.target, node.args, node.kwargs)
    return [node.args[i] for i in getattr(node.target, "writes", ())]  # type: ignore[misc]


def storages_written(nodes: Iterable[fx.Node]) -> set[int]:
    """The keys of the storages that nodes write."""
    return {storage_key(x.meta["val"]) for node in nodes for x in written_by(node)}
