"""Rows read through indices: true rows look up true rows alone.

x[i] with i = -1 is the last row: of a key, padding. So an index into T or R rows must not be
negative: `fg.buffer("T", "int64", min=0)` says so of a staged one. And what the padding of an index
names must be there, or it is an error for rows of padding alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fngraph.fx.advice import valid
from fngraph.fx.nodes import is_tensor
from fngraph.fx.rows.bounds import ANY, Span, at_most, size_of
from fngraph.fx.rows.state import BEYOND, FINITE, OFFSETS, Kept, Mixes, OpCall, moving_dims, ndim


def read(call: OpCall) -> Kept:
    """index, gather, embedding: a true index finds a true row, unless it counts from the end."""
    source = call.args.get("self", call.args.get("weight"))
    indices = call.args.get("indices", call.args.get("index"))
    if isinstance(indices, list | tuple):
        for d, index in by_dim(indices).items():
            check_index(call, source, d, index, from_end=True)
    else:
        dim = call.args.get("dim", 0) % max(ndim(source), 1)
        check_index(call, source, dim, indices, from_end=False)
    weights = call.rows(source).held and not moving_dims(source)
    return Kept(dict.fromkeys(moving_dims(call.node), FINITE) if weights else {})


def check_index(call: OpCall, x: Any, dim: int, index: Any, from_end: bool) -> None:
    """True rows look up no padding, and padding no row that is not there.

    Args:
        from_end: whether the op takes -1 for the last row; to others it is an error.
    """
    if not is_tensor(index) or is_mask(index) or not ndim(x):
        return
    if from_end and dim in moving_dims(x) and call.rows(index).low < 0:
        raise Mixes(
            f"indexes {call.dim(x, dim)} rows ({call.name}) by numbers that may be negative: those "
            f"count from the end, where a key has padding. Say that {_declared(call, index)}, or "
            "let them not be: index.clamp(min=0)"
        )
    size = size_of(x.meta["val"].shape[dim])
    if not moving_dims(index) or is_there(call.rows(index), moving_dims(index), size, from_end):
        return
    raise Mixes(
        f"looks up what the padding of an index names ({call.name}), which may not be among the "
        f"{call.dim(x, dim)} that are there: an error, or the end of a process, for rows of "
        f"padding alone. Let it be 0: {valid(call.dim(index, moving_dims(index)[0]))}"
        f"torch.where(valid, index, 0){_clamped(call, index, size)}; or say of a "
        "call around it that it looks up nothing else: fg.trust_rows(result)",
        fails=True,
    )


def _declared(call: OpCall, index: Any) -> str:
    """The field of a staged index, with no negative number; of another one, what to look for."""
    if index.op != "placeholder":
        return "the leaf it is made of has none where that is declared, fg.buffer(..., min=0)"
    dims = " ".join(call.dim(index, d) for d in range(ndim(index)))
    dtype = str(index.meta["val"].dtype).removeprefix("torch.")
    return f'it has none where it is declared, fg.buffer("{dims}", "{dtype}", min=0)'


def _clamped(call: OpCall, index: Any, size: Any) -> str:
    """Advice to clamp an index to what is there; "" for rows of which a key has more."""
    state = call.rows(index)
    spans = [x for x in (state.span, _named(state, moving_dims(index))) if x not in (None, ANY)]
    if any(at_most(x.high, size - 1) for x in spans):
        return ", or index.clamp(min=0)"
    least = "max=" if any(at_most(0, x.low) for x in spans) else "0, "
    return f", or index.clamp({least}{size - 1})" if isinstance(size, int) else ""


def _named(state: Kept, moving: Sequence[int]) -> Span | None:
    """What padding's indices lie between, if they are known."""
    fill = state.fills.get(moving[0]) if len(moving) == 1 else None
    if not isinstance(fill, torch.Tensor):
        return None
    return Span(int(fill.min()), int(fill.max())) if fill.numel() else ANY


def is_there(state: Kept, moving: Sequence[int], size: Any, from_end: bool) -> bool:
    """Whether all that padding names lies within a dim."""
    least = -size if from_end else 0
    if state.span is not None and state.span.within(least, size - 1):
        return True
    named = _named(state, moving)
    return named is not None and named.within(least, size - 1)


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
    if last in moving_dims(sequence) and not _below_last(call, values):
        raise Mixes(
            f"searches {call.dim(sequence, last)} boundaries for numbers that may lie above the "
            "last, where a key has more of them. Search for torch.arange(T), the tokens' own rows"
        )
    return Kept()


def _below_last(call: OpCall, x: Any) -> bool:
    """Whether all of x is arange(T), and no offset at its end is as large."""
    if not is_tensor(x) or call.args.get("sorter") is not None or not moving_dims(x):
        return False
    marks = [call.rows(x).fills.get(d) for d in moving_dims(x)]
    return all(isinstance(f, str) and f == BEYOND for f in marks) and all(
        call.dim(x, d) == "T" for d in moving_dims(x)
    )


def by_dim(indices: Sequence[Any]) -> dict[int, Any]:
    """Each index and the first dim that it is for: a mask is for as many as it has."""
    found, dim = {}, 0
    for x in indices:
        if x is not None:
            found[dim] = x
        dim += ndim(x) if x is not None and is_mask(x) else 1
    return found


def is_mask(index: Any) -> bool:
    """Whether an index says of each row whether it is meant."""
    return index.meta["val"].dtype in (torch.bool, torch.uint8)
