"""Linear layers in fp8 with what is around them: fngraph::fused_linear_fp8.

    rounded(norm(x)) @ [w_q, w_k, w_v].t()         one op, whose results are slices of one
    silu(rounded(norm(x)) @ w_gate.t()) * (rounded(norm(x)) @ w_up.t()), rounded for w_down
    rounded(x) @ w_o.t() + residual

It is `linears` in fp8: for decoding, where each of these is one launch. An op rounds its input
itself where nobody else reads that rounded, by each row's own scale or by known ones that are one,
and then takes the norm before it along as well. A gate rounds its result where all that reads it
does so by one known scale. What is no match stays for the passes of rounding behind this one.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.fx.nodes import is_tensor, op_name
from fngraph.ops.fused_linear import MOST_WEIGHTS
from fngraph.passes.fp8.rounding import (
    BY_ROW,
    KNOWN,
    are_one,
    is_held,
    make_one,
    may_be_one,
    notes_of,
    unlike,
)
from fngraph.passes.linears import drop, lie_together, norm_before
from fngraph.passes.pattern import (
    Found,
    call,
    dtype_of,
    insert,
    is_dense,
    is_written_between,
    match,
    name,
    put,
    sizes,
)
from fngraph.passes.running.frame import Rewritten
from fngraph.passes.side_by_side import lies_at, put_for, why_not_one

aten = torch.ops.aten
_PRODUCT = torch.ops.fngraph.scaled_linear.default
_OP = torch.ops.fngraph.fused_linear_fp8.default
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _product(label: str) -> Any:
    given = [name(f"{label} {what}") for what in ("x", "scale", "weight", "weight scale")]
    return call(_PRODUCT, *given, name("dtype"), label=label)


_GATE = call(aten.mul, call(aten.silu, _product("one")), _product("two"))
_SUM = call(aten.add, _product("one"), name("more"))


def fuse_linears_fp8(graph: fx.Graph) -> Rewritten:
    """Gates, then sums, then what is left of one input; each takes the norm before it along."""
    made = [*_gates(graph), *_sums(graph), *_parallel(graph)]
    apart = _apart(made)
    for node in made:
        found = norm_before(node)
        if found is not None:
            _, weights, scales, _, by, more, out, _, _, *rest = node.args
            centred = "centred" in found.values
            node.args = (
                found["x"], weights, scales, found["weight"], by, more, out, found["eps"], centred,
                *rest,
            )  # fmt: skip
            drop(graph, found)
    return Rewritten(graph, len(made), notes_of(apart))


def _apart(made: Sequence[fx.Node]) -> list[str]:
    """Inputs that several of these ops round, by known scales that are not one."""
    inputs: dict[Any, list[Any]] = {}
    for node in made:
        x, scales = node.args[0], node.args[4]
        if dtype_of(x) in _DTYPES:
            inputs.setdefault(x, []).extend(scales)  # type: ignore[arg-type]
    return [unlike(x, scales) for x, scales in inputs.items() if not are_one(scales)]


def _gates(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        found = match(_GATE, node) if node.target is aten.mul.Tensor else None
        if found is None or not _are_ours(found["one"], found["two"]):
            continue
        run = [found["one"], found["two"]]
        if not sizes(run[0]) == sizes(run[1]) == sizes(node):  # dense, as products are
            continue
        input_ = _input_of(graph, run, node)
        if input_ is not None:
            readers = _rounded_behind(graph, node)
            scales = list(dict.fromkeys(reader.args[1] for reader in readers))
            new = insert(graph, node, _OP, _args(input_, run, None, scales, gated=True))
            new.meta["val"] = (readers or [node])[0].meta["val"]
            for reader in readers:
                reader.replace_all_uses_with(new)
                graph.erase_node(reader)
            _put(graph, found, new, input_)
            yield new


def _sums(graph: fx.Graph) -> Iterator[fx.Node]:
    for node in list(graph.nodes):
        found = match(_SUM, node) if node.target is aten.add.Tensor else None
        if found is None or not _are_ours(found["one"]) or not isinstance(found["more"], fx.Node):
            continue
        one, more = found["one"], found["more"]
        kinds = {dtype_of(more), dtype_of(node), dtype_of(one)}
        if len(kinds) == 1 and sizes(more) == sizes(node) == sizes(one) and is_dense(node):
            input_ = _input_of(graph, [one], node)
            if input_ is not None:
                new = insert(graph, node, _OP, _args(input_, [one], more))
                new.meta["val"] = node.meta["val"]
                _put(graph, found, new, input_)
                yield new


def _put(graph: fx.Graph, found: Found, new: fx.Node, input_: _Input) -> None:
    put(graph, found, new)
    _drop_unread(graph, input_)


def _parallel(graph: fx.Graph) -> Iterator[fx.Node]:
    """Other products by their input; several of them are slices of one result."""
    inputs: dict[Any, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.target is _PRODUCT and _are_ours(node):
            key = (*_way(node), node.args[4], len(sizes(node.args[3])))
            inputs.setdefault(key, []).append(node)
    tried: dict[Any, bool] = {}
    for products in inputs.values():
        while products:
            run, products = products[:MOST_WEIGHTS], products[MOST_WEIGHTS:]
            while len(run) > 1 and why_not_one(graph, run, tried) is not None:
                products.insert(0, run.pop())
            input_ = _input_of(graph, run, max(run))
            if input_ is None or (len(run) == 1 and not input_.roundings):
                continue
            first = min(run)
            new = insert(graph, first, _OP, _args(input_, run))
            put_for(graph, new, run)
            _drop_unread(graph, input_)
            yield new


def _are_ours(*products: fx.Node) -> bool:
    """Whether these are products by held weights and scales of one kind."""
    kinds = set()
    for node in products:
        weight, scale, dtype = node.args[2:5]
        if not is_held(weight) or not is_held(scale) or len(node.args) > 5:
            return False
        kinds.add((dtype, len(sizes(scale))))  # type: ignore[arg-type]
    return len(kinds) == 1 and kinds.pop()[0] in _DTYPES


def _args(
    input_: _Input, run: Sequence[fx.Node], more: Any = None, out_scales: Sequence[Any] = (),
    gated: bool = False,
) -> tuple[Any, ...]:  # fmt: skip
    weights: list[Any] = [node.args[2] for node in run]
    scales: list[Any] = [node.args[3] for node in run]
    rows = len(sizes(scales[0])) == 2
    together = rows and lie_together(weights) and lie_together(scales)
    return (
        input_.x, weights, scales, None, list(input_.scales), more, list(out_scales), 0.0, False,
        gated, run[0].args[4], True, together,
    )  # fmt: skip


# --- what products read ---------------------------------------------------------------------------


class _Input(NamedTuple):
    """What an op reads in the place of products.

    Attributes:
        x: (T, K), rounded already or not.
        scales: known ones.
        roundings: ops that rounded `x` for these products alone; none: `x` is rounded.
    """

    x: Any
    scales: Sequence[Any]
    roundings: Sequence[fx.Node]


def _rounding(product: fx.Node) -> fx.Node | None:
    """The op that rounds a product's input, and gives or has its scale."""
    values, by = product.args[:2]
    if not isinstance(values, fx.Node) or not isinstance(by, fx.Node):
        return None
    made: Any = values
    if values.target is by.target is operator.getitem:
        made = values.args[0]
        if op_name(made) != BY_ROW or [values.args, by.args] != [(made, 0), (made, 1)]:
            return None
    elif op_name(values) != KNOWN or values.args[1] is not by:
        return None
    return made if dtype_of(made.args[0]) in _DTYPES else None


def _way(product: fx.Node) -> tuple[Any, ...]:
    """What products whose input is one have in common."""
    made = _rounding(product)
    return product.args[:2] if made is None else _way_of(made)


def _way_of(made: fx.Node) -> tuple[Any, ...]:
    scales = made.args[1:]
    return (made.target, made.args[0], *(lies_at(x) or x for x in scales))


def _input_of(graph: fx.Graph, run: Sequence[fx.Node], until: fx.Node) -> _Input | None:
    """What an op at `until`, or before it, reads in the place of these products; None: they have no
    input that is one there."""
    if len({_way(node) for node in run}) > 1:
        return None
    roundings = list(dict.fromkeys(filter(None, map(_rounding, run))))
    if not roundings:
        return _Input(run[0].args[0], run[0].args[1:2], ())
    source: Any = roundings[0].args[0]
    alike = [y for y in source.users if op_name(y) == op_name(roundings[0])]
    alike = sorted(y for y in alike if _way_of(y) == _way_of(roundings[0]))
    ours = all(reader in run for y in alike for reader in _readers(y))
    if ours and not is_written_between((*alike, *sorted(run)), max(until, *run)):
        return _Input(source, list(dict.fromkeys(y for x in alike for y in x.args[1:])), alike)
    if len(roundings) > 1:
        same = {(y.target, *y.args) for y in roundings}
        if len(same) > 1 or not may_be_one(graph, roundings):
            return None
        make_one(graph, sorted(roundings))
    return _Input(run[0].args[0], run[0].args[1:2], ())


def _readers(rounding: fx.Node) -> list[fx.Node]:
    if op_name(rounding) == KNOWN:
        return list(rounding.users)
    return [user for item in rounding.users for user in item.users]


def _drop_unread(graph: fx.Graph, input_: _Input) -> None:
    for rounding in input_.roundings:
        for node in (*list(rounding.users), rounding):
            if not node.users:
                graph.erase_node(node)


def _rounded_behind(graph: fx.Graph, gate: fx.Node) -> list[fx.Node]:
    """The ops that round a gate by one known scale, if these are all that reads it."""
    readers = sorted(gate.users)
    if not readers or any(op_name(x) != KNOWN or x.args[0] is not gate for x in readers):
        return []
    scales: list[Any] = list(dict.fromkeys(x.args[1] for x in readers))
    ahead = all(is_tensor(scale) and scale < gate for scale in scales)
    if not ahead or not are_one(scales) or is_written_between((gate, *readers)):
        return []
    return readers if may_be_one(graph, readers) else []
