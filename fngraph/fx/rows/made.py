"""Rows through joins, parts, and tensors made from nothing.

A join keeps rows if what varies comes last, parts if each begins at a fixed row; a tensor of T ones
does, one that T itself was written into does not.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx

from fngraph.fx.rows.fills import constant, is_all, refuse_counts
from fngraph.fx.rows.state import (
    BEYOND,
    Call,
    Mixes,
    Rows,
    is_moving,
    is_tensor,
    moving_dims,
    operands,
)
from fngraph.fx.rows.views import carried


def parts(call: Call) -> Rows:
    """split, chunk, unbind: each part begins at a fixed row, or none is along T or R."""
    x = call.args["self"]
    dim = (call.args.get("dim") or 0) % max(x.meta["val"].dim(), 1)
    sizes = call.args.get("split_sizes") or ()
    if dim in moving_dims(x) and (not sizes or any(map(is_moving, sizes[:-1]))):
        raise Mixes(f"splits {call.dim(x, dim)} into parts that begin where padding decides")
    if dim not in moving_dims(x):
        refuse_counts(call)
    state = call.rows(x)
    one = {d: f for d, f in state.fills.items() if isinstance(f, torch.Tensor) and f.numel() == 1}
    fills = {d: f.reshape(()) for d, f in one.items() if call.name.startswith("split")}
    return Rows(fills, said=state.said, unsaid=state.unsaid, window=state.window)


def join(call: Call) -> Rows:
    """cat: along T or R nothing may follow what varies. stack joins along a new dim."""
    tensors = call.args["tensors"]
    dim = (call.args.get("dim") or 0) % max(call.node.meta["val"].dim(), 1)
    if call.name == "cat":
        for x in tensors[:-1]:
            if dim in moving_dims(x):
                raise Mixes(
                    f"joins rows behind {call.dim(x, dim)} rows (cat), which end in padding. Put "
                    "the parts of fixed size first, or return them one by one"
                )
        return _zeros(call, lambda d: d != dim and all(_is_zero(call, x, d) for x in tensors))
    return Rows()


def embedded(call: Call) -> Rows:
    """slice_backward, select_backward: zeros around a part of a fixed dim."""
    x, rank = call.args["grad_output"], call.node.meta["val"].dim()
    dim = call.args["dim"] % rank
    if dim in moving_dims(call.node):
        raise Mixes(f"takes the gradient of a part of {call.dim(call.node, dim)} rows")
    gone = call.name == "select_backward"
    return _zeros(call, lambda d: _is_zero(call, x, d - (gone and d > dim)))


def diagonal(call: Call) -> Rows:
    """diagonal: of fixed dims, which then come last."""
    x = call.args["self"]
    rank = x.meta["val"].dim()
    dims = {call.args["dim1"] % rank, call.args["dim2"] % rank}
    for d in dims & set(moving_dims(x)):
        raise Mixes(f"takes a diagonal of {call.dim(x, d)} rows, of which a key has more")
    return Rows()


def _zeros(call: Call, where: Callable[[int], bool]) -> Rows:
    zero = torch.zeros((), dtype=call.node.meta["val"].dtype)
    return Rows({d: zero for d in moving_dims(call.node) if where(d)})


def _is_zero(call: Call, x: fx.Node, dim: int) -> bool:
    return is_all(call.rows(x).fills.get(dim), 0)


def pad(call: Call) -> Rows:
    """constant_pad_nd: fixed numbers before, nothing behind a dim in T or R."""
    x, amounts = call.args["self"], call.args["pad"]
    rank = x.meta["val"].dim()
    for k in range(len(amounts) // 2):
        before, behind = amounts[2 * k], amounts[2 * k + 1]
        moves = rank - 1 - k in moving_dims(x)
        if is_moving(before) or (moves and (is_moving(behind) or behind > 0)):
            raise Mixes(
                f"pads {call.dim(x, rank - 1 - k)} rows at their end, where a key has padding of "
                "its own already. Pad in front, or outside forward"
            )
    return Rows()


def drawn(call: Call) -> Rows:
    """rand, normal_, dropout, ...: each row has numbers of its own; which ones, a key decides."""
    counts = [x for name, x in call.args.items() if name != "size" and is_moving(x)]
    if counts or (call.name == "multinomial" and _last_moves(call.args["self"])):
        raise Mixes(
            f"draws out of the padded number of rows ({call.name}). Draw uniform numbers, a row "
            "for each token or request, and scale them by the true counts"
        )
    return Rows()


def _last_moves(x: fx.Node) -> bool:
    return x.meta["val"].dim() - 1 in moving_dims(x)


def filled(call: Call) -> Rows:
    """zeros, full, arange, ...: a shorter one is the start of a longer one."""
    name, args = call.name, call.args
    fill = args.get("fill_value", args.get("value", 0))
    steps = [args.get("start"), args.get("step")] + ([fill] if "full" in name else [])
    if any(map(is_moving, steps)):
        raise Mixes(
            f"makes numbers out of the padded number of rows ({name}). Count the true ones: "
            "(batch.slot >= 0).sum(), of a leaf padded with -1"
        )
    moving = moving_dims(call.node)
    if not moving:
        return Rows(value=None if operands(call.node) else constant(call))
    if name == "arange":
        counts = args.get("start") in (None, 0) and args.get("step") in (None, 1)
        return Rows({0: BEYOND} if counts else {})
    if name.startswith(("empty", "new_empty")) or is_tensor(fill):
        return Rows()
    number = 1 if "ones" in name else 0 if "zeros" in name else fill
    held = torch.tensor(number).to(call.node.meta["val"].dtype)
    return Rows({d: held for d in moving})


def repeat(call: Call) -> Rows:
    """repeat: once along T and R; elsewhere as often as one likes."""
    x, times = call.args["self"], list(call.args["repeats"])
    lead = len(times) - x.meta["val"].dim()
    for d in moving_dims(x):
        if times[d + lead] != 1:
            raise Mixes(f"repeats {call.dim(x, d)} rows as a whole (repeat), padding between them")
    return carried(call, x, {d: d + lead for d in moving_dims(x)})
