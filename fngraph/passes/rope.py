"""Rotary embedding of queries and keys, with the norm of each head before it: one op each.

It is found as the families here write it, `q * cos + swapped(q) * sin` with a sign in the sines, of
all columns or of the first; as transformers does, `q * cos + rotate_half(q) * sin`; and pair by
pair, `a * cos - b * sin` beside `b * cos + a * sin`. Where heads were moved before tokens, as
transformers moves them, the op comes before that.
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
    writes_between,
)
from fngraph.passes.running.checks import Rewritten
from fngraph.torch_facts.memory import storage_key

aten = torch.ops.aten
_END = (1 << 63) - 1  # of a slice that has none


def _signed(x: Any) -> Any:
    """As `models.families.rope.rotate` writes it, of all columns or of the first."""
    outer = call(aten.split_with_sizes, x, name("outer"), -1, label="all")
    return either(call(aten.cat, [_swapped(item(outer, 0)), item(outer, 1)], -1), _swapped(x))


def _swapped(x: Any) -> Any:
    parts = call(aten.split_with_sizes, x, name("widths"), -1, label="parts")
    swapped = call(aten.cat, [item(parts, 1), item(parts, 0)], -1, label="swapped")
    return call(aten.add, call(aten.mul, x, name("cos")), call(aten.mul, swapped, name("sin")))


def _pairs(x: Any) -> Any:
    """Pair by pair, with what does not turn behind them."""
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
    rounded(_signed(_WIDE)), rounded(_pairs(_WIDE)), rounded(_halves(_WIDE, _DIM)),
    _signed(_X), _pairs(_X), _moved(_X), _halves(_X, _DIM),
)  # fmt: skip
_ROPE_OF_NORM = either(*(form(norm_of(_X)) for form in (_signed, _pairs, _moved)))
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
        for node in reversed(list(graph.nodes)):  # a rope of some columns before that inside of it
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
        given, turns = found.values.get("all", found["parts"]).args[0], _turns_pairs
    else:
        given, turns = found.values.get("wide", x), _turns_halves
    if "swapped" in found.values and (pairs := _of_pairs(angles, node)) is not None:
        angles, turns = pairs, _turns_signed
    normed = "weight" in found.values
    if normed and not is_norm(found, x, given):
        return False
    if not (turns(found, given) and (moved or is_dense(node))):
        return False
    signed = [one for one in (found["cos"], found["sin"]) if one not in angles]
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
    for one in signed:
        _drop(graph, one)
    return True


def _of_pairs(angles: list[fx.Node], node: fx.Node) -> list[fx.Node] | None:
    """The cosine and sine of each pair, (T, 1, C), of what has them for both columns of one, as
    `models.families.rope.turn_by` writes it; None: it is otherwise, or is not so any more."""
    cos, sin = angles
    found = match(_SIGNED, sin, keeps=("negated",)), match(_BOTH, cos)
    if None in found:
        return None
    pairs = [one["angle"] for one in found]  # type: ignore[index]
    memory = {storage_key(x.meta["val"]) for x in (*pairs, cos, sin)}  # as it is at the rope
    return None if writes_between(min(cos, sin), node, memory) else pairs[::-1]


_ANGLE = name("angle")
_BOTH = call(aten.cat, [_ANGLE, _ANGLE], -1)
_SIGNED = call(aten.cat, [call(aten.neg, _ANGLE, label="negated"), _ANGLE], -1)


def _drop(graph: fx.Graph, node: Any) -> None:
    """Take out what nobody reads any more, and what it alone read of this."""
    if node.target in (aten.cat.default, aten.neg.default) and not node.users:
        read = list(node.all_input_nodes)
        graph.erase_node(node)
        for one in read:
            _drop(graph, one)


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


def _turns_signed(found: Found, given: fx.Node) -> bool:
    """Whether they turn by the same of both columns of a pair, (..., T, 1, 2 * C)."""
    *rows, D = sizes(given)
    widths, angle = tuple(found["widths"]), sizes(found["cos"])
    C = angle[-1] // 2
    outer = tuple(found["outer"]) if "all" in found.values else (D, 0)
    whole = widths == (C, C) and outer == (2 * C, D - 2 * C) and len(rows) >= 2
    return whole and angle == sizes(found["sin"]) == (*rows[:-1], 1, 2 * C)


def _turns_moved(found: Found, given: fx.Node) -> bool:
    """Whether (B, T, H, D) turns by angles that are (B, T, D), with a dim for heads put in."""
    angles = found["cos"], found["sin"]
    if any(one.target is not aten.unsqueeze.default or one.args[1] != 1 for one in angles):
        return False
    if len(sizes(given)) != 4:
        return False
    B, T, _, D = sizes(given)
    return found["half"] * 2 == D and all(sizes(one.args[0]) == (B, T, D) for one in angles)
