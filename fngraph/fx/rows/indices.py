"""Rows through indices: gathers read true rows alone, and writes must send padding to a row for it.

    slot: Tensor = fg.buffer("T", "int64", pad=0)       # said: row 0 is kept for padding
    cache.index_put((batch.slot,), k)

A pad left out is 0 too, but then row 0 may be somebody's. A write whose padded rows add nothing, or
whose index follows the target's own rows, harms nobody. x[i] with i = -1 is the last row: of a key,
padding. So an index into T or R rows must not be negative: `fg.buffer("T", "int64", min=0)` says
so of a staged one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fngraph.fx.nodes import is_tensor
from fngraph.fx.rows.bounds import Span, size_of
from fngraph.fx.rows.fills import is_all
from fngraph.fx.rows.shapes import ends_early
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    OFFSETS,
    Kept,
    Mixes,
    OpCall,
    is_moving,
    moving_dims,
    ndim,
)

WINDOW = (
    "writes as many rows as a key has, padding included ({}), into memory that has more. Write by "
    "index, with a row for padding: x.index_put((batch.slot,), rows)"
)
WRITES = ("index_put", "_unsafe_index_put", "index_add", "index_copy", "index_fill",
          "index_reduce", "scatter", "scatter_add", "scatter_reduce")  # fmt: skip


def read(call: OpCall) -> Kept:
    """index, gather, embedding: a true index finds a true row, unless it counts from the end."""
    source = call.args.get("self", call.args.get("weight"))
    indices = call.args.get("indices", call.args.get("index"))
    if isinstance(indices, list | tuple):
        for d, index in enumerate(indices):
            _check_index(call, source, d, index, from_end=True)
    else:
        dim = call.args.get("dim", 0) % max(ndim(source), 1)
        _check_index(call, source, dim, indices, from_end=False)
    weights = call.rows(source).held and not moving_dims(source)
    return Kept(dict.fromkeys(moving_dims(call.node), FINITE) if weights else {})


def _check_index(call: OpCall, x: Any, dim: int, index: Any, from_end: bool) -> None:
    """True rows look up no padding, and padding no row that is not there.

    Args:
        from_end: whether the op takes -1 for the last row; to others it is an error.
    """
    if not is_tensor(index) or _is_mask(index) or not ndim(x):
        return
    if from_end and dim in moving_dims(x) and call.rows(index).low < 0:
        raise Mixes(
            f"indexes {call.dim(x, dim)} rows ({call.name}) by numbers that may be negative: those "
            "count from the end, where a key has padding. Say that a leaf has none where it is "
            'declared, fg.buffer("T", "int64", min=0), or let them not be: index.clamp(min=0)'
        )
    size = size_of(x.meta["val"].shape[dim])
    if not moving_dims(index) or is_there(call.rows(index), moving_dims(index), size, from_end):
        return
    raise Mixes(
        f"looks up what the padding of an index names ({call.name}), which may not be among the "
        f"{call.dim(x, dim)} that are there: an error, or the end of a process, for rows of "
        "padding alone. Let it be 0: torch.where(batch.slot >= 0, index, 0), of a leaf padded "
        "with -1, or index.clamp(min=0)",
        fails=True,
    )


def is_there(state: Kept, moving: list[int], size: Any, from_end: bool) -> bool:
    """Whether all that padding names lies within a dim."""
    least = -size if from_end else 0
    if state.span is not None and state.span.within(least, size - 1):
        return True
    fills = [state.fills.get(d) for d in moving]
    return len(fills) == 1 and all(
        isinstance(f, torch.Tensor)
        and (not f.numel() or Span(int(f.min()), int(f.max())).within(least, size - 1))
        for f in fills
    )


def search(call: OpCall) -> Kept:
    """searchsorted, bucketize: boundaries in R, such as query_start_loc, must go on rising."""
    sequence = call.args.get("sorted_sequence", call.args.get("boundaries"))
    last = ndim(sequence) - 1
    if last in moving_dims(sequence) and call.rows(sequence).fills.get(last) != OFFSETS:
        raise Mixes(
            f"searches {call.dim(sequence, last)} boundaries, and a key has padding among them. "
            'Use offsets padded with pad="stride", which never fall'
        )
    values = call.args.get("self", call.args.get("input"))
    if last in moving_dims(sequence) and not _below_last(call, sequence, values):
        raise Mixes(
            f"searches {call.dim(sequence, last)} boundaries for numbers that may lie above the "
            "last, where a key has more of them. Search for torch.arange(T), the tokens' own rows"
        )
    return Kept()


def _below_last(call: OpCall, sequence: Any, x: Any) -> bool:
    """Whether all of x is arange(T), and no offset at its end is as large."""
    if not is_tensor(x) or call.args.get("sorter") is not None or not moving_dims(x):
        return False
    marks = [call.rows(x).fills.get(d) for d in moving_dims(x)]
    return all(isinstance(f, str) and f == BEYOND for f in marks) and all(
        call.dim(x, d) == "T" for d in moving_dims(x)
    )


def write(call: OpCall) -> Kept:
    """index_put, scatter, index_add, ...: where do the padded rows go?"""
    args, target = call.args, call.args["self"]
    places, values = _places(call), _values(call)
    from_end = "dim" not in args or call.name == "index_fill"
    for d, index in places.items():
        _check_index(call, target, d, index, from_end=from_end)
    if not any(moving_dims(x) for x in (*places.values(), values) if is_tensor(x)):
        return Kept()
    masks = [x for x in places.values() if _is_mask(x) and moving_dims(x)]
    if masks and is_tensor(values) and moving_dims(values):
        raise Mixes(
            f"puts rows where a mask over {call.dim(masks[0], 0)} is true ({call.name}), one for "
            "each true element, of which a key's padding has none. Choose row by row instead: "
            "torch.where(mask[:, None], rows, x)",
            fails=True,
        )
    among_themselves = any(_harmless(call, target, d, x) for d, x in places.items())
    if _adds_nothing(call, values) or among_themselves:
        return Kept()
    if reserved := _kept_rows(call, places):
        return Kept(reserved=reserved)
    said = next((u for x in places.values() if (u := call.rows(x).unsaid)), None)
    if said is not None and not _adds(call):
        raise Mixes(
            f"writes the rows of padding too ({call.name}), where the pad of {said} says, and that "
            "names no row kept for padding. Keep one, row 0 say, and declare "
            "fg.buffer(..., pad=0), or torch.where(batch.slot >= 0, index, last)"
        )
    if _adds(call):
        raise Mixes(
            f"adds up the rows of padding too ({call.name}). Let them be zeros: "
            "torch.where(batch.slot >= 0, values, 0), of a leaf padded with -1"
        )
    raise Mixes(
        f"writes the rows of padding too ({call.name}), and where is not known. Send them to a row "
        "kept for them, torch.where(batch.slot >= 0, index, len(x) - 1), slot padded with -1; -1 "
        "itself would be the last row"
    )


def _places(call: OpCall) -> dict[int, Any]:
    """The indices of a write, by dim."""
    args, rank = call.args, ndim(call.args["self"])
    if "dim" in args:
        return {args["dim"] % rank if rank else 0: args["index"]}
    return {d: x for d, x in enumerate(args["indices"]) if x is not None}


def _values(call: OpCall) -> Any:
    names = ("values", "src", "source", "value")
    return next((call.args[n] for n in names if n in call.args), None)


def _adds(call: OpCall) -> bool:
    return call.name in ("index_add", "scatter_add") or call.args.get("accumulate") is True


def _adds_nothing(call: OpCall, values: Any) -> bool:
    whole = call.args.get("include_self") is True
    sums = call.name == "scatter_reduce" and call.args.get("reduce") == "sum" and whole
    if not (_adds(call) or sums) or not is_tensor(values):
        return False
    moving = moving_dims(values)
    return bool(moving) and all(is_all(call.rows(values).fills.get(d), 0) for d in moving)


def _is_mask(index: Any) -> bool:
    return index.meta["val"].dtype in (torch.bool, torch.uint8)


def _harmless(call: OpCall, target: Any, dim: int, index: Any) -> bool:
    """Whether the padded rows of one index write to rows of padding."""
    moving = moving_dims(index)
    if _is_mask(index):  # over the target's own rows, if over any
        return bool(moving)
    if "dim" in call.args and call.name.startswith("scatter"):  # other dims follow the target's
        own = set(moving) <= set(moving_dims(target)) - {dim}
        if own and all(call.dim(index, d) == call.dim(target, d) for d in moving):
            return True
    if not moving or dim not in moving_dims(target):
        return False
    size, fills = call.dim(target, dim), [call.rows(index).fills.get(d) for d in moving]
    rows = all(isinstance(f, str) and f == BEYOND for f in fills)
    return rows and all(call.dim(index, d) == size for d in moving)


def _kept_rows(call: OpCall, places: Mapping[int, Any]) -> dict[int, torch.Tensor]:
    """Rows that one index names in its padding, and that were said to be kept for it."""
    target = call.args["self"]
    adds = _adds(call) or call.name in ("scatter_reduce", "index_reduce")
    for dim, index in places.items():
        moving, state, size = moving_dims(index), call.rows(index), target.meta["val"].shape[dim]
        said = state.said == "where" or (state.said == "pad" and not adds)
        if not said or not moving or dim in moving_dims(target):
            continue
        fills = [f for d in moving if isinstance(f := state.fills.get(d), torch.Tensor)]
        if len(fills) == len(moving) and all(bool(((f >= 0) & (f < size)).all()) for f in fills):
            return {dim: torch.cat([f.flatten() for f in fills]).unique()}
    return {}


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
