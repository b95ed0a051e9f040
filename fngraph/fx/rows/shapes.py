"""Rows through ops that move elements and compute none: views, slices, joins, parts, and filling.

A view keeps rows if a dim in T or R stays outermost among those that it is folded with: (T, 8) to
(8*T,) does, (8, T) to (8*T,) does not. A slice does if it starts at a fixed row, a join if what
varies comes last, parts if each begins at a fixed row. A tensor of T ones does, one that T itself
was written into does not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.fx.advice import valid, where_valid
from fngraph.fx.nodes import is_tensor, operands
from fngraph.fx.rows.boxes import is_one
from fngraph.fx.rows.fills import constant, evaluated, is_all, refuse_counts
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    OFFSETS,
    RISING,
    Fill,
    Kept,
    Mixes,
    OpCall,
    is_finite,
    is_moving,
    moving_dims,
    ndim,
)

_PAIRS = ("view_as_complex", "view_as_real", "real", "imag", "_conj", "_neg_view")
"""Views that make other numbers."""


def _first(call: OpCall) -> Any:
    return next(x for x in call.args.values() if is_tensor(x))


_AS_THEY_ARE = ("unsqueeze", "squeeze", "expand", "permute", "transpose", "t", "detach", "alias",
                "contiguous", "clone", "movedim")  # fmt: skip


def _stays(call: OpCall, x: Any, dim: int, mark: str) -> bool:
    """Whether what a mark says of padding by its place holds of a view."""
    if mark == FINITE or call.name in _AS_THEY_ARE:
        return True
    if call.name == "slice":
        along = call.args.get("dim", 0) % ndim(x) == dim
        whole = call.args.get("start") in (None, 0) and call.args.get("step", 1) == 1
        return not along or mark in (OFFSETS, RISING) or whole
    if call.name in ("view", "_unsafe_view", "reshape", "_reshape_alias"):
        old, new = (list(map(call.text, y.shape)) for y in (x.meta["val"], call.value))
        return [n for n in old if n != "1"] == [n for n in new if n != "1"]
    return False


def carried(call: OpCall, x: Any, to: dict[int, int]) -> Kept:
    """The result of a view of `x` whose dim `d` is dim `to[d]` of the result: the same padding."""
    state = call.rows(x)
    moving = moving_dims(call.node)
    fills: dict[int, Fill] = {}
    for dim, fill in state.fills.items():
        if to.get(dim) not in moving:
            continue
        if isinstance(fill, str):
            seen: Fill | None = fill if _stays(call, x, dim, fill) else None
        else:
            seen = _viewed(call, x, dim, moving)
        if seen is not None:
            fills[to[dim]] = seen
    value = constant(call) if not moving and state.value is not None else None
    return Kept(fills, value, state.said, state.unsaid)


def _viewed(call: OpCall, x: Any, dim: int, moving: Sequence[int]) -> torch.Tensor | None:
    """The view of one row of padding; of one number alone, that number."""
    fill = call.fill(x, dim)
    assert fill is not None
    if call.name not in _PAIRS and (number := one_number(fill)) is not None:
        return number
    seen = evaluated(call, {x: fill.contiguous()})
    fits = seen is not None and seen.dim() == call.value.dim()
    return seen if seen is not None and fits and all(seen.shape[d] == 1 for d in moving) else None


def one_number(fill: Fill) -> torch.Tensor | None:
    """The one number that padding holds, if it is one."""
    if not isinstance(fill, torch.Tensor) or not fill.numel():
        return None
    first = fill.flatten()[0]
    return first if fill.numel() == 1 or bool((fill == first).all()) else None


def in_order(call: OpCall) -> Kept:
    """A view that keeps the order of the dims: those in T or R are the same ones."""
    x = _first(call)
    if call.name == "expand":  # from the last dim on
        lead = call.value.dim() - ndim(x)
        return carried(call, x, {d: d + lead for d in moving_dims(x)})
    return carried(call, x, dict(zip(moving_dims(x), moving_dims(call.node))))


def permute(call: OpCall) -> Kept:
    """permute, t, transpose: dims change places."""
    x = _first(call)
    return carried(call, x, {d: i for i, d in enumerate(order_of(call, ndim(x)))})


def order_of(call: OpCall, rank: int) -> list[int]:
    """For each dim of the result, the source's."""
    order = list(range(rank))
    if not rank:
        return order
    if call.name == "permute":
        order = [d % rank for d in call.args["dims"]]
    elif call.name == "transpose":
        a, b = call.args["dim0"] % rank, call.args["dim1"] % rank
        order[a], order[b] = b, a
    else:
        order.reverse()
    return order


def reshape(call: OpCall) -> Kept:
    """Row-major views: within each group of dims that are folded, T or R must be outermost."""
    x = _first(call)
    old, new = list(x.meta["val"].shape), list(call.value.shape)
    if any(isinstance(n, int) and n == 0 for n in old):
        return Kept()
    if "dtype" in call.args:  # other bits of the same memory
        return Kept()
    to: dict[int, int] = {}
    for here, there in groups_of(old, new):
        a = [d for d in here if is_moving(old[d])]
        b = [d for d in there if is_moving(new[d])]
        if not a and not b:
            continue
        outer = len(a) == len(b) == 1 and all(
            is_one(n) for n in old[here.start : a[0]] + new[there.start : b[0]]
        )  # fmt: skip
        if not outer:
            shapes = " to ".join(f"({', '.join(map(call.text, s))})" for s in (old, new))
            raise Mixes(
                f"reshapes {shapes} ({call.name}), which puts padding between the true rows. Keep "
                "T or R outermost: movedim it to the front first"
            )
        to[a[0]] = b[0]
    return carried(call, x, to)


def groups_of(old: list[Any], new: list[Any]) -> Iterator[tuple[range, range]]:
    """Dims of either side that a row-major reshape folds into one another, group by group."""
    i = j = 0
    while i < len(old) or j < len(new):
        i0, j0 = i, j
        i, j = _group(old, new, i, j)
        yield range(i0, i), range(j0, j)


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


def cut(call: OpCall) -> Kept:
    """slice, narrow and select along a dim."""
    x, args = call.args["self"], call.args
    dim = args["dim"] % max(ndim(x), 1)
    start: Any = args.get("start", args.get("index")) or 0
    kept = [d for d in moving_dims(x) if d != dim or call.name != "select"]
    if is_moving(args.get("step")):
        raise Mixes(f"takes a step of {call.text(args['step'].meta['val'])}, a padded number")
    if dim in moving_dims(x):
        if is_moving(start) or start < 0:
            raise Mixes(
                f"takes rows counted from the end of {call.dim(x, dim)} ({call.name}), where a key "
                "has padding. Take them by index, of a staged leaf: x[index]"
            )
        to = dict(zip(kept, moving_dims(call.node)))
        result = carried(call, x, to) if len(to) == len(kept) else Kept()
        if call.name == "select" or not ends_early(call, x, dim):
            return result
        on = (OFFSETS, RISING, BEYOND)  # which begin where the slice ends
        fills = {d: f for d, f in result.fills.items() if d != dim or _is_mark(f, on)}
        return dataclasses.replace(result, fills=fills, window=True)  # true rows lie behind
    if is_moving(start):
        raise Mixes(
            f"takes a slice that begins at {call.text(start.meta['val'])}, which in a key is the "
            "padded number of rows. Slice by an index tensor: x[indices]"
        )
    if call.name != "select" and dim in moving_dims(call.node):
        return Kept(window=True)  # the first T elements of memory that has more
    return carried(call, x, dict(zip(kept, moving_dims(call.node))))


def _is_mark(fill: Fill, marks: tuple[str, ...]) -> bool:
    return isinstance(fill, str) and fill in marks


def ends_early(call: OpCall, x: Any, dim: int) -> bool:
    """Whether a slice along T or R leaves off true rows, as x[:-1] and x[:R] do."""
    end: Any = call.args.get("end")
    if call.name == "narrow":
        end = call.args["length"]
    if is_moving(end):
        return call.text(end.meta["val"]) != call.dim(x, dim)
    return end is not None and end < 0


def parts(call: OpCall) -> Kept:
    """split, chunk, unbind: each part begins at a fixed row, or none is along T or R."""
    x = call.args["self"]
    dim = (call.args.get("dim") or 0) % max(ndim(x), 1)
    sizes = call.args.get("split_sizes") or ()
    if dim in moving_dims(x) and (not sizes or any(map(is_moving, sizes[:-1]))):
        raise Mixes(f"splits {call.dim(x, dim)} into parts that begin where padding decides")
    if dim not in moving_dims(x):
        refuse_counts(call)
    state = call.rows(x)
    one = {d: n for d, f in state.fills.items() if (n := one_number(f)) is not None}
    gone = call.name.startswith("unbind")
    fills = {d - (gone and d > dim): n for d, n in one.items() if d != dim or not gone}
    return Kept(fills, said=state.said, unsaid=state.unsaid)


def join(call: OpCall) -> Kept:
    """cat: along T or R nothing may follow what varies. stack joins along a new dim."""
    tensors = call.args["tensors"]
    dim = (call.args.get("dim") or 0) % max(call.value.dim(), 1)
    if call.name == "cat":
        for x in tensors[:-1]:
            if dim in moving_dims(x):
                raise Mixes(
                    f"joins rows behind {call.dim(x, dim)} rows (cat), which end in padding. Put "
                    "the parts of fixed size first, or return them one by one"
                )
        return _zeros(call, lambda d: d != dim and all(_is_zero(call, x, d) for x in tensors))
    return Kept()


def embedded(call: OpCall) -> Kept:
    """slice_backward, select_backward: zeros around a part of a fixed dim."""
    x, rank = call.args["grad_output"], call.value.dim()
    dim = call.args["dim"] % rank
    if dim in moving_dims(call.node):
        raise Mixes(f"takes the gradient of a part of {call.dim(call.node, dim)} rows")
    gone = call.name == "select_backward"
    return _zeros(call, lambda d: _is_zero(call, x, d - (gone and d > dim)))


def diagonal(call: OpCall) -> Kept:
    """diagonal: of fixed dims, which then come last."""
    x = call.args["self"]
    rank = ndim(x)
    dims = {call.args["dim1"] % rank, call.args["dim2"] % rank}
    for d in dims & set(moving_dims(x)):
        raise Mixes(f"takes a diagonal of {call.dim(x, d)} rows, of which a key has more")
    return Kept()


def _zeros(call: OpCall, where: Callable[[int], bool]) -> Kept:
    zero = call.zero
    return Kept({d: zero for d in moving_dims(call.node) if where(d)})


def _is_zero(call: OpCall, x: fx.Node, dim: int) -> bool:
    return is_all(call.rows(x).fills.get(dim), 0)


def pad(call: OpCall) -> Kept:
    """constant_pad_nd: fixed numbers before, nothing behind a dim in T or R."""
    x, amounts = call.args["self"], call.args["pad"]
    rank = ndim(x)
    for k in range(len(amounts) // 2):
        before, behind = amounts[2 * k], amounts[2 * k + 1]
        moves = rank - 1 - k in moving_dims(x)
        if is_moving(before) or (moves and (is_moving(behind) or behind > 0)):
            raise Mixes(
                f"pads {call.dim(x, rank - 1 - k)} rows at their end, where a key has padding of "
                "its own already. Pad in front, or outside forward"
            )
    return Kept()


def drawn(call: OpCall) -> Kept:
    """rand, normal_, dropout, ...: each row has numbers of its own; which ones, a key decides."""
    counts = [x for name, x in call.args.items() if name != "size" and is_moving(x)]
    among = call.name == "multinomial" and _last_moves(call.args["self"])
    if counts or among:
        raise Mixes(
            f"draws out of the padded number of rows ({call.name}). Draw uniform numbers, a row "
            "for each token or request, and scale them by the true counts",
            fails=among and not is_chance(call, call.args["self"]),
        )
    for name in {"bernoulli": ("self", "p"), "multinomial": ("self",), "normal": ("std",)}.get(
        call.name, ()
    ):
        x: Any = call.args.get(name)
        if is_tensor(x) and moving_dims(x) and not is_chance(call, x):
            raise Mixes(
                f"draws by chances of which padding may hold what is none ({call.name}): an error "
                "for rows of padding alone. Let them be 1 there: "
                f"{valid(call.dim(x, moving_dims(x)[0]))}"
                f"{where_valid(ndim(x), moving_dims(x)[0], 'p', '1')}",
                fails=True,
            )
    return Kept()


def is_chance(call: OpCall, x: Any) -> bool:
    """Whether padding has numbers from 0 to 1; for multinomial, some above 0 in each row."""
    fills = [call.rows(x).fills.get(d) for d in moving_dims(x)]
    if getattr(x.target, "_opname", "") in ("_softmax", "sigmoid") and all(map(is_finite, fills)):
        return True  # chances, of whatever numbers
    whole = call.name == "multinomial"  # some chance in each row
    return len(fills) == 1 and all(  # of what is padding in two dims nothing is known
        isinstance(f, torch.Tensor)
        and bool(((f >= 0) & (f <= 1)).all())
        and (not whole or bool((f.sum(-1) > 0).all()))
        for f in fills
    )


def _last_moves(x: fx.Node) -> bool:
    return ndim(x) - 1 in moving_dims(x)


def filled(call: OpCall) -> Kept:
    """zeros, full, arange, ...: a shorter one is the start of a longer one."""
    name, args = call.name, call.args
    fill = args.get("fill_value", args.get("value", 0))
    steps: list[Any] = [args.get("start"), args.get("step")] + ([fill] if "full" in name else [])
    if any(map(is_moving, steps)):
        raise Mixes(
            f"makes numbers out of the padded number of rows ({name}). Count the true ones: "
            f"{valid(next(call.text(x.meta['val']) for x in steps if is_moving(x)))}valid.sum()"
        )
    moving = moving_dims(call.node)
    if not moving:
        unwritten = "empty" in name  # whatever was in memory
        return Kept(value=None if unwritten or operands(call.node) else constant(call))
    if name == "arange":
        counts = args.get("start") in (None, 0) and args.get("step") in (None, 1)
        return Kept({0: BEYOND} if counts else {})
    if name.startswith(("empty", "new_empty")) or is_tensor(fill):
        return Kept()
    if name == "eye" and call.dim(call.node, 0) != call.dim(call.node, 1):
        return Kept()  # a 1 may lie in padding along one dim
    number = 1 if "ones" in name else 0 if "zeros" in name else fill
    held = torch.tensor(number).to(call.value.dtype)
    return Kept(dict.fromkeys(moving, held))


def repeat(call: OpCall) -> Kept:
    """repeat: once along T and R; elsewhere as often as one likes."""
    x, times = call.args["self"], list(call.args["repeats"])
    lead = len(times) - ndim(x)
    for d in moving_dims(x):
        if times[d + lead] != 1:
            raise Mixes(f"repeats {call.dim(x, d)} rows as a whole (repeat), padding between them")
    return carried(call, x, {d: d + lead for d in moving_dims(x)})
