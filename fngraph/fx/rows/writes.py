"""Rows written through indices: padding must go to a row for it, to padding, or add nothing.

    slot: Tensor = fg.buffer("T", "int64", pad=0)       # said: row 0 is kept for padding
    cache.index_put((batch.slot,), k)

A pad left out is 0 too, but then row 0 may be somebody's. Indices that vary along several dims, T
and R say, write an element for each pair: what is padding along one dim is so beside true rows of
the other, where another index or nothing says where it goes. So it is asked of each dim, and of
what is padding along both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import torch

from fngraph.fx.advice import valid
from fngraph.fx.nodes import is_tensor
from fngraph.fx.rows.boxes import is_one
from fngraph.fx.rows.fills import is_all
from fngraph.fx.rows.indices import by_dim, check_index, is_mask
from fngraph.fx.rows.shapes import ends_early
from fngraph.fx.rows.state import BEYOND, Kept, Mixes, OpCall, is_moving, moving_dims, ndim

WINDOW = (
    "writes as many rows as a key has, padding included ({}), into memory that has more. Write by "
    "index, with a row for padding: x.index_put((index,), rows), index a staged leaf"
)
WRITES = ("index_put", "_unsafe_index_put", "index_add", "index_copy", "index_fill",
          "index_reduce", "scatter", "scatter_add", "scatter_reduce")  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class _Spread:
    """The elements that a write writes: a dim for each of the indices' own, and of the target's.

    Attributes:
        indices: the target's dim, the index along it, and the first of its dims here.
        values: what is written, and its first dim here; None if it is a number.
        last: the last dim of the indices' own, along which masks count their true elements.
        moving: the dims here in T or R that an index varies along, with their sizes.
    """

    indices: list[tuple[int, Any, int]]
    values: tuple[Any, int] | None
    last: int
    moving: Mapping[int, str]


@dataclasses.dataclass(frozen=True, slots=True)
class _Told:
    """Padding along one dim goes nowhere, of elements that are true ones along `beside`.

    Attributes:
        kept: by the target's dim, rows that are kept for it; {}: it goes to padding, or adds 0.
    """

    dim: int
    beside: frozenset[int]
    kept: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)


def write(call: OpCall) -> Kept:
    """index_put, scatter, index_add, ...: where do the padded rows go?"""
    target, places, values = call.args["self"], _places(call), _values(call)
    from_end = "dim" not in call.args or call.name == "index_fill"
    for d, index in places.items():
        check_index(call, target, d, index, from_end=from_end)
    if not places:
        return Kept()
    spread = _spread(call, places, values)
    _refuse_masks(call, places, spread)
    corners = [
        frozenset(dims)
        for many in range(1, len(spread.moving) + 1)
        for dims in itertools.combinations(spread.moving, many)
    ]
    told = [*_nowhere(call, spread), *_adding_nothing(call, spread)]
    kept = list(_kept(call, spread))
    rows: dict[int, list[torch.Tensor]] = {}
    for corner in corners:
        if any(_covers(t, corner) for t in told):
            continue
        found = next((t for t in kept if _covers(t, corner)), None)
        if found is None:
            _refuse(call, places, spread, corner)
        for d, named in found.kept.items():
            rows.setdefault(d, []).append(named)
    return Kept(reserved={d: torch.cat(named).unique() for d, named in rows.items()})


def _covers(told: _Told, corner: frozenset[int]) -> bool:
    """Whether what is told holds of elements that are padding along all dims of a corner."""
    return told.dim in corner and not told.beside & corner


def _spread(call: OpCall, places: Mapping[int, Any], values: Any) -> _Spread:
    target = call.args["self"]
    if "dim" in call.args:
        ((dim, index),) = places.items()
        scatters = call.name.startswith("scatter")
        indices = [(dim, index, 0 if scatters else dim)]
        found = (values, 0) if is_tensor(values) and ndim(values) else None
        others = [d for d in moving_dims(index) if scatters and d != dim]
        own = [d for d in others if call.dim(index, d) == call.dim(target, d)]  # in their places
        last = dim
    else:
        taken = [e for d, x in places.items() for e in range(d, d + (ndim(x) if is_mask(x) else 1))]
        wide = max(1 if is_mask(x) else ndim(x) for x in places.values())
        first = taken[0] if taken[-1] - taken[0] == len(taken) - 1 else 0
        indices = [(d, x, first + wide - ndim(x)) for d, x in places.items() if not is_mask(x)]
        rank, own, last = ndim(target) - len(taken) + wide, [], first + wide - 1
        found = (values, rank - ndim(values)) if is_tensor(values) else None
    moving = {
        e + first: call.dim(x, e) for _, x, first in indices for e in moving_dims(x) if e not in own
    }
    return _Spread(indices, found, last, moving)


def _facts(call: OpCall, x: Any, first: int) -> Iterator[tuple[int, int, Any, frozenset[int]]]:
    """Of each dim of x in T or R: it, its place in a spread, its padding, the others' places."""
    here = frozenset(e + first for e in moving_dims(x))
    for e in moving_dims(x):
        yield e, e + first, call.rows(x).fills.get(e), here - {e + first}


def _nowhere(call: OpCall, spread: _Spread) -> Iterator[_Told]:
    """Padding that goes to the target's own, since the index counts on there."""
    target = call.args["self"]
    for d, x, first in spread.indices:
        for e, dim, fill, beside in _facts(call, x, first):
            counts = isinstance(fill, str) and fill == BEYOND and d in moving_dims(target)
            if counts and call.dim(x, e) == call.dim(target, d):
                yield _Told(dim, beside)


def _adding_nothing(call: OpCall, spread: _Spread) -> Iterator[_Told]:
    """Padding of values that is 0, and added."""
    whole = call.args.get("include_self") is True
    sums = call.name == "scatter_reduce" and call.args.get("reduce") == "sum" and whole
    finite = math.isfinite(call.args.get("alpha", 1))  # or 0 times it is NaN
    if spread.values is not None and finite and (_adds(call) or sums):
        for _, dim, fill, beside in _facts(call, *spread.values):
            if is_all(fill, 0):
                yield _Told(dim, beside)


def _kept(call: OpCall, spread: _Spread) -> Iterator[_Told]:
    """Padding that names rows which were said to be kept for it."""
    target = call.args["self"]
    adds = _adds(call) or call.name in ("scatter_reduce", "index_reduce")
    for d, x, first in spread.indices:
        said, size = call.rows(x).said, target.meta["val"].shape[d] if ndim(target) else 1
        if not (said == "where" or (said == "pad" and not adds)) or is_moving(size):
            continue
        for _, dim, fill, beside in _facts(call, x, first):
            if isinstance(fill, torch.Tensor) and bool(((fill >= 0) & (fill < size)).all()):
                yield _Told(dim, beside, {d: fill.flatten()})


def _refuse_masks(call: OpCall, places: Mapping[int, Any], spread: _Spread) -> None:
    """A mask over T or R is true for as many rows as padding has it: nothing may be as many. And
    one over neither is so for as many as it is, whatever T and R are."""
    masks = sorted(filter(is_mask, places.values()), key=lambda x: not moving_dims(x))
    if not masks:
        return
    mask, *more = masks
    counted = [(x, ndim(x) - 1) for _, x, _ in spread.indices]
    if spread.values is not None:
        x, first = spread.values
        counted.append((x, spread.last - first))
    several = [x for x, d in counted if d >= 0 and not is_one(x.meta["val"].shape[d])]
    if not moving_dims(mask):
        rows = next((call.dim(x, d) for x, d in counted if d >= 0 and d in moving_dims(x)), None)
        if rows is None:
            return
        raise Mixes(
            f"puts {rows} rows where a mask is true ({call.name}), one for each true element, of "
            "which a key has no more than its batch. Say where they go by numbers: "
            "x.index_put((index,), rows), index a staged leaf",
            fails=True,
        )
    (fill, *corner) = (call.rows(mask).fills.get(d) for d in moving_dims(mask))
    none_of_padding = not corner and is_all(fill, 0) and not any(map(moving_dims, several))
    if more or (several and not none_of_padding):
        size = call.dim(mask, moving_dims(mask)[0])
        raise Mixes(
            f"puts rows where a mask over {size} is true ({call.name}), one for "
            "each true element, of which a key's padding has none. Choose row by row instead: "
            "torch.where(mask[:, None], rows, x)",
            fails=True,
        )


def _refuse(
    call: OpCall, places: Mapping[int, Any], spread: _Spread, corner: frozenset[int]
) -> NoReturn:
    """Refuse a write for what is padding along some of the dims that its indices vary along."""
    sizes = " and ".join(spread.moving[d] for d in sorted(corner))
    which = f" of {sizes}" if len(spread.moving) > 1 else ""
    true = valid(spread.moving[min(corner)])
    said = next((u for x in places.values() if (u := call.rows(x).unsaid)), None)
    if said is not None and not _adds(call):
        raise Mixes(
            f"writes the rows of padding{which} too ({call.name}), where the pad of {said} says, "
            "and that names no row kept for padding. Keep one, row 0 say, and declare "
            f"{said} with fg.buffer(..., pad=0); or {true}torch.where(valid, index, last)"
        )
    if _adds(call):
        raise Mixes(
            f"adds up the rows of padding{which} too ({call.name}). Let them be zeros: "
            f"{true}torch.where(valid, values, 0)"
        )
    raise Mixes(
        f"writes the rows of padding{which} too ({call.name}), and where is not known. Send them "
        f"to a row kept for them: {true}torch.where(valid, index, len(x) - 1)"
    )


def _places(call: OpCall) -> dict[int, Any]:
    """The indices of a write, by dim."""
    args, rank = call.args, ndim(call.args["self"])
    if "dim" in args:
        return {args["dim"] % rank if rank else 0: args["index"]}
    return by_dim(args["indices"])


def _values(call: OpCall) -> Any:
    names = ("values", "src", "source", "value")
    return next((call.args[n] for n in names if n in call.args), None)


def _adds(call: OpCall) -> bool:
    return call.name in ("index_add", "scatter_add") or call.args.get("accumulate") is True


def window(call: OpCall) -> Kept:
    """slice_scatter, select_scatter: T rows written into more memory take padding along."""
    target, source = call.args["self"], call.args["src"]
    dim = (call.args.get("dim") or 0) % max(ndim(target), 1)
    start: Any = call.args.get("start", call.args.get("index")) or 0
    moves = dim in moving_dims(target)
    if is_moving(start) or (moves and start < 0):
        raise Mixes(f"writes rows counted from the end of {call.dim(target, dim)} ({call.name})")
    if not moves and call.name == "slice_scatter" and dim in moving_dims(source):
        raise Mixes(WINDOW.format(call.name))
    if moves and call.name == "slice_scatter" and ends_early(call, target, dim):
        raise Mixes(WINDOW.format(call.name))
    return Kept()
