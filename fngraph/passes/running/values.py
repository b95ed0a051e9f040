"""Values of the nodes that a pass has made, and of those that read memory laid out anew.

A value is what the op gives for fakes. Layers repeat, and an op takes a millisecond or more over
sizes in symbols: one that was asked for the same layouts before is not run again, but has its
result made again in its own memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.errors import PassError
from fngraph.fx.blocks.fakes import fakes_like
from fngraph.fx.nodes import line_of
from fngraph.passes.running.checks import first_other
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import tree_leaves
from fngraph.torch_facts.tracing import FakeTensor

Known = dict[Any, tuple[list[torch.Tensor], Any]]
"""By op, constants and layouts of its arguments: tensors that it was given, and what it gave."""


def complete(
    name: str, graph: fx.Graph, stays: dict[fx.Node, fx.Node], touched: Collection[fx.Node],
    edited: Collection[fx.Node], known: Known,
) -> None:  # fmt: skip
    """Give new nodes a `val` and a line; a node that was edited in place, reads others than it did,
    or memory that is laid out anew, is worked out again, and one that is another op is none of
    `stays` any more.

    What a pass has said of a new node's value is asked of its op: it stays where it is so, for it
    is the memory that others read.

    Args:
        name: the pass, for errors.
        stays: nodes that were there before, and which.
        touched: those of them that have other arguments now.
        edited: those of them that are another op.
        known: what ops gave; it grows.
    """
    again: set[fx.Node] = set()
    others = set(touched)
    line = "forward"
    for node in graph.nodes:
        line = node.meta.setdefault("stack_trace", line)
        if node.op != "call_function":
            continue
        reads_other = bool(again) and not again.isdisjoint(node.all_input_nodes)
        if node in stays and node not in others and not reads_other:
            continue
        try:
            gave = _gave(node, known)
        except Exception as error:  # whatever an op raises for arguments that it cannot take
            why = _why(name, node, stays, error)
            raise PassError(f"{line_of(node)}: {why}") from error
        before = node.meta.get("val")
        if before is None or not _alike(before, gave):
            node.meta["val"] = gave.value if gave.is_own else fakes_like(gave.value, gave.memory)
            again.add(node)
    for node in edited:
        del stays[node]


def _why(name: str, node: fx.Node, stays: Mapping[fx.Node, fx.Node], error: Exception) -> str:
    """Why a call cannot be: of its own, or of what it reads now."""
    text = str(error)
    if type(error).__name__ == "UnsupportedOperatorException":
        text = "it has no form for fakes. Give it one: torch.library.register_fake"
    if node in stays and any(x not in stays for x in node.all_input_nodes):
        where = first_other(stays)
        said = f"{node.target} cannot read what the pass {name!r} has put before it: {text}"
        return f"{said}. {where}".strip()
    return f"the pass {name!r} has put {node.target} there, which cannot be: {text}"


def _constants(node: fx.Node) -> str:
    return str(fx.map_arg((node.args, dict(node.kwargs)), lambda x: "%"))


class Gave(NamedTuple):
    """What an op gave, for a node or for one that was alike.

    Attributes:
        memory: by storages that the op was given then, what this node is given in its place.
        is_own: whether it was for this node.
    """

    value: Any
    memory: dict[int, torch.Tensor]
    is_own: bool


def _gave(node: fx.Node, known: Known) -> Gave:
    read: list[Any] = []

    def value_of(x: fx.Node) -> Any:
        read.append(x.meta["val"])
        return read[-1]

    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), value_of)
    given = [x for x in tree_leaves(read) if isinstance(x, torch.Tensor)]
    plain = all(type(x) is FakeTensor and not (x.is_conj() or x.is_neg()) for x in given)
    key = (node.target, _constants(node), _told(read)) if plain else None
    if key in known:
        then, value = known[key]
        return Gave(value, dict(zip(map(storage_key, then), given)), False)
    with contextlib.nullcontext() if given else _fakes_of(node.graph):  # of sizes alone, or none
        value = node.target(*args, **kwargs)  # type: ignore[operator]
    if key is not None:
        known[key] = given, value
    return Gave(value, {storage_key(x): x for x in given}, True)


def _fakes_of(graph: fx.Graph) -> Any:
    """The mode under which what makes a tensor of none makes a fake, as those of the graph are."""
    for node in graph.nodes:
        if isinstance(value := node.meta.get("val"), FakeTensor):
            return value.fake_mode
    return contextlib.nullcontext()


def _told(values: Any) -> tuple[Any, ...]:
    """What an op goes by: layouts, and which tensors share memory; sizes; all else as text."""
    storages: dict[int, int] = {}
    told: list[Any] = []
    for x in tree_leaves(values):
        if isinstance(x, torch.Tensor):
            number = storages.setdefault(storage_key(x), len(storages))
            told.append((number, x.requires_grad, *_layout(x)))
        else:
            told.append(x.node.expr if isinstance(x, torch.SymInt) else repr(x))
    return tuple(told)


def _alike(before: Any, gave: Gave) -> bool:
    """Whether a value is as it was: its layout, and what memory it shares with what it reads."""
    old, new = ([x for x in tree_leaves(v) if torch.is_tensor(x)] for v in (before, gave.value))
    if len(old) != len(new) or any(_layout(a) != _layout(b) for a, b in zip(old, new)):
        return False
    now = {then: storage_key(given) for then, given in gave.memory.items()}
    theirs = set(now.values())
    for a, b in zip(old, new):
        read = now.get(storage_key(b))
        if storage_key(a) != read if read is not None else storage_key(a) in theirs:
            return False
    return True


def _layout(x: torch.Tensor) -> tuple[Any, ...]:
    numbers = (*x.shape, *x.stride(), x.storage_offset())
    return x.dtype, x.device, *(n if isinstance(n, int) else n.node.expr for n in numbers)
