"""Experts of few tokens: fngraph::group_rows, grouped_gate and grouped_linear.

    sorted, order = sort(expert);  ends = searchsorted(sorted, numbers);  back = argsort(order)
    hidden = silu(grouped_mm(x[order // C], w_gate)) * grouped_mm(x[order // C], w_up)
    out = grouped_mm(hidden, w_down)

become one op each. They know of few rows (`fngraph.ops.grouped`): for more they are the ops that
were there.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fngraph.passes.pattern import (
    Found,
    call,
    dtype_of,
    in_the_way,
    insert,
    is_dense,
    is_written_between,
    item,
    match,
    name,
    replace,
    sizes,
    tries,
)
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten
_OPS = torch.ops.fngraph


def _product(x: Any, weight: str, label: str) -> Any:
    turned = call(aten.transpose.int, name(weight), -2, -1)
    return call(aten._grouped_mm, x, turned, name("ends"), label=label)


_ROWS = call(
    aten.index.Tensor, name("x"), [call(aten.floor_divide.default, name("order"), name("chosen"))]
)
_GATE = call(aten.mul, call(aten.silu, _product(_ROWS, "a", "one")), _product(_ROWS, "b", "two"))
_LINEAR = _product(name("x"), "a", "one")


def fuse_experts(graph: fx.Graph) -> Rewritten:
    """What sorts, then gates, then what is left of grouped products."""
    return Rewritten(graph, _sorts(graph) + _gates(graph) + _linears(graph))


def _gates(graph: fx.Graph) -> int:
    matches = 0
    for node in list(graph.nodes):
        found = match(_GATE, node) if node.target is aten.mul.Tensor else None
        if found is None or not _is_ours(found, "a", "b"):
            continue
        if sizes(found["a"]) == sizes(found["b"]) and type(found["chosen"]) is int:
            args = [found[key] for key in ("x", "order", "ends", "a", "b", "chosen")]
            matches += replace(graph, found, _OPS.grouped_gate.default, args)
    return matches


def _linears(graph: fx.Graph) -> int:
    matches = 0
    for node in list(graph.nodes):
        found = match(_LINEAR, node) if node.target is aten._grouped_mm.default else None
        if found is not None and _is_ours(found, "a"):
            args = [found[key] for key in ("x", "ends", "a")]
            matches += replace(graph, found, _OPS.grouped_linear.default, args)
    return matches


def _is_ours(found: Found, *weights: str) -> bool:
    """Whether rows of one dtype are grouped by the ends of all groups, and weights lie densely."""
    x, ends = found["x"], found["ends"]
    if not (isinstance(ends, fx.Node) and len(sizes(x)) == 2 and is_dense(found.inside[-1])):
        return False
    for key in weights:
        weight = found[key]
        if len(sizes(weight)) != 3 or not is_dense(weight) or dtype_of(weight) != dtype_of(x):
            return False
    return dtype_of(found.inside[-1]) == dtype_of(x)


# --- sorting --------------------------------------------------------------------------------------

_SORT = call(aten.sort.stable, name("group"), stable=True, label="sort")
_EDGES = call(aten.searchsorted.Tensor, item(_SORT, 0), name("numbers"), right=True)
_ENDS = call(aten._to_copy, _EDGES, dtype=torch.int32, label="ends")
_ORDER = item(_SORT, 1)
_AGAIN = call(aten.sort.default, _ORDER, label="again")


def _sorts(graph: fx.Graph) -> int:
    matches = 0
    again = {found["sort"]: found for found in _all(graph, aten.sort.default, _AGAIN)}
    for ends in list(_all(graph, aten._to_copy.default, _ENDS)):
        if ends["sort"] in again:
            matches += _merged(graph, ends, again[ends["sort"]])
    return matches


def _all(graph: fx.Graph, op: Any, pattern: Any) -> Iterator[Found]:
    for node in graph.nodes:
        if node.target is op:
            yield from tries(pattern, node)


def _merged(graph: fx.Graph, ends: Found, again: Found) -> bool:
    """Put the op in place of a stable sort of groups, of how many rows each ends at, and of a sort
    of the order, which says where each row has come to."""
    sort = ends["sort"]
    backs = [user for user in again["again"].users if user.args[1] == 1]
    orders = [user for user in sort.users if user.args[1] == 1]
    if len(sizes(ends["group"])) != 1 or len(backs) != 1 or len(orders) != 1:
        return False
    if {dtype_of(ends["group"]), dtype_of(ends["numbers"])} != {torch.int64}:
        return False
    unread = [user for x in (sort, again["again"]) for user in x.users if not user.users]
    inside = dict.fromkeys((*ends.inside, *again.inside, *backs, *unread))
    found = Found(ends.values, tuple(sorted(inside)))
    old = (orders[0], ends["ends"], backs[0])
    readers = [user for x in old for user in x.users if user not in inside]
    args = found["group"], found["numbers"]
    if in_the_way(found, old) or not readers or any(not x < min(readers) for x in args):
        return False
    before = min(readers)  # which may stand behind the match: the op reads later than that did
    if is_written_between(found.inside, until=before):
        return False
    new = insert(graph, before, _OPS.group_rows.default, args)
    new.meta["val"] = tuple(x.meta["val"] for x in old)
    for i, one in enumerate(old):
        with graph.inserting_before(before):
            result = graph.call_function(operator.getitem, (new, i))
        result.meta = dict(one.meta)
        one.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(found.inside):
        graph.erase_node(node)
    return True
