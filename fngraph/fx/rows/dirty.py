"""Rows that padding has been written to, followed onwards: nothing else may be made of them.

    slot: Tensor = fg.buffer("T", "int64", pad=0)       # row 0 of a cache is kept for padding
    cache = state.index_put((batch.slot,), k)           # it is dirty: not what bare forward has
    cache[1:].sum(0)                                    # leaves it out

Moves and pointwise ops take dirty rows along, in boxes (`boxes`). An op that computes along their
dim is refused, and so is a lookup whose index may name them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

from torch import fx

from fngraph.fx.nodes import flat, written_by
from fngraph.fx.rows import dirty_moves, dirty_uses, fills, indices, ranks, shapes, sums, writes
from fngraph.fx.rows.boxes import WHOLE, Box, Boxes, Layout, joined
from fngraph.fx.rows.rules import is_primitive, rule_of
from fngraph.fx.rows.state import WRITTEN, Kept, Mixes, OpCall, is_moving, moving_dims, ndim


def with_dirty(call: OpCall, found: Kept) -> Kept:
    """What an op's rule has found, with the rows of its result that padding was written to.

    Raises:
        Mixes: they would get into others, or nobody knows where they go.
    """
    given = [x for x in call.node.all_input_nodes if getattr(call.rows(x), "dirty", ())]
    if not given and not found.reserved:
        return found
    if is_primitive(call) and rule_of(call) is None:
        # takes care of the caches that it writes, and reads by tables
        left = {x: call.rows(x).dirty for x in written_by(call.node)}
        for x in given:
            if x not in left:
                dirty_uses.refuse_unknown(call, x)
        return dataclasses.replace(found, left=left)
    fn = _RULES.get(rule_of(call))  # type: ignore[arg-type]
    if fn is None:
        dirty_uses.refuse_unknown(call, given[0])
    new = [{d: frozenset(rows.tolist())} for d, rows in found.reserved.items()]
    shape = flat(call.node.meta["val"])[0].shape
    boxes = tuple(fn(call))
    boxes = joined([*boxes, *new], shape) if fn is not dirty_moves.parts else boxes
    if boxes == WHOLE and any(map(is_moving, shape)):
        raise Mixes(
            f"computes true rows ({call.name}) with one that is kept for padding: {WRITTEN}. "
            "Leave it out: x[1:], if it is row 0"
        )
    skips = dirty_uses.skipped(call) if fn is dirty_uses.read else {}
    return dataclasses.replace(found, dirty=boxes, skips=skips)


def part_of(node: fx.Node, boxes: Boxes, states: Any, text: Any) -> Boxes:
    """Of one of several results: the dirty rows of a split's part; of a sort's, those of all."""
    source, number = node.args
    assert isinstance(source, fx.Node) and isinstance(number, int)
    if not boxes:
        return ()
    call = OpCall.of(source, states, text)
    if rule_of(call) is not shapes.parts:
        return boxes
    x, value = call.args["self"], node.meta["val"]
    dim = (call.args.get("dim") or 0) % ndim(x)
    if call.name.startswith("unbind"):
        return joined(dirty_moves.selected(boxes, dim, number), value.shape)
    start = 0
    for part in source.meta["val"][:number]:
        start = start + part.shape[dim]
    if not isinstance(start, int):
        return WHOLE
    return joined(dirty_moves.sliced(boxes, dim, start, 1), value.shape)


def seen_through(target: fx.Node, boxes: Boxes, view: fx.Node, known: Boxes) -> Boxes:
    """The dirty rows of a view after a write through another one of its memory.

    Args:
        boxes: those of the one that was written.
        known: those of the view before.
    """
    if not boxes and not known:
        return ()
    a, b = target.meta["val"], view.meta["val"]
    here, there = Layout.of(a), Layout.of(b)
    if here is None or there is None or a.dtype != b.dtype:
        return WHOLE
    stays = [box for box in known if not here.covers(box, there)]
    comes = [seen for box in boxes if (seen := here.seen_in(box, there)) is not None]
    return joined([*stays, *comes], b.shape)


def unreturnable(x: fx.Node, state: Kept) -> str:
    """Why a value cannot be returned, but as a donated leaf's new one; "" if it can."""
    if state.dirty != WHOLE and not (state.dirty and moving_dims(x)):
        return ""
    dims = [(d, rows) for box in state.dirty for d, rows in box.items()]
    fix = dirty_uses.without(x, *dims[0]) if dims else "x[1:], if it is row 0"
    return f"returns a row that is kept for padding: {WRITTEN}. Leave it out: {fix}"


_RULES: dict[Any, Callable[[OpCall], Iterable[Box]]] = {
    fills.pointwise: dirty_moves.pointwise,
    shapes.in_order: dirty_moves.in_order,
    shapes.permute: dirty_moves.permuted,
    shapes.reshape: dirty_moves.in_new_shape,
    shapes.cut: dirty_moves.cut,
    shapes.parts: dirty_moves.parts,
    shapes.join: dirty_moves.joined_behind,
    shapes.pad: dirty_moves.padded,
    shapes.filled: dirty_moves.nothing,
    sums.reduction: dirty_uses.along,
    sums.order: dirty_uses.along,
    sums.never: dirty_uses.along,
    sums.running: dirty_uses.along,
    sums.lower: dirty_uses.along,
    sums.product: dirty_uses.product,
    sums.norm: dirty_uses.normed,
    sums.convolution: dirty_uses.convolved,
    indices.read: dirty_uses.read,
    ranks.over_ranks: ranks.gathered,
    writes.write: dirty_uses.written,
    writes.window: dirty_uses.window,
}
"""By the rule that an op has there. An op without one is refused on dirty rows."""
