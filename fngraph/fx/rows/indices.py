"""Rows through indices: gathers read true rows alone, and writes must send padding to a row for it.

    slot: Tensor = fg.buffer("T", "int64", pad=0)       # said: row 0 is kept for padding
    cache.index_put((batch.slot,), k)

A pad left out is 0 too, but then row 0 may be somebody's. A write whose padded rows add nothing, or
whose index follows the target's own rows, harms nobody. x[i] with i = -1 is the last row: of a key,
padding. So an index into T or R rows must not be negative; staged integers are taken not to be, in
true rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import is_op, is_tensor
from fngraph.fx.rows.fills import is_all
from fngraph.fx.rows.shapes import ends_early
from fngraph.fx.rows.state import (
    BEYOND,
    RISING,
    Kept,
    Mixed,
    Mixes,
    OpCall,
    is_moving,
    moving_dims,
    ndim,
    op_name,
)

WINDOW = (
    "writes as many rows as a key has, padding included ({}), into memory that has more. Write by "
    "index, with a row for padding: x.index_put((batch.slot,), rows)"
)
_KEPT = set(
    """alias clone contiguous detach expand index index_select gather permute transpose t slice
    select narrow squeeze unsqueeze view _unsafe_view reshape _reshape_alias repeat flip sort amax
    amin max min _to_copy relu split split_with_sizes unbind topk embedding""".split()
)  # the elements of their first argument
_NATURAL = set(
    """argmax argmin argsort searchsorted bucketize zeros ones zeros_like ones_like new_zeros
    new_ones eye count_nonzero""".split()
)
_INDICES = {"sort", "topk", "max", "min", "cummax", "cummin"}  # as their second result


def read(call: OpCall) -> Kept:
    """index, gather, embedding: a true index finds a true row, unless it counts from the end."""
    source = call.args.get("self", call.args.get("weight"))
    indices = call.args.get("indices", call.args.get("index"))
    if isinstance(indices, list | tuple):
        for d, index in enumerate(indices):
            _check_counts_forward(call, source, d, index)
    else:
        _check_within(call, indices)
    return Kept()


def _check_within(call: OpCall, index: Any) -> None:
    """Unlike x[index], these ops take no negative numbers: an error, or the end of a process."""
    fills = [call.rows(index).fills.get(d) for d in moving_dims(index)]
    if any(isinstance(f, torch.Tensor) and bool((f < 0).any()) for f in fills):
        raise Mixes(
            f"looks up the negative numbers that pad an index ({call.name}), which is an error for "
            "rows of padding alone. Let them be 0: index.clamp(min=0)"
        )


def _check_counts_forward(call: OpCall, x: Any, dim: int, index: Any) -> None:
    if is_tensor(index) and dim in moving_dims(x) and call.rows(index).low < 0:
        raise Mixes(
            f"indexes {call.dim(x, dim)} rows ({call.name}) by numbers that may be negative: those "
            "count from the end, where a key has padding. Let them not be: index.clamp(min=0)"
        )


def search(call: OpCall) -> Kept:
    """searchsorted, bucketize: boundaries in R, such as query_start_loc, must go on rising."""
    sequence = call.args.get("sorted_sequence", call.args.get("boundaries"))
    last = ndim(sequence) - 1
    if last in moving_dims(sequence) and call.rows(sequence).fills.get(last) != RISING:
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
    rank = ndim(target)
    if "dim" in args:
        places = {args["dim"] % rank if rank else 0: args["index"]}
    else:
        places = {d: x for d, x in enumerate(args["indices"]) if x is not None}
    values = next((args[n] for n in ("values", "src", "source", "value") if n in args), None)
    for d, index in places.items():
        _check_counts_forward(call, target, d, index)
    if not any(moving_dims(x) for x in (*places.values(), values) if is_tensor(x)):
        return Kept()
    if _adds_nothing(call, values) or any(_harmless(call, target, d, x) for d, x in places.items()):
        return Kept()
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


def _adds(call: OpCall) -> bool:
    return call.name in ("index_add", "scatter_add") or call.args.get("accumulate") is True


def _adds_nothing(call: OpCall, values: Any) -> bool:
    whole = call.args.get("include_self") is True
    sums = call.name == "scatter_reduce" and call.args.get("reduce") == "sum" and whole
    if not (_adds(call) or sums) or not is_tensor(values):
        return False
    moving = moving_dims(values)
    return bool(moving) and all(is_all(call.rows(values).fills.get(d), 0) for d in moving)


def _harmless(call: OpCall, target: Any, dim: int, index: Any) -> bool:
    """Whether the padded rows of one index write among themselves, or to a row that was said."""
    moving, state = moving_dims(index), call.rows(index)
    if index.meta["val"].dtype is torch.bool:  # a mask over the target's own rows
        return True
    if "dim" in call.args and call.name.startswith("scatter"):  # other dims follow the target's
        own = set(moving) <= set(moving_dims(target)) - {dim}
        if own and all(call.dim(index, d) == call.dim(target, d) for d in moving):
            return True
    elif not moving:
        return False
    fills = [state.fills.get(d) for d in moving]
    if dim in moving_dims(target):
        size = call.dim(target, dim)
        rows = all(isinstance(f, str) and f == BEYOND for f in fills)
        return rows and all(call.dim(index, d) == size for d in moving)
    size = target.meta["val"].shape[dim]
    adds = _adds(call) or call.name in ("scatter_reduce", "index_reduce")
    said = state.said == "where" or (state.said == "pad" and not adds)
    return said and all(
        isinstance(f, torch.Tensor) and bool(((f >= 0) & (f < size)).all()) for f in fills
    )


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


def lowest(node: fx.Node, states: Mapping[fx.Node, Any]) -> float:
    """A number that no true element of an integer tensor is below; -inf if none is known."""
    dtype = node.meta["val"].dtype
    value = states[node].value
    if dtype.is_floating_point or dtype.is_complex:
        return -math.inf
    if value is not None:
        return value.min().item() if value.numel() else 0
    if dtype is torch.bool or node.op == "placeholder":
        return 0

    def of(x: Any) -> float:
        if is_tensor(x):
            return -math.inf if isinstance(states[x], Mixed) else states[x].low
        return x if isinstance(x, int) else 0 if isinstance(x, fx.Node) else -math.inf

    source, second = node, 0
    if not is_op(node):  # one of several results
        source, second = node.args  # type: ignore[assignment]
    name = op_name(source)
    if name in _NATURAL or (second and name in _INDICES):
        return 0
    return _bound(name, source, of)


def _bound(name: str, node: fx.Node, of: Callable[[Any], float]) -> float:
    args = [*node.args, None, None]
    a, b = of(args[0]), of(args[1])
    if name in _KEPT:
        return a
    if name == "arange":
        down = len(node.args) > 2 and not of(node.args[2]) > 0
        return -math.inf if down else 0 if len(node.args) == 1 else a
    if name == "add" and not node.kwargs:
        return a + b
    if name == "sub" and isinstance(args[1], int):
        return a - args[1]
    if name in ("mul", "bitwise_and", "floor_divide", "div", "bitwise_right_shift", "bitwise_or"):
        return 0 if min(a, b) >= 0 else -math.inf
    if name in ("sum", "cumsum"):
        return 0 if a >= 0 else -math.inf
    if name == "remainder":  # the divisor's sign
        return 0 if b > 0 else -math.inf
    if name in ("clamp", "clamp_min", "maximum"):
        return max(a, of(node.kwargs.get("min", args[1])))
    if name in ("minimum", "where", "masked_fill", "cat", "stack"):
        picked = args[0] if name in ("cat", "stack") else [x for x in node.args if not _is_mask(x)]
        return min(map(of, picked))  # type: ignore[arg-type]
    return -math.inf


def _is_mask(x: Any) -> bool:
    return is_tensor(x) and x.meta["val"].dtype is torch.bool


def after_first(node: fx.Node, fills: Any) -> float:
    """A bound on offsets that lack their leading 0: each request has brought a token, so 1."""
    name = str(getattr(node.target, "_opname", ""))
    start = node.args[2] if len(node.args) > 2 else 0
    later = name == "slice" and isinstance(start, int) and start > 0
    return 1 if later and any(isinstance(f, str) and f == RISING for f in fills) else -math.inf
