"""Dirty rows through ops that compute along a dim, or look rows up: refused if others need them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import fx

from fngraph.fx.nodes import flat, is_tensor, operands
from fngraph.fx.rows.bounds import ANY, size_of
from fngraph.fx.rows.boxes import WHOLE, Box
from fngraph.fx.rows.dirty_moves import moved
from fngraph.fx.rows.indices import is_mask
from fngraph.fx.rows.state import VOUCHED, WRITTEN, Mixes, OpCall, moving_dims, ndim


def _rows(rows: Iterable[int]) -> str:
    some = sorted(rows)
    if len(some) == 1:
        return f"row {some[0]} is"
    if len(some) == some[-1] - some[0] + 1:
        return f"rows {some[0]} to {some[-1]} are"
    return f"rows {', '.join(map(str, some[:4]))}{' and so on' if len(some) > 4 else ''} are"


def without(x: fx.Node, d: int, rows: frozenset[int]) -> str:
    """Code that leaves rows out, or covers them."""
    before, size = ":, " * d, x.meta["val"].shape[d]
    if rows == set(range(len(rows))):
        return f"x[{before}{len(rows)}:]"
    if isinstance(size, int) and rows == set(range(size - len(rows), size)):
        return f"x[{before}:{size - len(rows)}]"
    if len(rows) > 1 or not isinstance(size, int):
        return "torch.where(mask, x, 0)"
    after = "[:" + ", None" * (ndim(x) - 1 - d) + "]" if d < ndim(x) - 1 else ""
    return f"torch.where((torch.arange({size}) != {min(rows)}){after}, x, 0)"


def _refuse(call: OpCall, x: Any, d: int, rows: frozenset[int], does: str = "") -> NoReturn:
    does = does or f"takes {call.name.strip('_')} over"
    raise Mixes(
        f"{does} {call.dim(x, d)} rows, of which {_rows(rows)} kept for padding: {WRITTEN}. "
        f"Leave it out first: {without(x, d, rows)}"
    )


def refuse_unknown(call: OpCall, x: Any) -> NoReturn:
    box = call.rows(x).dirty[0]
    rows = "a part is" if len(box) != 1 else _rows(*box.values())
    raise Mixes(
        f"calls {call.node.target} on a tensor of which {rows} kept for padding: {WRITTEN}. "
        "Where that goes is not known. Leave it out first, x[1:] of row 0; or if nothing true "
        f"depends on it, say so: {VOUCHED}"
    )


def _only(call: OpCall, *names: str) -> None:
    """Refuse dirty rows in any other argument than these."""
    others = operands(call.node)
    for name in names:
        others.remove(call.args[name])
    for x in others:
        if call.rows(x).dirty:
            refuse_unknown(call, x)


def along(call: OpCall) -> Iterable[Box]:
    """Reductions, orders, running sums and their kin: over other dims alone."""
    name = next(n for n in ("self", "input", "repeats") if n in call.args)
    _only(call, name)
    x = call.args[name]
    rank, over = ndim(x), _dims(call, ndim(x))
    for box in call.rows(x).dirty:
        for d in sorted(box.keys() & over):
            _refuse(call, x, d, box[d])
    made = flat(call.node.meta["val"])[0]
    gone = over if made.dim() < rank else frozenset()
    return moved(call.rows(x).dirty, lambda d: d - sum(e < d for e in gone))


def _dims(call: OpCall, rank: int) -> frozenset[int]:
    if call.name in ("triu", "tril"):
        return frozenset()
    dims = next((call.args[n] for n in ("dim", "dims", "dimension") if n in call.args), None)
    if dims is None or dims == []:
        return frozenset(range(rank))
    return frozenset(d % rank for d in ([dims] if isinstance(dims, int) else dims) if rank)


def normed(call: OpCall) -> Iterable[Box]:
    _only(call, "input")
    if "normalized_shape" not in call.args:
        refuse_unknown(call, call.args["input"])
    x = call.args["input"]
    first = ndim(x) - len(call.args["normalized_shape"])
    for box in call.rows(x).dirty:
        for d in sorted(d for d in box if d >= first):
            _refuse(call, x, d, box[d])
    return call.rows(x).dirty


def product(call: OpCall) -> Iterable[Box]:
    """The dim that is summed over must have none; the others are the result's."""
    tensors = [x for x in call.args.values() if is_tensor(x)]
    added = call.name in ("addmm", "baddbmm", "addmv")
    a, b, *bias = [*tensors[added:], *tensors[:added]]
    rank, turned = call.value.dim(), call.name == "linear"  # a (..., k) and (m, k)
    rank_a, rank_b = ndim(a), ndim(b)
    summed_b = rank_b - 1 if turned or rank_b == 1 else rank_b - 2
    for x, summed in ((a, rank_a - 1), (b, summed_b)):
        for box in call.rows(x).dirty:
            if summed in box:
                _refuse(call, x, summed, box[summed], f"multiplies and sums ({call.name}) over")
    found: list[Box] = []
    lead = rank - max(rank_a - (rank_b == 1), 0)
    found += moved(call.rows(a).dirty, lambda d: d + lead)
    last = rank_b - 2 if turned else rank_b - 1
    found += moved(
        call.rows(b).dirty,
        lambda d: rank - 1 if d == last and rank_b > 1 else d + rank - rank_b + (rank_a == 1),
    )
    for x in bias:
        found += moved(call.rows(x).dirty, lambda d, x=x: d + rank - ndim(x))  # type: ignore[misc]
    return found


def convolved(call: OpCall) -> Iterable[Box]:
    _only(call, "input")
    x = call.args["input"]
    for box in call.rows(x).dirty:
        for d in sorted(d for d in box if d):
            _refuse(call, x, d, box[d], "convolves")
    return call.rows(x).dirty


def read(call: OpCall) -> Iterable[Box]:
    name = "weight" if call.name == "embedding" else "self"
    _only(call, name)
    x, by = call.args[name], _indices(call)
    masks = [y for y in by.values() if is_mask(y)]
    if any(ndim(y) > 1 for y in masks):
        refuse_unknown(call, x)
    left: list[Box] = []
    for box in call.rows(x).dirty:
        if any(_leaves_out(call, x, d, y, box[d]) for d, y in by.items() if d in box):
            continue
        for d in sorted(by.keys() & box.keys()):
            raise Mixes(
                f"looks up some of {call.dim(x, d)} rows ({call.name}), of which {_rows(box[d])} "
                f"kept for padding: {WRITTEN}. True rows of the index may name it too. Say that "
                f"they do not where it is declared: {_declared(box[d])}"
            )
        if masks:
            refuse_unknown(call, x)
        left.append(box)
    if call.name == "embedding":
        return moved(left, lambda d: ndim(by[0]) + d - 1)
    if not isinstance(call.args.get("indices"), list | tuple):
        return left
    return moved(left, _places(by, ndim(x)).index)


def _indices(call: OpCall) -> dict[int, Any]:
    """By the dim that each looks up; a mask of several dims counts for its first."""
    x, given = call.args.get("self"), call.args.get("indices", call.args.get("index"))
    if isinstance(given, list | tuple):
        return {d: y for d, y in enumerate(given) if y is not None}
    return {call.args["dim"] % max(ndim(x), 1) if is_tensor(x) else 0: given}  # type: ignore[arg-type]


def skipped(call: OpCall) -> dict[fx.Node, frozenset[int]]:
    """The dirty rows that each index leaves out."""
    x = call.args.get("self", call.args.get("weight"))
    found: dict[fx.Node, frozenset[int]] = {}
    for box in call.rows(x).dirty:
        for d, y in _indices(call).items():
            if d in box and not is_mask(y) and _leaves_out(call, x, d, y, box[d]):
                found[y] = found.get(y, frozenset()) | box[d]
                break
    return found


def _declared(rows: frozenset[int]) -> str:
    """What a field says of an index that does not name these rows."""
    pad = f"fg.buffer(..., pad={min(rows)})"
    first = rows == set(range(len(rows)))
    return f"fg.buffer(..., min={len(rows)})" + (f", or {pad}" if len(rows) == 1 else "") if (
        first) else pad  # fmt: skip


def _places(by: dict[int, Any], rank: int) -> list[int | None]:
    """The source's dim at each dim of what aten.index gives; None at those of the indices."""
    at = sorted(by)
    wide: list[int | None] = [None] * max(map(ndim, by.values()))
    rest: list[int | None] = [d for d in range(rank) if d not in by]
    first = at[0] if at[-1] - at[0] == len(at) - 1 else 0
    return [*rest[:first], *wide, *rest[first:]]


def _leaves_out(call: OpCall, x: Any, d: int, index: Any, rows: frozenset[int]) -> bool:
    """Whether true rows of an index name none of these."""
    state, size = call.rows(index), size_of(x.meta["val"].shape[d])
    if is_mask(index):
        value = state.value
        return value is not None and value.dim() == 1 and not value[sorted(rows)].any()
    if state.value is not None and isinstance(size, int):
        return rows.isdisjoint((state.value % size).flatten().tolist())
    if state.span == ANY or max(rows) < state.low < math.inf:
        return True
    pads = [state.fills.get(e) for e in moving_dims(index)]
    if not state.said or not pads or not all(isinstance(f, torch.Tensor) for f in pads):
        return False
    return rows <= {int(n) for f in pads for n in f.flatten().tolist()}  # type: ignore[union-attr]


def written(call: OpCall) -> Iterable[Box]:
    _only(call, "self")
    return call.rows(call.args["self"]).dirty


def window(call: OpCall) -> Iterable[Box]:
    """select_scatter and slice_scatter: what is written over is dirty no more."""
    x, src, args = call.args["self"], call.args["src"], call.args
    dim, size = (args.get("dim") or 0) % ndim(x), x.meta["val"].shape[args.get("dim") or 0]
    start, step = args.get("start", args.get("index")) or 0, args.get("step") or 1
    selects = call.name == "select_scatter"
    many = 1 if selects else src.meta["val"].shape[dim]
    if not all(isinstance(n, int) for n in (start, step, many, size)):
        return [*call.rows(x).dirty, *(WHOLE if call.rows(src).dirty else ())]
    start = max(0, start + size) if start < 0 else start
    over = [start + i * step for i in range(many)]
    found: list[Box] = [
        {**box, dim: box[dim] - set(over)} if dim in box else box for box in call.rows(x).dirty
    ]
    for box in call.rows(src).dirty:
        seen = {d + (selects and d >= dim): rows for d, rows in box.items()}
        rows = frozenset({0}) if selects else seen.get(dim, frozenset(range(many)))
        found.append({**seen, dim: frozenset(over[r] for r in rows)})
    return found
