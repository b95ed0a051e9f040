"""Rows that are folded behind others, (4, T, E) as (4 * T, E): kept if they are unfolded again.

    x.transpose(0, 1).reshape(-1, E) @ w      # as nn.MultiheadAttention does with (T, 4, E)

In a key each of the 4 stretches has padding at its end, so that true rows are not in front: to most
ops it is a mix. Ops that compute each row by itself, elementwise or by a product with weights, keep
the stretches as they are, and a view that takes them apart has true rows in front once more.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
from torch import fx

from fngraph.fx.nodes import is_op, is_tensor, mutates, operands
from fngraph.fx.rows.bounds import size_of
from fngraph.fx.rows.boxes import is_one
from fngraph.fx.rows.fills import dtype_of, pointwise, refuse_counts
from fngraph.fx.rows.rules import rule_of
from fngraph.fx.rows.shapes import groups_of, reshape
from fngraph.fx.rows.state import Kept, Mixed, Mixes, OpCall, is_moving, moving_dims, ndim

_PRODUCTS = ("mm", "addmm", "linear")


@dataclasses.dataclass(frozen=True, slots=True)
class Folded(Mixed):
    """A value that is mixed, but for views that take dim `dim` apart into (stretches, rows).

    Attributes:
        dim: the dim that is folded; no other one is in T or R.
        stretches: how many there are, each a key's rows long.
    """

    dim: int = 0
    stretches: int = 1


def plain(mixed: Mixed, fails: str | None = None) -> Mixed:
    """What a value of it is, of which no more is known."""
    return Mixed(mixed.node, mixed.why, mixed.fails if fails is None else fails)


def fold(call: OpCall, why: str) -> Mixed:
    """What becomes of a value whose op is refused: it is folded, or mixed."""
    mixed = Mixed(call.node, why)
    if rule_of(call) is not reshape or "dtype" in call.args or mutates(call.node):
        return mixed
    state, x = call.rows(call.args["self"]), call.args["self"]
    if len(moving_dims(x)) != 1 or state.dirty or state.window:
        return mixed
    found = _groups(call, x, moving_dims(x)[0])
    if found is None:
        return mixed
    before, to, after = found
    return _folded(call, mixed, to, before) if after == 1 else mixed


def through(node: fx.Node, states: Mapping[fx.Node, Any], text: Callable[[Any], str]) -> Any:
    """What an op makes of folded values: a `Kept` or a `Folded`, or None if that is not known."""
    if not is_op(node) or mutates(node) or not is_tensor(node):
        return None
    given = [(x, states[x]) for x in node.all_input_nodes if is_tensor(x)]
    folded = [(x, s) for x, s in given if isinstance(s, Folded)]
    others = [(x, s) for x, s in given if not isinstance(s, Folded)]
    if not folded or not all(_is_still(x, s) for x, s in others):
        return None
    first = folded[0][1]
    call = OpCall.of(node, states, text)
    try:
        refuse_counts(call) if rule_of(call) is not reshape else None
    except Mixes:
        return None
    if rule_of(call) is reshape:
        return _reshaped(call, first)
    if rule_of(call) is pointwise:
        return _computed(call, folded)
    if call.name in _PRODUCTS and len(folded) == 1:
        a = call.args[
            "mat1" if call.name == "addmm" else "input" if call.name == "linear" else "self"
        ]
        if folded[0][0] is a and first.dim < ndim(a) - 1:
            return _folded(call, first, first.dim, first.stretches)
    return None


def _is_still(x: Any, state: Any) -> bool:
    """Whether an operand is the same for all rows."""
    kept = isinstance(state, Kept) and not state.dirty and not state.window
    return kept and not moving_dims(x)


def _folded(call: OpCall, mixed: Mixed, dim: int, stretches: int) -> Mixed:
    """Folded at a dim, if that is a whole number of rows for each stretch, at all sizes."""
    size = sympy.expand(size_of(call.value.shape[dim]) / sympy.Integer(stretches))
    whole = size.is_polynomial() and all(
        c.is_Integer and c >= 0 for c in sympy.Poly(size, *size.free_symbols).coeffs()
    )
    if not whole or moving_dims(call.node) != (dim,):
        return plain(mixed)
    return Folded(mixed.node, mixed.why, mixed.fails, dim, stretches)


def _groups(call: OpCall, x: Any, moving: int) -> tuple[int, int, int] | None:
    """Of a view's one moving dim: how many rows of others are before it, where it goes, and how
    many are before it there."""
    old, new = list(x.meta["val"].shape), list(call.value.shape)
    if any(is_one(n) or n == 0 for n in old if isinstance(n, int) and n == 0):
        return None
    for here, there in groups_of(old, new):
        if moving in here:
            to = [d for d in there if is_moving(new[d])]
            if len(to) != 1:
                return None
            before, after = old[here.start : moving], new[there.start : to[0]]
            return math.prod(before), to[0], math.prod(after)
    return None


def _reshaped(call: OpCall, folded: Folded) -> Any:
    if "dtype" in call.args:
        return None
    found = _groups(call, call.args["self"], folded.dim)
    if found is None or found[0] != 1:
        return None
    _, to, after = found
    if after == folded.stretches:  # taken apart
        return Kept() if moving_dims(call.node) == (to,) else None
    return _folded(call, folded, to, folded.stretches) if after == 1 else None


def _computed(call: OpCall, folded: list[tuple[fx.Node, Folded]]) -> Any:
    """Elementwise: all are folded alike."""
    rank = call.value.dim()
    places = {(s.dim + rank - ndim(x), s.stretches, call.dim(x, s.dim)) for x, s in folded}
    given = set(operands(call.node))
    dtypes = [dtype_of(call), *(x.meta["val"].dtype for x in given)]
    if len(places) != 1 or not all(d.is_floating_point for d in dtypes):
        return None  # integers may be divided by 0
    ((dim, stretches, _),) = places
    return _folded(call, folded[0][1], dim, stretches)
