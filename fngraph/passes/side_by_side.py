"""Parallel projections as one product: q, k and v of one input, gate and up.

Their weights must lie side by side in the caller's own memory, each right behind the one before,
and their biases too, if they have any: `fg.ops.lay_side_by_side(params)` lays a tree out so. Then
they are read as one matrix and one vector where they lie, and results are slices of one result.
Weights that lie apart stay as they are, and a note says so: no second copy is made of them.

The graph holds all the weights, and the op looks where they are whenever it is recorded or called,
so that weights that were moved apart later are an `AddressError` and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.fx.leaves import Role
from fngraph.fx.nodes import is_tensor
from fngraph.passes.frame import Rewritten
from fngraph.passes.pattern import insert, writes_any
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def merge_side_by_side(graph: fx.Graph) -> Rewritten:
    """Products `x @ w.t()` of one `x`, or `x @ w.t() + b`, whose weights and biases are held
    leaves."""
    inputs: dict[tuple[fx.Node, bool], list[fx.Node]] = {}
    for node in graph.nodes:
        given = _given(node)
        if given is not None:
            inputs.setdefault((given.x, given.bias is None), []).append(node)
    matches = 0
    apart: list[str] = []
    notes: list[str] = []
    for products in inputs.values():
        if len(products) < 2:
            continue
        runs = [run for run in _runs(products) if len(run) > 1]
        if not runs:
            apart.append(_paths(products))
        for run in runs:
            why = _why_not(graph, run)
            if why is None:
                _merge(graph, run)
                matches += 1
            else:
                notes.append(f"{_paths(run)}: {why}")
    if apart:
        more = f", and {count(len(apart) - 1, 'other group')}" if len(apart) > 1 else ""
        notes.append(
            f"{apart[0]}{more}: they do not lie side by side in memory, or were traced without "
            "any. Lay them so: params = fg.ops.lay_side_by_side(params)"
        )
    return Rewritten(graph, matches, tuple(notes))


class Given(NamedTuple):
    """What a product reads: `x` (T, E), and held leaves (N, E) and, if it has one, (N,)."""

    x: fx.Node
    weight: fx.Node
    bias: fx.Node | None


def _given(node: fx.Node) -> Given | None:
    """What a node reads if it is a product by a held weight, and by a held bias or none."""
    if node.target is aten.mm.default:
        bias, (x, turned) = None, node.args
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, turned = node.args
        if not _is_held(bias, 1):
            return None
    else:
        return None
    if not isinstance(turned, fx.Node) or turned.target is not aten.t.default:
        return None
    return Given(x, turned.args[0], bias) if _is_held(turned.args[0], 2) else None  # type: ignore[arg-type]


def _is_held(x: Any, dims: int) -> bool:
    leaf = x.meta.get("leaf")
    return leaf is not None and leaf.role is Role.HELD and len(leaf.spec.shape) == dims


def _product(node: fx.Node) -> Given:
    given = _given(node)
    assert given is not None
    return given


def _leaf(product: fx.Node) -> Any:
    return _product(product).weight.meta["leaf"]


def _paths(products: Sequence[fx.Node]) -> str:
    return ", ".join(_leaf(node).path for node in products)


def _runs(products: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Products in the order of their weights in memory, cut where one is not right behind one."""
    placed = sorted((node for node in products if _leaf(node).lies is not None), key=_place)
    runs: list[list[fx.Node]] = []
    for node in placed:
        if runs and _follow(_product(runs[-1][-1]), _product(node)):
            runs[-1].append(node)
        else:
            runs.append([node])
    return runs


def _place(product: fx.Node) -> tuple[int, int]:
    place: tuple[int, int] = _leaf(product).lies
    return place


def _follow(a: Given, b: Given) -> bool:
    """Whether the weight and the bias of `b` lie right behind those of `a`."""
    if not _follows(a.weight.meta["leaf"], b.weight.meta["leaf"]):
        return False
    if a.bias is None or b.bias is None:
        return a.bias is b.bias
    return _follows(a.bias.meta["leaf"], b.bias.meta["leaf"])


def _follows(a: Any, b: Any) -> bool:
    if a.lies is None or b.lies is None:
        return False
    dense = all(leaf.spec.stride == (*leaf.spec.shape[1:], 1) for leaf in (a, b))
    alike = a.spec.dtype == b.spec.dtype and a.spec.shape[1:] == b.spec.shape[1:]
    plain = not any((*a.spec.bits, *b.spec.bits))
    return dense and alike and plain and b.lies == (a.lies[0], a.lies[1] + a.nbytes)


def _why_not(graph: fx.Graph, run: Sequence[fx.Node]) -> str | None:
    """Why these products cannot be one; None: they can."""
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
    try:
        whole = _whole(run)
        for node, (start, end) in zip(run, _spans(run)):
            _look(node, aten.slice.Tensor(whole, 1, start, end))
    except Exception:  # whatever torch raises where a view cannot be
        return "a result is viewed as only a product of its own can be"
    return None


def _whole(run: Sequence[fx.Node]) -> Any:
    given = _product(run[0]).x.meta["val"]
    return given.new_empty(given.shape[0], _spans(run)[-1][1])


def _look(node: fx.Node, value: Any) -> None:
    """Try the views that are made of a product, on `value`."""
    for user in node.users:
        if user.target in _VIEWS:
            _look(user, user.target(value, *_values(user.args[1:])))


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
    given = [_product(node) for node in run]
    biases = [one.bias for one in given if one.bias is not None]
    op = torch.ops.fngraph.linear_side_by_side.default
    whole = insert(graph, first, op, (given[0].x, [one.weight for one in given], biases))
    parts = [insert(graph, first, aten.slice.Tensor, (whole, 1, *span)) for span in _spans(run)]
    for node, part in zip(run, parts):
        turned = node.args[-1]
        part.meta["stack_trace"] = node.meta.get("stack_trace", "forward")
        node.replace_all_uses_with(part)
        graph.erase_node(node)
        if is_tensor(turned) and not turned.users:  # type: ignore[union-attr]
            graph.erase_node(turned)  # type: ignore[arg-type]
