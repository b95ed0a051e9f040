"""No-op elimination: what gives back the bits that it was given, in memory that nobody can tell.

- A view that is its base: the same elements of the same memory in the same order, whatever op says
  so (`alias`, a slice over all, `expand` to the same shape, two transposes). All that reads it
  reads the base.
- A view of a view: one view. Where both can be, so can it be, however their base lies.
- A view that was made before, of the same value by the same arguments.
- A copy (`clone`, a cast to the dtype that it has) of the same layout, where neither it nor what it
  is a copy of is written from then on, nor is a leaf, nor is returned.

Nothing is computed otherwise, so outputs are equal bit for bit. `x + 0` stays: it makes 0 of -0;
and `x * 1`, which may change a NaN's bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_op, is_tensor, mutates, storages_written
from fngraph.fx.schemas import COPIES
from fngraph.passes.pattern import sizes, strides
from fngraph.passes.running.checks import Rewritten
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.schemas import is_view

aten = torch.ops.aten
_RESHAPES = (aten.view.default, aten._unsafe_view.default)


def drop_no_ops(graph: fx.Graph) -> Rewritten:
    """The graph without ops that do nothing."""
    gone = 0
    for node in list(graph.nodes):
        if (
            node.op == "call_function"
            and node.users
            and (same := _same_as(graph, node)) is not None
        ):
            node.replace_all_uses_with(same)
            graph.erase_node(node)
            gone += 1
    for node in list(graph.nodes):
        gone += _straightened(graph, node)
    made: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if not _makes_a_view(node):
            continue
        key = node.target, str(node.args), str(node.kwargs)
        if made.setdefault(key, node) is not node:
            node.replace_all_uses_with(made[key])
            graph.erase_node(node)
            gone += 1
    for node in reversed(graph.nodes):
        if not node.users and _makes_a_view(node):
            graph.erase_node(node)
    return Rewritten(graph, gone)


def _makes_a_view(node: fx.Node) -> bool:
    view = is_op(node) and (is_view(node.target) or node.target in _RESHAPES)
    return view and is_tensor(node) and is_tensor(node.args[0]) and not _is_marked(node)


def _same_as(graph: fx.Graph, node: fx.Node) -> fx.Node | None:
    """What a node is the same as, if it does nothing."""
    if _makes_a_view(node):
        base = node
        while _makes_a_view(base):
            base = base.args[0]  # type: ignore[assignment]
            if _lies_as(node, base):
                return base
    elif node.target in COPIES and is_tensor(node.args[0]) and not _is_marked(node):
        x: fx.Node = node.args[0]  # type: ignore[assignment]
        if _looks_as(node, x) and _nobody_can_tell(graph, node, x):
            return x
    return None


def _is_marked(node: fx.Node) -> bool:
    return bool(node.meta.get("custom"))


def _looks_as(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    bits = x.is_conj() == y.is_conj() and x.is_neg() == y.is_neg()
    alike = x.dtype == y.dtype and x.device == y.device and sizes(a) == sizes(b)
    strided = zip(sizes(a), strides(a), strides(b))
    return bits and alike and all(n == 1 or s == t for n, s, t in strided)


def _lies_as(a: fx.Node, b: fx.Node) -> bool:
    x, y = a.meta["val"], b.meta["val"]
    if storage_key(x) != storage_key(y) or not _looks_as(a, b):
        return False
    starts = x.storage_offset(), y.storage_offset()
    return len({n if isinstance(n, int) else n.node.expr for n in starts}) == 1


def _nobody_can_tell(graph: fx.Graph, copy: fx.Node, x: fx.Node) -> bool:
    own, given = storage_key(copy.meta["val"]), storage_key(x.meta["val"])
    kept = {storage_key(n.meta["val"]) for n in graph.nodes if n.op in ("placeholder", "get_attr")}
    kept |= {storage_key(n.meta["val"]) for n in graph.output_node().all_input_nodes}
    if {own, given} & kept:
        return False
    after = False
    for node in graph.nodes:
        after = after or node is copy
        if "as_strided" in str(node.target):  # which asks for places in the memory of its own
            return False
        if not is_op(node):
            if node.op == "call_function" and after and _is_opaque(node):
                return False
            continue
        written = storages_written([node]) if mutates(node) else set()
        if after and written & {own, given}:
            return False
    return True


def _is_opaque(node: fx.Node) -> bool:
    """Whether nothing says what a node writes: a higher-order op."""
    return any(map(is_tensor, node.all_input_nodes)) and not is_tensor(node)


def _straightened(graph: fx.Graph, node: fx.Node) -> bool:
    """Make a view of a view one view."""
    if node.op != "call_function" or node.target not in _RESHAPES or _is_marked(node):
        return False
    through = node.args[0]
    if not isinstance(through, fx.Node) or through.target not in _RESHAPES or _is_marked(through):
        return False
    base = through.args[0]
    node.target = aten.view.default
    node.update_arg(0, base)
    if not through.users:
        graph.erase_node(through)
    return True
