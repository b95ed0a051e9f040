"""Rows through views and slices.

A view keeps rows if a dim in T or R stays outermost among those that it is folded with: (T, 8) to
(8*T,) does, (8, T) to (8*T,) does not. A slice does if it starts at a fixed
row.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import sympy
import torch

from fngraph.fx.rows.fills import constant, run
from fngraph.fx.rows.state import (
    Call,
    Fill,
    Mixes,
    Rows,
    is_moving,
    is_tensor,
    moving_dims,
)


def _source(call: Call) -> Any:
    return next(x for x in call.args.values() if is_tensor(x))


def carried(call: Call, x: Any, to: dict[int, int]) -> Rows:
    """The result of a view of `x` whose dim `d` is dim `to[d]` of the result: the same padding."""
    state = call.rows(x)
    moving = moving_dims(call.node)
    fills: dict[int, Fill] = {}
    for dim, fill in state.fills.items():
        if to.get(dim) not in moving:
            continue
        seen = fill if isinstance(fill, str) else _viewed(call, x, dim, moving)
        if seen is not None:
            fills[to[dim]] = seen
    value = constant(call) if not moving and state.value is not None else None
    return Rows(fills, value, state.said, state.unsaid, window=state.window)


def _viewed(call: Call, x: Any, dim: int, moving: list[int]) -> torch.Tensor | None:
    """The view of one row of padding; of one number alone, that number."""
    fill = call.fill(x, dim)
    assert fill is not None
    if fill.numel() and bool((fill == fill.flatten()[0]).all()):
        return fill.flatten()[0]
    seen = run(call, {x: fill})
    fits = seen is not None and seen.dim() == call.node.meta["val"].dim()
    return seen if seen is not None and fits and all(seen.shape[d] == 1 for d in moving) else None


def in_order(call: Call) -> Rows:
    """A view that keeps the order of the dims: those in T or R are the same ones."""
    x = _source(call)
    if call.name == "expand":  # from the last dim on
        lead = call.node.meta["val"].dim() - x.meta["val"].dim()
        return carried(call, x, {d: d + lead for d in moving_dims(x)})
    return carried(call, x, dict(zip(moving_dims(x), moving_dims(call.node))))


def permute(call: Call) -> Rows:
    """permute, t, transpose: dims change places."""
    x = _source(call)
    rank = x.meta["val"].dim()
    if not rank:
        return carried(call, x, {})
    order = list(range(rank))
    if call.name == "permute":
        order = [d % rank for d in call.args["dims"]]
    elif call.name == "transpose":
        a, b = call.args["dim0"] % rank, call.args["dim1"] % rank
        order[a], order[b] = b, a
    else:
        order.reverse()
    return carried(call, x, {d: i for i, d in enumerate(order)})


def reshape(call: Call) -> Rows:
    """Row-major views: within each group of dims that are folded, T or R must be outermost."""
    x = _source(call)
    old, new = list(x.meta["val"].shape), list(call.node.meta["val"].shape)
    if any(isinstance(n, int) and n == 0 for n in old):
        return Rows()
    if "dtype" in call.args:  # other bits of the same memory
        return Rows(window=call.rows(x).window)
    to: dict[int, int] = {}
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        i, j = _group(old, new, i, j)
        a = [d for d in range(i0, i) if is_moving(old[d])]
        b = [d for d in range(j0, j) if is_moving(new[d])]
        if not a and not b:
            continue
        outer = len(a) == len(b) == 1 and all(
            _is_one(n) for n in old[i0 : a[0]] + new[j0 : b[0]]
        )  # fmt: skip
        if not outer:
            shapes = " to ".join(f"({', '.join(map(call.text, s))})" for s in (old, new))
            raise Mixes(
                f"reshapes {shapes} ({call.name}), which puts padding between the true rows. Keep "
                "T or R outermost: movedim it to the front first"
            )
        to[a[0]] = b[0]
    return carried(call, x, to)


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _group(old: list[Any], new: list[Any], i: int, j: int) -> tuple[int, int]:
    """The ends of the shortest run of dims on either side with equal products."""
    a: Any = _expr(old[i]) if i < len(old) else 1
    b: Any = _expr(new[j]) if j < len(new) else 1
    i, j = i + 1, j + 1
    while a != b and (i < len(old) or j < len(new)):
        ratio = a / b
        grow_old = (ratio < 1) if getattr(ratio, "is_number", True) else not _divides(b, a)
        if (grow_old or j >= len(new)) and i < len(old):
            a, i = a * _expr(old[i]), i + 1
        else:
            b, j = b * _expr(new[j]), j + 1
    return min(i, len(old)), min(j, len(new))


def _divides(b: Any, a: Any) -> bool:
    """Whether a / b is a whole expression: then `new` has to grow."""
    return bool((a / b).as_numer_denom()[1] == 1)


def _expr(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def cut(call: Call) -> Rows:
    """slice, narrow and select along a dim."""
    x, args = call.args["self"], call.args
    dim = args["dim"] % max(x.meta["val"].dim(), 1)
    start: Any = args.get("start", args.get("index")) or 0
    kept = [d for d in moving_dims(x) if d != dim or call.name != "select"]
    if is_moving(args.get("step")):
        raise Mixes(f"takes a step of {call.text(args['step'].meta['val'])}, a padded number")
    if dim in moving_dims(x):
        if is_moving(start) or start < 0:
            raise Mixes(
                f"takes rows counted from the end of {call.dim(x, dim)} ({call.name}), where a key "
                "has padding. Take them by index: x[batch.logits_indices]"
            )
        to = {d: i for d, i in zip(kept, moving_dims(call.node))}
        result = carried(call, x, to) if len(to) == len(kept) else Rows()
        if call.name == "select" or not ends_early(call, x, dim):
            return result
        fills = {d: f for d, f in result.fills.items() if d != dim or isinstance(f, str)}
        return dataclasses.replace(result, fills=fills, window=True)  # true rows lie behind
    if is_moving(start):
        raise Mixes(
            f"takes a slice that begins at {call.text(start.meta['val'])}, which in a key is the "
            "padded number of rows. Slice by an index tensor: x[indices]"
        )
    if call.name != "select" and dim in moving_dims(call.node):
        return Rows(window=True)  # the first T elements of memory that has more
    return carried(call, x, dict(zip(kept, moving_dims(call.node))))


def ends_early(call: Call, x: Any, dim: int) -> bool:
    """Whether a slice along T or R leaves off true rows, as x[:-1] and x[:R] do."""
    end: Any = call.args.get("end")
    if call.name == "narrow":
        end = call.args["length"]
    if is_moving(end):
        return call.text(end.meta["val"]) != call.dim(x, dim)
    return end is not None and end < 0
