"""Rows through collectives: what all processes know of theirs holds of what they make of them.

They run one function on batches of the same counts, so where this process has padding all have, and
what is known of it here is known there: a step compares the facts that are used here, as text
(`shown`), before it captures anything.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from fngraph.fx.nodes import operands
from fngraph.fx.rows.boxes import Box
from fngraph.fx.rows.fills import WIDE, is_all
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    VOUCHED,
    Fill,
    Kept,
    Mixes,
    OpCall,
    is_finite,
    moving_dims,
)

COLLECTIVES = frozenset("all_reduce all_gather reduce_scatter all_to_all".split())


def over_ranks(call: OpCall) -> Kept:
    """A collective over some other dim than those in T and R, or over none."""
    (x,) = operands(call.node)
    rows = call.rows(x)
    if "dim" in call.args and call.args["dim"] in moving_dims(x):
        raise Mixes(
            f"calls {call.node.target} along {call.dim(x, call.args['dim'])} rows, of which a key "
            "has more: each process's padding would lie between true rows. Do it along another "
            f"dim; or if what is made of it leaves padding out, say so: {VOUCHED}"
        )
    found = {d: _fill(call, x, d, fill) for d, fill in rows.fills.items()}
    return Kept({d: fill for d, fill in found.items() if fill is not None}, unsaid=rows.unsaid)


def _fill(call: OpCall, x: Any, dim: int, fill: Fill) -> Fill | None:
    """What padding along `dim` holds afterwards, if it holds `fill` in every process."""
    adds = call.name == "reduce_scatter" or call.args.get("op") == "sum"
    if adds:
        if is_all(fill, 0):
            return call.zero
        return FINITE if _adds_up(fill, call.value.dtype) else None
    if call.name == "all_reduce":  # the largest of equal ones
        return fill if isinstance(fill, torch.Tensor) or fill in (FINITE, BEYOND) else None
    if isinstance(fill, str) or fill.numel() == 1:
        return fill
    if call.name == "all_gather":
        row = call.fill(x, dim)
        assert row is not None
        return torch.cat([row] * call.args["size"], call.args["dim"])
    return FINITE if is_finite(fill) and call.value.is_floating_point() else None


_MOST = 2.0**32  # processes, and more than there are


def _adds_up(fill: Fill, dtype: torch.dtype) -> bool:
    """Whether the sum of what padding holds in each process is finite."""
    if dtype not in WIDE or not is_finite(fill):
        return False
    if not isinstance(fill, torch.Tensor):
        return True
    return bool((fill.abs().double() * _MOST <= torch.finfo(dtype).max).all())


def gathered(call: OpCall) -> Iterable[Box]:
    """Dirty rows of the result: the same in each process's part."""
    (x,) = operands(call.node)
    boxes, dim = call.rows(x).dirty, call.args.get("dim")
    if call.name == "all_gather":
        each = x.meta["val"].shape[dim]
        parts = range(call.args["size"])
        moved = lambda rows: frozenset(r + i * each for r in rows for i in parts)  # noqa: E731
        return [{d: moved(rows) if d == dim else rows for d, rows in box.items()} for box in boxes]
    return [{d: rows for d, rows in box.items() if d != dim} for box in boxes]


def shown(rows: Kept) -> str:
    """The facts of an operand that are used here; equal text in processes that know the same."""
    fills = {d: fill if isinstance(fill, str) else _numbers(fill) for d, fill in rows.fills.items()}
    dirty = [{d: sorted(found) for d, found in box.items()} for box in rows.dirty]
    facts = {"padding": fills, "from": rows.low, "span": rows.span and str(rows.span),
             "kept for padding": dirty, "window": rows.window, "weights": rows.held}  # fmt: skip
    plain = Kept()
    usual = {"padding": {}, "from": plain.low, "span": None, "kept for padding": [],
             "window": False, "weights": False}  # fmt: skip
    return ", ".join(f"{name} {fact}" for name, fact in facts.items() if fact != usual[name])


def _numbers(fill: torch.Tensor) -> Any:
    return (fill.float() if fill.itemsize == 1 else fill).tolist()  # float8 has no list
