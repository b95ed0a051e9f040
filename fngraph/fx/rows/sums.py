"""Rows through ops that take along a dim: sums, softmax, orders, products, norms, attention.

Along T or R a sum is right if padding holds zeros, a maximum if it holds -inf, a running sum
always, a mean never: it divides by the padded count.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from fngraph.fx.nodes import is_tensor
from fngraph.fx.rows.fills import constant, evaluated, is_all
from fngraph.fx.rows.state import Kept, Mixes, OpCall, moving_dims, ndim

NEUTRAL = {
    "sum": 0, "nansum": 0, "prod": 1, "any": 0, "all": 1, "count_nonzero": 0, "norm": 0,
    "linalg_vector_norm": 0, "amax": -math.inf, "max": -math.inf, "argmax": -math.inf,
    "logsumexp": -math.inf, "_softmax": -math.inf, "_log_softmax": -math.inf,
    "_safe_softmax": -math.inf, "softmax": -math.inf, "amin": math.inf, "min": math.inf,
    "argmin": math.inf,
}  # fmt: skip
SMALL = -1e4  # a masked score: its exponential is 0 beside any other


def reduction(call: OpCall) -> Kept:
    """An op over some dims, or over all."""
    x = call.args["self"]
    moving, over = moving_dims(x), _dims(call)
    across = [d for d in moving if d in over]
    for d in across:
        flat = "arg" in call.name and call.args.get("dim") is None and _lies_within(x, d)
        if flat or len(across) > 1 or not _adds_nothing(call, x, call.rows(x).fills.get(d)):
            refuse_unmasked(call, x, d, NEUTRAL[call.name])
    if not moving:
        return Kept(value=constant(call)) if is_tensor(call.node) else Kept()
    if not is_tensor(call.node) or across:
        softmax = call.name in ("_softmax", "_safe_softmax", "softmax")  # of padding it makes zeros
        return Kept({d: torch.zeros(()) for d in across} if softmax else {})
    fills = {}
    for d, out in zip(moving, moving_dims(call.node)):
        fill = call.fill(x, d)
        seen = evaluated(call, {x: fill}) if fill is not None else None
        if seen is not None and seen.dim() == call.value.dim():
            fills[out] = seen
    return Kept(fills, unsaid=call.rows(x).unsaid)


def _lies_within(x: Any, d: int) -> bool:
    """Whether indices into all elements depend on how long dim d is."""
    return any(not isinstance(n, int) or n != 1 for n in x.meta["val"].shape[:d])


def _adds_nothing(call: OpCall, x: Any, fill: Any) -> bool:
    neutral = NEUTRAL[call.name]
    if "norm" in call.name and not (call.args.get("ord", call.args.get("p")) or 0) >= 0:
        return False  # of the least elements
    if x.meta["val"].dtype is torch.bool and ("softmax" in call.name or "exp" in call.name):
        return False  # of False it takes exp(0)
    if is_all(fill, _limit(neutral, x.meta["val"].dtype)):
        return True
    if call.name.endswith("softmax"):
        return isinstance(fill, torch.Tensor) and bool((fill <= SMALL).all())
    positive = getattr(x.target, "_opname", "") in ("abs", "square", "exp", "sigmoid", "relu")
    return call.name in ("amax", "max") and positive and is_all(fill, 0)


def _limit(neutral: float, dtype: torch.dtype) -> float:
    """-inf as the dtype's least number, where it has no infinity."""
    if math.isfinite(neutral) or dtype.is_floating_point:
        return neutral
    if dtype is torch.bool:
        return float(neutral > 0)
    return torch.iinfo(dtype).max if neutral > 0 else torch.iinfo(dtype).min


def refuse_unmasked(call: OpCall, x: Any, dim: int, neutral: float) -> NoReturn:
    number = _limit(neutral, x.meta["val"].dtype)
    masked = f"float('{number}')" if math.isinf(number) else str(int(number))
    if abs(number) > 1 and math.isfinite(number):
        masked = f"torch.iinfo(x.dtype).{'min' if number < 0 else 'max'}"
    raise Mixes(
        f"takes {call.name.strip('_')} over {call.dim(x, dim)}, and a key has rows of padding "
        "there. Mask them: valid = batch.slot >= 0, of a leaf padded with -1; "
        f"torch.where(valid[:, None], x, {masked})"
    )


def _dims(call: OpCall) -> list[int]:
    rank = ndim(call.args["self"])
    dims = call.args.get("dim")
    if dims is None or dims == []:
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])] if rank else []


def order(call: OpCall) -> Kept:
    """sort, topk: right if padding comes last."""
    x, args = call.args["self"], call.args
    last = -math.inf if args.get("descending", args.get("largest")) else math.inf
    dtype = x.meta["val"].dtype
    tied = dtype is torch.bool and not args.get("stable")  # padding might come among true rows
    for d in set(moving_dims(x)) & set(_dims(call)):
        if tied or not is_all(call.rows(x).fills.get(d), _limit(last, dtype)):
            return never(call)
    return Kept()


def never(call: OpCall) -> Kept:
    """mean, std, flip, ...: along T or R they mix whatever padding holds."""
    x = call.args["self"]
    over = call.args.get("dims", None)
    if over is None or (over == [] and call.name == "roll"):  # rolls all elements
        over = _dims(call)
    over = [d % max(ndim(x), 1) for d in over]
    for d in set(moving_dims(x)) & set(over):
        fix = (
            "Divide the sum of the true rows by their number: valid = batch.slot >= 0; "
            "torch.where(valid[:, None], x, 0).sum(0) / valid.sum()"
            if call.name in ("mean", "var", "std", "var_mean")
            else "Return the rows, and do it outside; or say that it is undone: fg.trust_rows(x)"
        )
        raise Mixes(
            f"takes {call.name} over {call.dim(x, d)}, and a key has rows of padding there. {fix}"
        )
    plain = is_tensor(call.node) and not moving_dims(call.node)
    return Kept(value=constant(call)) if plain else Kept()


def running(call: OpCall) -> Kept:
    """cumsum and its kind: a row sees none behind it."""
    return Kept()


def lower(call: OpCall) -> Kept:
    """tril: of rows by rows, what lies beyond a true row is 0."""
    x = call.args["self"]
    rank = ndim(x)
    square = rank > 1 and call.dim(x, rank - 2) == call.dim(x, rank - 1)
    if square and rank - 1 in moving_dims(x) and call.args["diagonal"] <= 0:
        return Kept({rank - 1: torch.zeros((), dtype=x.meta["val"].dtype)})
    return Kept()


def cross_entropy(call: OpCall) -> Kept:
    """nll_loss: of each row, or of those whose target in padding is ignore_index."""
    target, reduced = call.args["target"], call.args["reduction"] != 0
    ignored = is_all(call.rows(target).fills.get(0), call.args["ignore_index"])
    if reduced and moving_dims(target) and not ignored:
        raise Mixes(
            f"takes the loss over {call.dim(target, 0)}, and a key has rows of padding there. Let "
            "it ignore them: target = torch.where(batch.slot >= 0, target, -100)"
        )
    return Kept()


def product(call: OpCall) -> Kept:
    """Matrix products: the dim that is summed over needs zeros in the padding of one side."""
    added = call.name in ("addmm", "baddbmm", "addmv")  # then what is added to comes first
    a, b, *_ = [x for x in call.args.values() if is_tensor(x)][added:]
    rank_a, rank_b = ndim(a), ndim(b)
    d, e = rank_a - 1, max(rank_b - 2, 0)
    if d in moving_dims(a) or e in moving_dims(b):
        if not is_all(call.rows(a).fills.get(d), 0) and not is_all(call.rows(b).fills.get(e), 0):
            refuse_unmasked(call, a, d, 0)
    if call.name not in ("mm", "bmm", "mv") or not moving_dims(call.node):
        return Kept()
    fills: dict[int, Any] = {}
    for i in moving_dims(call.node):
        side, at = (b, rank_b - 1) if i == rank_a - 1 and rank_b > 1 else (a, i)
        if i < rank_a - 2 and is_all(call.rows(b).fills.get(i), 0):
            side = b
        if is_all(call.rows(side).fills.get(at), 0):
            fills[i] = call.zero
    return Kept(fills)


def norm(call: OpCall) -> Kept:
    """Layer and RMS norm over the last dims; group and batch norm keep the first dim alone."""
    x = next(y for y in call.args.values() if is_tensor(y))
    rank = ndim(x)
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
    return Kept()


def convolution(call: OpCall) -> Kept:
    """Along T only where no row sees one behind the last: padded in front, by F.pad."""
    x, w = call.args["input"], call.args["weight"]
    moving = [d for d in moving_dims(x) if d > 0]
    if moving_dims(w) or (moving and (call.args["transposed"] or any(call.args["padding"]))):
        raise Mixes(
            "convolves over T, and its last true row sees padding. Pad in front alone: "
            "F.pad(x, (kernel - 1, 0)), with padding=0"
        )
    return Kept()


def scaled_dot_product(call: OpCall) -> Kept:
    """Keys in T or R need a causal mask over the same rows, or -inf in the padding of the mask."""
    key, query = call.args["key"], call.args["query"]
    last = ndim(key) - 2
    if last not in moving_dims(key):
        return Kept()
    same = call.dim(key, last) == call.dim(query, ndim(query) - 2)
    masks = [call.args.get(name) for name in ("attn_mask", "attn_bias")]
    mask = next((x for x in masks if is_tensor(x)), None)
    if call.args.get("is_causal") and same:
        return Kept()
    if mask is not None:
        fill = call.rows(mask).fills.get(ndim(mask) - 1)
        low = isinstance(fill, torch.Tensor) and bool((fill <= SMALL).all())
        if low or (mask.meta["val"].dtype is torch.bool and is_all(fill, 0)):
            return Kept()
    refuse_unmasked(call, key, last, -math.inf)
