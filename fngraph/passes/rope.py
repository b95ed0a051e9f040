"""Rotary embedding of queries and keys, with the norm of each head before it: one op each.

It is found as the families here write it, pairs split apart and put together again, with cosines of
half a head's width; and as transformers does, `q * cos + rotate_half(q) * sin` with cosines of the
whole width. Where heads were moved before tokens there, the op comes before that.
Where heads are cast to float32 before and rounded behind, as in towers, the op does that too.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fngraph.passes.norms import is_norm, norm_of, rounded
from fngraph.passes.pattern import (
    Found,
    call,
    dtype_of,
    either,
    insert,
    is_dense,
    item,
    match,
    name,
    put,
    sizes,
    strides,
)
from fngraph.passes.running.checks import Rewritten

aten = torch.ops.aten
_END = (1 << 63) - 1  # of a slice that has none


def _pairs(x: Any) -> Any:
    """As `models.families.rope.rotate` writes it."""
    cos, sin = name("cos"), name("sin")
    parts = call(aten.split_with_sizes, x, name("widths"), -1, label="parts")
    a, b, rest = (item(parts, i) for i in range(3))
    left = call(aten.sub, call(aten.mul, a, cos), call(aten.mul, b, sin))
    right = call(aten.add, call(aten.mul, b, cos), call(aten.mul, a, sin))
    return call(aten.cat, [left, right, rest], -1)


def _halves(x: Any, dim: Any) -> Any:
    """As transformers writes it."""
    cos, sin = name("cos"), name("sin")
    front = call(aten.slice, x, dim, 0, name("half"))
    back = call(aten.slice, x, dim, name("half"), _END)
    turned = call(aten.cat, [call(aten.neg, back), front], -1)
    return call(aten.add, call(aten.mul, x, cos), call(aten.mul, turned, sin))


def _moved(x: Any) -> Any:
    """The same behind a move of heads to dim 1; cosines are unsqueezed there, once for q and k."""
    return _halves(call(aten.transpose, x, 1, 2, label="moved"), 3)


_X = name("x")
_WIDE = call(aten._to_copy, _X, dtype=torch.float32, label="wide")
_DIM = name("dim")
_ROPE = either(
    rounded(_pairs(_WIDE)), rounded(_halves(_WIDE, _DIM)), _pairs(_X), _moved(_X), _halves(_X, _DIM)
)
_ROPE_OF_NORM = either(_pairs(norm_of(_X)), _moved(norm_of(_X)))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def fuse_norm_rope(graph: fx.Graph) -> Rewritten:
    """Ropes of norms."""
    op = torch.ops.fngraph.norm_rope.default
    return Rewritten(graph, sum(_replaced(graph, x, _ROPE_OF_NORM, op) for x in _roots(graph)))


def fuse_rope(graph: fx.Graph) -> Rewritten:
    """Ropes of anything else."""
    op = torch.ops.fngraph.rope.default
    return Rewritten(graph, sum(_replaced(graph, x, _ROPE, op) for x in _roots(graph)))


def _roots(graph: fx.Graph) -> Iterator[fx.Node]:
    """What may be the last node of one; what rounds a rope comes before the rope."""
    for targets in ((aten._to_copy.default,), (aten.cat.default, aten.add.Tensor)):
        for node in list(graph.nodes):
            if node.target in targets and node.users:
                yield node


def _replaced(graph: fx.Graph, node: fx.Node, pattern: Any, op: Any) -> bool:
    found = match(pattern, node)
    if found is None:
        return False
    x, angles = found["x"], [found["cos"], found["sin"]]
    if not all(isinstance(one, fx.Node) for one in (x, *angles)):  # numbers are no angles
        return False
    given: Any  # what turns, normed or not
    if moved := "moved" in found.values:
        given, turns = found["moved"].args[0], _turns_moved
    elif "parts" in found.values:
        given, turns = found["parts"].args[0], _turns_pairs
    else:
        given, turns = found.values.get("wide", x), _turns_halves
    normed = "weight" in found.values
    if normed and not is_norm(found, x, given):
        return False
    if not (turns(found, given) and (moved or is_dense(node))):
        return False
    kinds, inner = ({dtype_of(one) for one in some} for some in ((x, node), (given, *angles)))
    if len(kinds) > 1 or inner not in (kinds, {torch.float32}) or strides(x)[-1] != 1:
        return False
    if not kinds <= set(_DTYPES):
        return False
    if moved:  # (B, 1, T, D) as (B, T, 1, D)
        angles = [insert(graph, node, aten.unsqueeze.default, (one.args[0], 2)) for one in angles]
    weight = (found["weight"],) if normed else ()
    more = (found["eps"], "centred" in found.values) if normed else ()
    new = insert(graph, node, op, (x, *weight, *angles, *more))
    if moved:
        new = insert(graph, node, aten.transpose.int, (new, 1, 2))
    else:
        new.meta["val"] = node.meta["val"]
    put(graph, found, new)
    return True


def _turns_halves(found: Found, given: fx.Node) -> bool:
    """Whether the halves of (..., T, H, D) turn by angles (..., T, 1, D)."""
    *rows, D = sizes(given)
    halves = found["half"] * 2 == D and found["dim"] in (-1, len(rows)) and len(rows) >= 2
    return halves and all(sizes(found[x]) == (*rows[:-1], 1, D) for x in ("cos", "sin"))


def _turns_pairs(found: Found, given: fx.Node) -> bool:
    """Whether pairs (i, i + C) of (..., T, H, D) turn by angles (..., T, 1, C)."""
    *rows, D = sizes(given)
    widths, angle = tuple(found["widths"]), sizes(found["cos"])
    C = angle[-1]
    whole = widths == (C, C, D - 2 * C) and len(rows) >= 2
    return whole and angle == sizes(found["sin"]) == (*rows[:-1], 1, C)


def _turns_moved(found: Found, given: fx.Node) -> bool:
    """Whether (B, T, H, D) turns by angles that are (B, T, D), with a dim for heads put in."""
    angles = found["cos"], found["sin"]
    if any(one.target is not aten.unsqueeze.default or one.args[1] != 1 for one in angles):
        return False
    if len(sizes(given)) != 4:
        return False
    B, T, _, D = sizes(given)
    return found["half"] * 2 == D and all(sizes(one.args[0]) == (B, T, D) for one in angles)
