"""Graph surgery: put the ops of a chain into their in-place forms, and keep every fake truthful."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from fngraph.fx import twins
from fngraph.fx.chains import Hop
from fngraph.fx.leaves import same_place
from fngraph.fx.liveness import Memory, keys
from fngraph.fx.schemas import written

aten = torch.ops.aten


def rewrite(chain: Sequence[Hop], buffer: fx.Node, memory: Memory) -> None:
    """Put each op of a chain into its in-place form. The chain has been checked."""
    (home,) = keys(buffer)
    became: dict[fx.Node, fx.Node] = {}
    for hop in chain:
        if hop.how == "alias":
            continue  # it follows what it views
        node, (key,) = hop.node, keys(hop.node)
        with node.graph.inserting_before(node):
            if hop.operand is not None:
                into = became.get(hop.operand, hop.operand)
            else:
                into = _start(buffer, node, memory)
            _write(hop, into, memory)
        node.replace_all_uses_with(into)
        became[node] = into
        memory.members[key].remove(node)
        node.graph.erase_node(node)
        _follow(key, home, memory)
    for hop in chain:
        node = hop.node
        if hop.how == "alias" and same_place(node.meta["val"], buffer.meta["val"]):
            node.replace_all_uses_with(buffer)  # or a view would cross from piece to piece
            if not mutates(node):
                memory.members[home].remove(node)
                node.graph.erase_node(node)


def _start(buffer: fx.Node, node: fx.Node, memory: Memory) -> fx.Node:
    """The buffer as a node of the shape of `node`."""
    value = view_as(buffer, node)
    assert value is not None
    if value is buffer.meta["val"]:
        return buffer
    return _insert(aten.view.default, (buffer, list(value.shape)), {}, value, node, memory)


def _write(hop: Hop, into: fx.Node, memory: Memory) -> None:
    """Insert the in-place form of an op: it writes `into`."""
    node, value = hop.node, into.meta["val"]
    op, args, kwargs = _form(hop, into)
    if hop.how == "scatter":
        region = _insert(op, args, kwargs, scatter_region(node, value), node, memory)
        op, args, kwargs = aten.copy_.default, (region, bound(node)["src"]), {}
        value = region.meta["val"]
    if op is not None:
        _insert(op, args, kwargs, value, node, memory)


def _form(hop: Hop, into: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    op: Any = hop.node.target
    args, kwargs = hop.node.args, hop.node.kwargs
    if hop.how == "same":
        return None, (), {}
    if hop.how == "twin":
        return twins.in_place(op), args, dict(kwargs)
    if hop.how == "scatter":
        rest = {k: v for k, v in bound(hop.node).items() if k not in ("self", "src")}
        return twins.scattered_view(op), (into,), rest
    if op in twins.COPIES:
        return aten.copy_.default, (into, args[0]), {}
    if (fill := twins.fill_form(op)) is not None:
        value = bound(hop.node).get("fill_value")
        shape = list(into.meta["val"].shape)
        return fill, (shape,) if value is None else (shape, value), {"out": into}
    twin, name = twins.out_form(op)  # type: ignore[misc]
    taken = {a.name for a in twin._schema.arguments}
    return twin, args, {**{k: v for k, v in kwargs.items() if k in taken}, name: into}


def _insert(op: Any, args: Any, kwargs: Any, value: Any, model: fx.Node, memory: Memory) -> fx.Node:
    made = model.graph.call_function(op, args, kwargs)
    made.meta = {k: v for k, v in model.meta.items() if k != "tensor_meta"} | {"val": value}
    memory.add(made, memory.at[model])
    return made


def _follow(key: int, home: int, memory: Memory) -> None:
    """Bring the views of a value that has moved up to date: they are views of the buffer now."""
    for node in sorted(memory.members[key], key=memory.at.__getitem__):
        if node.target is not operator.getitem and mutates(node):
            into = written(node.target, node.args, node.kwargs)
            node.meta["val"] = next(a.meta["val"] for a in into if home in keys(a))
        else:
            node.meta["val"] = rerun(node, {})
    memory.move(key, home)


# --- fakes ----------------------------------------------------------------------------------------


def bound(node: fx.Node) -> dict[str, Any]:
    """An op's arguments by name."""
    names = [a.name for a in node.target._schema.arguments]  # type: ignore[union-attr]
    return dict(zip(names, node.args)) | dict(node.kwargs)


def rerun(node: fx.Node, places: dict[fx.Node, torch.Tensor]) -> Any:
    """What a view would be if its arguments were as in `places`."""
    return _fake(node.target, node.args, node.kwargs, places)


def scatter_region(node: fx.Node, base: torch.Tensor) -> torch.Tensor:
    """The view of `base` into which a scatter op copies."""
    arguments = {k: v for k, v in bound(node).items() if k not in ("self", "src")}
    return _fake(twins.scattered_view(node.target), (base,), arguments, {})  # type: ignore[arg-type]


def _fake(op: Any, args: Any, kwargs: Any, places: dict[fx.Node, torch.Tensor]) -> Any:
    args, kwargs = fx.map_arg((args, kwargs), lambda n: places.get(n, n.meta["val"]))
    with torch.inference_mode(False), enable_python_dispatcher():
        return op(*args, **kwargs)


def view_as(buffer: fx.Node, node: fx.Node) -> torch.Tensor | None:
    """The buffer in the shape of a node's value, if their elements are in the same order."""
    old, new = buffer.meta["val"], node.meta["val"]
    if old.dtype != new.dtype or old.device != new.device:
        return None
    if all(isinstance(n, int) for n in new.shape) and old.numel() == new.numel():
        if old.shape == new.shape:
            return old
        if old.is_contiguous() and new.is_contiguous():
            return aten.view.default(old, new.shape)
    return None


def mutates(node: fx.Node) -> bool:
    """Whether an op writes any of its arguments."""
    return bool(node.target._schema.is_mutable)  # type: ignore[union-attr]
