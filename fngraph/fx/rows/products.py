"""Rows through products, norms, convolutions and attention that is no primitive."""

from __future__ import annotations

import math
from typing import Any

import torch

from fngraph.fx.rows.fills import is_all
from fngraph.fx.rows.state import Call, Mixes, Rows, is_tensor, moving_dims
from fngraph.fx.rows.sums import SMALL, refuse


def product(call: Call) -> Rows:
    """Matrix products: the dim that is summed over needs zeros in the padding of one side."""
    a, b = _factors(call)
    rank_a, rank_b = a.meta["val"].dim(), b.meta["val"].dim()
    d, e = rank_a - 1, max(rank_b - 2, 0)
    if d in moving_dims(a) or e in moving_dims(b):
        if not is_all(call.rows(a).fills.get(d), 0) and not is_all(call.rows(b).fills.get(e), 0):
            refuse(call, a, d, 0)
    if call.name not in ("mm", "bmm", "mv") or not moving_dims(call.node):
        return Rows()
    fills: dict[int, Any] = {}
    for i in moving_dims(call.node):
        side, at = (b, rank_b - 1) if i == rank_a - 1 and rank_b > 1 else (a, i)
        if i < rank_a - 2 and is_all(call.rows(b).fills.get(i), 0):
            side = b
        if is_all(call.rows(side).fills.get(at), 0):
            fills[i] = torch.zeros((), dtype=call.node.meta["val"].dtype)
    return Rows(fills)


def _factors(call: Call) -> tuple[Any, Any]:
    tensors = [x for x in call.args.values() if is_tensor(x)]
    return tuple(tensors[1:3] if call.name in ("addmm", "baddbmm", "addmv") else tensors[:2])  # type: ignore[return-value]


def norm(call: Call) -> Rows:
    """Layer and RMS norm over the last dims; group and batch norm keep the first dim alone."""
    x = next(y for y in call.args.values() if is_tensor(y))
    rank = x.meta["val"].dim()
    if "normalized_shape" in call.args:
        over = list(range(rank - len(call.args["normalized_shape"]), rank))
    elif "group" in call.name:
        over = list(range(1, rank))
    else:
        training = call.args.get("training", "no_training" not in call.name)
        over = [d for d in range(rank) if d != 1] if training else [1]
    for d in set(moving_dims(x)) & set(over):
        raise Mixes(
            f"normalizes over {call.dim(x, d)}, and a key has rows of padding there. Normalize "
            "over the features of each row, or pass the statistics in"
        )
    return Rows()


def convolution(call: Call) -> Rows:
    """Along T only where no row sees one behind the last: padded in front, by F.pad."""
    x, w = call.args["input"], call.args["weight"]
    moving = [d for d in moving_dims(x) if d > 0]
    if moving_dims(w) or (moving and (call.args["transposed"] or any(call.args["padding"]))):
        raise Mixes(
            "convolves over T, and its last true row sees padding. Pad in front alone: "
            "F.pad(x, (kernel - 1, 0)), with padding=0"
        )
    return Rows()


def scaled_dot_product(call: Call) -> Rows:
    """Keys in T or R need a causal mask over the same rows, or -inf in the padding of the mask."""
    key, query = call.args["key"], call.args["query"]
    last = key.meta["val"].dim() - 2
    if last not in moving_dims(key):
        return Rows()
    same = call.dim(key, last) == call.dim(query, query.meta["val"].dim() - 2)
    masks = [call.args.get(name) for name in ("attn_mask", "attn_bias")]
    mask = next((x for x in masks if is_tensor(x)), None)
    if call.args.get("is_causal") and same:
        return Rows()
    if mask is not None:
        fill = call.rows(mask).fills.get(mask.meta["val"].dim() - 1)
        low = isinstance(fill, torch.Tensor) and bool((fill <= SMALL).all())
        if low or (mask.meta["val"].dtype is torch.bool and is_all(fill, 0)):
            return Rows()
    refuse(call, key, last, -math.inf)
