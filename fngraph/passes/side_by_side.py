"""Parallel projections as one product: q, k and v of one input, gate and up.

Their weights must lie side by side in the caller's own memory, each right behind the one before:
`fg.ops.lay_side_by_side(params)` lays a tree out so. Then they are read as one matrix where they
lie, and results are slices of one result. Weights that lie apart stay as they are, and a note says
so: no second copy is made of them.

The graph holds all the weights, and the op looks where they are whenever it is recorded or called,
so that weights that were moved apart later are an `AddressError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.fx.leaves import Role
from fngraph.fx.nodes import is_tensor
from fngraph.passes.frame import Rewritten
from fngraph.passes.pattern import insert, sizes, writes_any
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def merge_side_by_side(graph: fx.Graph) -> Rewritten:
    """Products `x @ w.t()` of one `x`, whose weights are held leaves."""
    inputs: dict[fx.Node, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is aten.mm.default and _weight(node) is not None:
            inputs.setdefault(node.args[0], []).append(node)
    matches = 0
    tried: dict[Any, bool] = {}
    apart: list[str] = []
    notes: list[str] = []
    for products in inputs.values():
        if len(products) < 2:
            continue
        runs = [run for run in _runs(products) if len(run) > 1]
        if not runs:
            apart.append(", ".join(_leaf(node).path for node in products))
        for run in runs:
            why = _why_not(graph, run, tried)
            if why is None:
                _merge(graph, run)
                matches += 1
            else:
                notes.append(f"{', '.join(_leaf(node).path for node in run)}: {why}")
    if apart:
        more = f", and {count(len(apart) - 1, 'other group')}" if len(apart) > 1 else ""
        notes.append(
            f"{apart[0]}{more}: they do not lie side by side in memory, or were traced without "
            "any. Lay them so: params = fg.ops.lay_side_by_side(params)"
        )
    return Rewritten(graph, matches, tuple(notes))


def _weight(product: fx.Node) -> fx.Node | None:
    """The leaf of a product's weight, a held matrix (out, in)."""
    turned = product.args[1]
    if not isinstance(turned, fx.Node) or turned.target is not aten.t.default:
        return None
    weight: Any = turned.args[0]
    leaf = weight.meta.get("leaf")
    return weight if leaf is not None and leaf.role is Role.HELD else None


def _leaf(product: fx.Node) -> Any:
    weight = _weight(product)
    assert weight is not None
    return weight.meta["leaf"]


def _runs(products: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Products in the order of their weights in memory, cut where one is not right behind one."""
    placed = sorted((node for node in products if _leaf(node).lies is not None), key=_place)
    runs: list[list[fx.Node]] = []
    for node in placed:
        if runs and _follows(_leaf(runs[-1][-1]), _leaf(node)):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _place(product: fx.Node) -> tuple[int, int]:
    place: tuple[int, int] = _leaf(product).lies
    return place


def _follows(a: Any, b: Any) -> bool:
    dense = all(leaf.spec.stride == (leaf.spec.shape[1], 1) for leaf in (a, b))
    alike = a.spec.dtype == b.spec.dtype and a.spec.shape[1] == b.spec.shape[1]
    plain = not any((*a.spec.bits, *b.spec.bits))
    return dense and alike and plain and b.lies == (a.lies[0], a.lies[1] + a.nbytes)


def _why_not(graph: fx.Graph, run: Sequence[fx.Node], tried: dict[Any, bool]) -> str | None:
    """Why these products cannot be one; None: they can.

    Args:
        tried: whether the views of products such as these can be made; it grows.
    """
    (output,) = (n for n in graph.nodes if n.op == "output")
    returned = {storage_key(n.meta["val"]) for n in output.all_input_nodes}
    if any(storage_key(node.meta["val"]) in returned for node in run):
        return "forward returns one of the products, which must be memory of its own"
    read = {storage_key(x.meta["val"]) for node in run for x in node.all_input_nodes}
    node, last = min(run), max(run)
    while node is not last:
        if writes_any(node, read):
            return "the input is written between one product and another"
        node = node.next
    views = tuple(map(_views, run))  # those of all layers are alike
    if views not in tried:
        tried[views] = _can_be_viewed(run)
    return None if tried[views] else "a result is viewed as only a product of its own can be"


def _views(node: fx.Node) -> tuple[Any, ...]:
    """What is known of a product, and of the views that are made of it."""
    made = [(user.target, sizes(user), _views(user)) for user in node.users if _is_view(user)]
    return node.meta["val"].dtype, sizes(node), tuple(made)


def _is_view(node: fx.Node) -> bool:
    return node.target in _VIEWS


def _can_be_viewed(run: Sequence[fx.Node]) -> bool:
    try:
        whole = _whole(run)
        for node, (start, end) in zip(run, _spans(run)):
            _look(node, aten.slice.Tensor(whole, 1, start, end))
    except Exception:  # whatever torch raises where a view cannot be
        return False
    return True


def _whole(run: Sequence[fx.Node]) -> Any:
    given = run[0].args[0].meta["val"]  # type: ignore[union-attr]
    return given.new_empty(given.shape[0], _spans(run)[-1][1])


def _look(node: fx.Node, value: Any) -> None:
    """Try the views that are made of a product, on `value`."""
    for user in node.users:
        if _is_view(user):
            made = user.target(value, *_values(user.args[1:]))  # type: ignore[operator]
            _look(user, made)


def _values(args: Any) -> Any:
    return fx.map_arg(args, lambda x: x.meta["val"])


def _spans(run: Sequence[fx.Node]) -> list[tuple[int, int]]:
    spans, end = [], 0
    for node in run:
        start, end = end, end + int(node.meta["val"].shape[1])
        spans.append((start, end))
    return spans


def _merge(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    first = min(run)
    weights = [_weight(node) for node in run]
    op = torch.ops.fngraph.linear_side_by_side.default
    whole = insert(graph, first, op, (first.args[0], weights))
    parts = [insert(graph, first, aten.slice.Tensor, (whole, 1, *span)) for span in _spans(run)]
    for node, part in zip(run, parts):
        turned = node.args[1]
        part.meta["stack_trace"] = node.meta.get("stack_trace", "forward")
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        if is_tensor(turned) and not turned.users:  # type: ignore[union-attr]
            graph.erase_node(turned)  # type: ignore[arg-type]
