"""Parallel projections as one product: q, k and v of one input, gate and up.

Their weights must lie side by side in the caller's own memory, each right behind the one before,
and so their biases, if they have any, or in fp8 the scales of their rows:
`fg.ops.lay_side_by_side(params)` lays a tree out so. Then they are read as one matrix and one
vector where they lie, and results are slices of one result. A scale for all of a weight is no row.
Weights that lie apart stay as they are, and a note says so: no second copy is made of them.

The graph holds all the weights, and the op looks where they are whenever it is recorded or called,
so that weights that were moved apart later are an `AddressError` and nothing else.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.fx.leaves import Role
from fngraph.fx.nodes import flat, is_tensor, line_of, name_of
from fngraph.passes.pattern import insert, sizes, writes_any
from fngraph.passes.running.checks import Rewritten
from fngraph.passes.running.layouts import ANY_STRIDES, takes_any_strides
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_OPS = torch.ops.fngraph
_VIEWS = (aten.view.default, aten._unsafe_view.default)


def merge_side_by_side(graph: fx.Graph) -> Rewritten:
    """Products `x @ w.t()` of one `x`, or `x @ w.t() + b`, or in fp8 with scales, whose weights,
    biases and scales are held leaves."""
    inputs: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        given = given_of(node)
        if given is not None:
            inputs.setdefault((given.x, given.kind), []).append(node)
    matches = 0
    tried: dict[Any, bool] = {}
    apart: list[str] = []
    notes: list[str] = []
    for products in inputs.values():
        if len(products) < 2:
            continue
        runs = [run for run in _runs(products) if len(run) > 1]
        if not runs:
            apart.append(_paths(products))
        for run in runs:
            why = why_not_one(graph, run, tried)
            if why is None:
                _merge(graph, run)
                matches += 1
            else:
                notes.append(f"{_paths(run)}: {why}")
    if apart:
        more = f", and {count(len(apart) - 1, 'other group')}" if len(apart) > 1 else ""
        notes.append(
            f"{apart[0]}{more}: they do not lie side by side in memory, or were traced without "
            "any. Lay them so: weights = fg.ops.lay_side_by_side(weights)"
        )
    return Rewritten(graph, matches, tuple(notes))


class Given(NamedTuple):
    """What a product reads.

    Attributes:
        x: (T, E).
        weight: (N, E), a held leaf.
        beside: held leaves that go with it, a bias (N,) or scales (N, 1); or nothing.
        kind: what products of one `x` must have in common.
    """

    x: fx.Node
    weight: fx.Node
    beside: tuple[fx.Node, ...]
    kind: Any


def given_of(node: fx.Node) -> Given | None:
    """What a node reads if it is a product by a held weight, and by what is held beside it."""
    given: Any
    if node.target is aten.mm.default:
        x, turned = node.args
        given = x, turned, (), "mm"
    elif node.target is aten.addmm.default and not node.kwargs:
        bias, x, turned = node.args
        given = x, turned, (bias,), "addmm"
    elif node.target is _OPS.scaled_linear.default:
        x, x_scale, weight, scale, dtype = node.args[:5]
        kind = ("fp8", lies_at(x_scale) or x_scale, dtype)
        return Given(x, weight, (scale,), kind) if _are_held((weight, scale), 2) else None  # type: ignore[arg-type]
    else:
        return None
    x, turned, beside, kind = given
    if not isinstance(turned, fx.Node) or turned.target is not aten.t.default:
        return None
    held = _are_held(turned.args[:1], 2) and _are_held(beside, 1)
    return Given(x, turned.args[0], beside, kind) if held else None  # type: ignore[arg-type]


def lies_at(x: Any) -> Any:
    """Where a held leaf lies; None: it is another value, or was traced without memory."""
    leaf = x.meta.get("leaf")
    return None if leaf is None or leaf.role is not Role.HELD else leaf.lies


def _are_held(nodes: Sequence[Any], dims: int) -> bool:
    return all(_is_held(x, dims) for x in nodes)


def _is_held(x: Any, dims: int) -> bool:
    leaf = x.meta.get("leaf")
    return leaf is not None and leaf.role is Role.HELD and len(leaf.spec.shape) == dims


def _product(node: fx.Node) -> Given:
    given = given_of(node)
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


def runs_of(
    graph: fx.Graph, products: Sequence[fx.Node], tried: dict[Any, bool]
) -> list[list[fx.Node]]:
    """Products of one input, those in one list that can be one; all others are alone in theirs.

    Args:
        tried: see `why_not_one`.
    """
    runs = _runs([node for node in products if given_of(node) is not None])
    runs = [run for run in runs if len(run) > 1 and why_not_one(graph, run, tried) is None]
    merged = {node for run in runs for node in run}
    return [*runs, *([node] for node in products if node not in merged)]


def _follow(a: Given, b: Given) -> bool:
    """Whether the weight of `b`, and what goes with it, lie right behind those of `a`."""
    pairs = zip((a.weight, *a.beside), (b.weight, *b.beside), strict=True)
    return all(follows(x.meta["leaf"], y.meta["leaf"]) for x, y in pairs)


def follows(a: Any, b: Any) -> bool:
    """Whether one leaf lies right behind another, as rows of one matrix do."""
    if a.lies is None or b.lies is None:
        return False
    dense = all(leaf.spec.stride == (*leaf.spec.shape[1:], 1) for leaf in (a, b))
    alike = a.spec.dtype == b.spec.dtype and a.spec.shape[1:] == b.spec.shape[1:]
    plain = not any((*a.spec.bits, *b.spec.bits))
    return dense and alike and plain and b.lies == (a.lies[0], a.lies[1] + a.nbytes)


def why_not_one(graph: fx.Graph, run: Sequence[fx.Node], tried: dict[Any, bool]) -> str | None:
    """Why these products cannot be one; None: they can.

    Args:
        tried: whether the views of products such as these can be made; it grows.
    """
    returned = {storage_key(n.meta["val"]) for n in graph.output_node().all_input_nodes}
    if any(storage_key(node.meta["val"]) in returned for node in run):
        return "forward returns one of the products, which must be memory of its own"
    for product in run:
        if (reader := _goes_by_layout(product)) is not None:
            return (
                f"{name_of(reader)} ({line_of(reader)}) reads a result, and may go by how that "
                f"lies. {ANY_STRIDES}"
            )
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


def _goes_by_layout(product: fx.Node) -> fx.Node | None:
    """What reads a product, or memory of it, and may compute otherwise where that lies otherwise:
    an op of the user's, a loop, `as_strided`; or None."""
    own = storage_key(product.meta["val"])
    seen, left = {product}, [product]
    while left:
        for user in left.pop().users:
            if user.op != "call_function" or user in seen:
                continue
            seen.add(user)
            if user.target is not operator.getitem and not takes_any_strides(user.target):
                return user
            if any(storage_key(x) == own for x in flat(user.meta.get("val"))
                   if isinstance(x, torch.Tensor)):  # fmt: skip
                left.append(user)
    return None


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
    made = run[0].meta["val"]
    return made.new_empty(made.shape[0], _spans(run)[-1][1])


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
    given = [_product(node) for node in run]
    weights, beside = [one.weight for one in given], [x for one in given for x in one.beside]
    args: tuple[Any, ...] = (given[0].x, weights, beside)
    op = _OPS.linear_side_by_side.default
    if first.target is _OPS.scaled_linear.default:
        scales = list(dict.fromkeys(node.args[1] for node in run))
        args = (given[0].x, scales, weights, beside, first.args[4])
        op = _OPS.scaled_linear_side_by_side.default
    put_for(graph, insert(graph, first, op, args), run)


def put_for(graph: fx.Graph, whole: fx.Node, run: Sequence[fx.Node]) -> None:
    """Let all that reads these products read columns of `whole`, which stands before them."""
    first = min(run)
    for node, span in zip(run, _spans(run)):
        part = whole
        if len(run) > 1:
            part = insert(graph, first, aten.slice.Tensor, (whole, 1, *span))
        part.meta["stack_trace"] = node.meta.get("stack_trace", "forward")
        part.meta["val"] = node.meta["val"]  # for who looks before values are worked out anew
        node.replace_all_uses_with(part)
    for node in run:
        turned: Any = node.args[-1]  # of a product in fp8 a dtype
        graph.erase_node(node)
        if is_tensor(turned) and not turned.users:
            graph.erase_node(turned)
