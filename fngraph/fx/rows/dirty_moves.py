"""Dirty rows through ops that move elements, or compute each from the same one of its operands."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fngraph.fx.nodes import is_tensor, operands
from fngraph.fx.rows import shapes
from fngraph.fx.rows.boxes import WHOLE, Box, reshaped
from fngraph.fx.rows.fills import DIVISIONS
from fngraph.fx.rows.state import Mixes, OpCall, ndim


def moved(boxes: Iterable[Box], to: Callable[[int], int | None]) -> list[Box]:
    """With dims in other places; of one that is gone, all."""
    return [{e: rows for d, rows in box.items() if (e := to(d)) is not None} for box in boxes]


def in_order(call: OpCall) -> Iterable[Box]:
    x = next(x for x in call.args.values() if is_tensor(x))
    boxes, lead = call.rows(x).dirty, call.value.dim() - ndim(x)
    if call.name == "expand":
        return moved(boxes, lambda d: d + lead)
    if call.name == "view_as_complex":
        return moved(boxes, lambda d: d if d < call.value.dim() else None)
    if call.name in ("unsqueeze", "squeeze"):
        return in_new_shape(call)
    return boxes


def in_new_shape(call: OpCall) -> Iterable[Box]:
    x = call.args["self"]
    old, new = list(x.meta["val"].shape), list(call.value.shape)
    if "dtype" in call.args:  # other bits, of more or fewer elements in a row
        return moved(call.rows(x).dirty, lambda d: d if d < len(new) - 1 else None)
    return reshaped(call.rows(x).dirty, shapes.groups_of(old, new), old, new)


def permuted(call: OpCall) -> Iterable[Box]:
    x = call.args["self"]
    order = shapes.order_of(call, ndim(x))
    return moved(call.rows(x).dirty, order.index)


def sliced(boxes: Iterable[Box], dim: int, start: int, step: int) -> list[Box]:
    """Rows that a slice has; `joined` takes out those behind its end."""
    return [
        {d: _every(rows, start, step) if d == dim else rows for d, rows in box.items()}
        for box in boxes
    ]


def _every(rows: frozenset[int], start: int, step: int) -> frozenset[int]:
    return frozenset((r - start) // step for r in rows if r >= start and not (r - start) % step)


def selected(boxes: Iterable[Box], dim: int, index: int) -> list[Box]:
    here = [box for box in boxes if index in box.get(dim, (index,))]
    return [{d - (d > dim): rows for d, rows in box.items() if d != dim} for box in here]


def cut(call: OpCall) -> Iterable[Box]:
    x, args = call.args["self"], call.args
    boxes, dim, size = call.rows(x).dirty, args["dim"] % ndim(x), x.meta["val"].shape[args["dim"]]
    start, step = args.get("start", args.get("index")) or 0, args.get("step") or 1
    if not isinstance(start, int) or not isinstance(step, int):
        return WHOLE
    if start < 0:  # of a fixed dim, or it was refused
        start = max(0, start + size)
    if call.name == "select":
        return selected(boxes, dim, start)
    return sliced(boxes, dim, start, step)


def parts(call: OpCall) -> Iterable[Box]:
    return call.rows(call.args["self"]).dirty  # `part_of` looks at each


def joined_behind(call: OpCall) -> Iterable[Box]:
    stacks, found, start = call.name == "stack", [], 0
    dim = (call.args.get("dim") or 0) % call.value.dim()
    for x in call.args["tensors"]:
        size = 1 if stacks else x.meta["val"].shape[dim] if ndim(x) == call.value.dim() else 0
        for box in call.rows(x).dirty:
            seen = {d + (stacks and d >= dim): rows for d, rows in box.items()}
            here = frozenset({0}) if stacks else seen.get(dim)
            if here is None and isinstance(size, int) and isinstance(start, int):
                here = frozenset(range(size))
            if here is not None and isinstance(start, int):
                seen[dim] = frozenset(r + start for r in here)
            else:
                seen.pop(dim, None)
            found.append(seen)
        start = start + size
    return found


def padded(call: OpCall) -> Iterable[Box]:
    x, amounts = call.args["self"], call.args["pad"]
    rank = ndim(x)
    before = {rank - 1 - k: amounts[2 * k] for k in range(len(amounts) // 2)}
    return [
        {d: frozenset(r + before.get(d, 0) for r in rows) for d, rows in box.items()}
        for box in call.rows(x).dirty
    ]


def nothing(call: OpCall) -> Iterable[Box]:
    return ()


def pointwise(call: OpCall) -> Iterable[Box]:
    args, rank = call.args, max(map(ndim, operands(call.node)))
    if call.name == "zero" or (call.name == "fill" and not is_tensor(args["value"])):
        return ()
    read = [args["src"]] if call.name == "copy" else operands(call.node)
    _refuse_zero_divisors(call)
    found: list[Box] = []
    for x in dict.fromkeys(read):
        lead = rank - ndim(x)
        boxes = moved(call.rows(x).dirty, lambda d, lead=lead: d + lead)  # type: ignore[misc]
        mask = _where_taken(call, x)
        found += boxes if mask is None else [y for box in boxes if (y := _masked(box, mask, rank))]
    return found


def _where_taken(call: OpCall, x: Any) -> torch.Tensor | None:
    """Of a choice by a constant, where it takes x; None: everywhere, as far as is known."""
    if call.name not in ("where", "masked_fill"):
        return None
    chosen = call.args["condition" if call.name == "where" else "mask"]
    mask = call.rows(chosen).value
    yes, no = ("self", "other") if call.name == "where" else ("value", "self")
    twice = call.args[yes] is call.args[no]
    if mask is None or x is chosen or twice:
        return None
    return mask.bool() if x is call.args[yes] else ~mask.bool()


def _masked(box: Box, mask: torch.Tensor, rank: int) -> Box | None:
    """A box without the rows that a mask leaves out; None if nothing is left."""
    lead, left = rank - mask.dim(), dict(box)
    for d, rows in box.items():
        at = d - lead
        if at >= 0 and mask.shape[at] > 1:
            here = torch.tensor(sorted(rows))
            others = [i for i in range(mask.dim()) if i != at]
            taken = mask.index_select(at, here)
            taken = taken.amax(others) if others else taken
            left[d] = frozenset(here[taken].tolist())
            mask = mask.index_select(at, here)
    return left if mask.any() and all(left.values()) else None


def _refuse_zero_divisors(call: OpCall) -> None:
    """An integer that padding has written may be 0, or anything."""
    divisor: Any = call.args.get("other")
    if call.name not in DIVISIONS or not is_tensor(divisor) or not call.rows(divisor).dirty:
        return
    dtype, span = call.value.dtype, call.rows(divisor).span
    if dtype.is_floating_point or dtype.is_complex:
        return
    if span is None or not span.within(1, span.high):
        raise Mixes(
            f"divides integers by a row that is kept for padding ({call.name}), and may be 0 "
            "there: an error for padding alone. Let it not be: divisor.clamp(min=1)",
            fails=True,
        )
