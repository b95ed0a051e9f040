"""Rows through ops that take along a dim: sums, softmax, orders, products, norms, attention.

Along T or R a sum is right if padding holds zeros, a maximum if it holds -inf, a running sum
always, a mean never: it divides by the padded count.
"""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from fngraph.fx.advice import valid, where_valid
from fngraph.fx.nodes import is_tensor
from fngraph.fx.rows.bounds import size_of
from fngraph.fx.rows.fills import WIDE, constant, dtype_of, evaluated, is_all
from fngraph.fx.rows.indices import is_there
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    VANISHING,
    Kept,
    Mixes,
    OpCall,
    is_finite,
    moving_dims,
    ndim,
)

NEUTRAL = {
    "sum": 0, "nansum": 0, "prod": 1, "any": 0, "all": 1, "count_nonzero": 0, "norm": 0,
    "linalg_vector_norm": 0, "amax": -math.inf, "max": -math.inf, "argmax": -math.inf,
    "logsumexp": -math.inf, "_softmax": -math.inf, "_log_softmax": -math.inf,
    "_safe_softmax": -math.inf, "softmax": -math.inf, "amin": math.inf, "min": math.inf,
    "argmin": math.inf,
}  # fmt: skip


_FINITE = {"sum": WIDE, "_log_softmax": WIDE, "logsumexp": WIDE}
"""Those of finite numbers that are finite in these dtypes, and these in each."""
_WITHIN = ("amax", "amin", "_softmax", "softmax")


def reduction(call: OpCall) -> Kept:
    """An op over some dims, or over all."""
    x = call.args["self"]
    moving, over = moving_dims(x), _dims(call)
    across = [d for d in moving if d in over]
    for d in across:
        flat = "arg" in call.name and call.args.get("dim") is None and _lies_within(x, d)
        if flat or len(across) > 1 or not _is_neutral(call, x, call.rows(x).fills.get(d)):
            refuse_unmasked(call, x, d, NEUTRAL[call.name])
    if not moving:
        return Kept(value=constant(call)) if is_tensor(call.node) else Kept()
    if not is_tensor(call.node) or across:
        softmax = call.name in ("_softmax", "_safe_softmax", "softmax")
        return Kept(dict.fromkeys(across, VANISHING) if softmax else {})
    fills: dict[int, Any] = {}
    for d, out in zip(moving, moving_dims(call.node)):
        fill = call.fill(x, d)
        seen = evaluated(call, {x: fill}) if fill is not None else None
        if seen is not None and seen.dim() == call.value.dim():
            fills[out] = seen
        elif is_finite(call.rows(x).fills.get(d)) and (
            call.name in _WITHIN or call.value.dtype in _FINITE.get(call.name, ())
        ):
            fills[out] = FINITE
    return Kept(fills, unsaid=call.rows(x).unsaid)


def _lies_within(x: Any, d: int) -> bool:
    """Whether indices into all elements depend on how long dim d is."""
    return any(not isinstance(n, int) or n != 1 for n in x.meta["val"].shape[:d])


def _is_neutral(call: OpCall, x: Any, fill: Any) -> bool:
    neutral = NEUTRAL[call.name]
    if "norm" in call.name and not (call.args.get("ord", call.args.get("p")) or 0) >= 0:
        return False  # of the least elements
    whole = not x.meta["val"].dtype.is_floating_point
    if whole and ("softmax" in call.name or "exp" in call.name):
        return False  # of False, or of the least byte, it takes exp(0)
    if is_all(fill, _limit(neutral, x.meta["val"].dtype)):
        return True
    if isinstance(fill, str):
        return fill == VANISHING and call.name == "sum"
    positive = getattr(x.target, "_opname", "") in (
        ("relu",) if whole else ("abs", "square", "exp", "sigmoid", "relu")
    )  # of the least integer, abs is itself
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
    other = f"float('{number}')" if math.isinf(number) else str(int(number))
    if abs(number) > 1 and math.isfinite(number):
        other = f"torch.iinfo(x.dtype).{'min' if number < 0 else 'max'}"
    times = " A factor of 0 is no mask, since 0 * inf is NaN." if _is_masked(call, x, dim) else ""
    raise Mixes(
        f"takes {call.name.strip('_')} over {call.dim(x, dim)}, and a key has rows of padding "
        f"there.{times} Mask them: {valid(call.dim(x, dim))}"
        f"{where_valid(ndim(x), dim, 'x', other)}"
    )


def _is_masked(call: OpCall, x: Any, dim: int) -> bool:
    """Whether it is a product with something that is 0 in padding."""
    if getattr(x.target, "_opname", "") != "mul":
        return False
    factors = [(y, dim - ndim(x) + ndim(y)) for y in x.args if is_tensor(y)]
    return any(is_all(getattr(call.states.get(y), "fills", {}).get(d), 0) for y, d in factors)


def _dims(call: OpCall) -> list[int]:
    rank = ndim(call.args["self"])
    dims = call.args.get("dim", call.args.get("dimension"))
    if dims is None or dims == []:
        return list(range(rank))
    return [d % rank for d in (dims if isinstance(dims, list | tuple) else [dims])] if rank else []


def order(call: OpCall) -> Kept:
    """sort, topk: right if padding comes last, as arange(T) has it. NaN counts as the greatest."""
    x, args = call.args["self"], call.args
    dtype = x.meta["val"].dtype
    down = args.get("descending", args.get("largest"))
    for d in set(moving_dims(x)) & set(_dims(call)):
        fill = call.rows(x).fills.get(d)
        if not down and isinstance(fill, str) and fill == BEYOND:
            continue  # above all true ones, and equal to none
        if down or not dtype.is_floating_point:
            last = is_all(fill, _limit(-math.inf if down else math.inf, dtype))
        else:
            last = isinstance(fill, torch.Tensor) and bool(fill.isnan().all())
        if not last:
            refuse_unordered(call, x, d, down)
        positions = any(y.args[1] == 1 and y.users for y in call.node.users)
        if (positions or call.name == "argsort") and not args.get("stable"):
            raise Mixes(
                f"takes positions by {call.name} over {call.dim(x, d)}, where a true row that "
                "equals padding may come behind it. Sort so that equal ones stay in order: "
                "x.sort(stable=True), x.argsort(stable=True)"
            )
    return Kept()


def refuse_unordered(call: OpCall, x: Any, dim: int, down: bool) -> NoReturn:
    dtype = x.meta["val"].dtype
    if dtype.is_floating_point:
        other = "float('-inf')" if down else "float('nan')"
    else:
        other = f"torch.iinfo(x.dtype).{'min' if down else 'max'}"
    raise Mixes(
        f"takes {call.name} over {call.dim(x, dim)}, and a key has rows of padding there. Let them "
        f"come last: {valid(call.dim(x, dim))}"
        f"{where_valid(ndim(x), dim, 'x', other)}"
    )


def _sum_over(dims: list[int], rank: int) -> str:
    """The end of a mean over these dims of `x`, of rows that `valid` tells."""
    if len(dims) == 1:
        return f"sum({dims[0]}) / valid.sum()"
    return f"sum({dims if len(dims) < rank else ''}) / (valid.sum() * <elements of a row>)"


def never(call: OpCall) -> Kept:
    """mean, std, flip, ...: along T or R they mix whatever padding holds."""
    x = call.args["self"]
    over = call.args.get("dims", None)
    if over is None or (over == [] and call.name == "roll"):  # rolls all elements
        over = _dims(call)
    over = [d % max(ndim(x), 1) for d in over]
    for d in set(moving_dims(x)) & set(over):
        fix = (
            f"Divide the sum of the true rows by their number: {valid(call.dim(x, d))}"
            f"{where_valid(ndim(x), d, 'x', '0')}.{_sum_over(over, ndim(x))}"
            if call.name in ("mean", "var", "std", "var_mean")
            else "Return the rows, and do it outside; or say that it is undone: fg.trust_rows(x)"
        )
        raise Mixes(
            f"takes {call.name} over {call.dim(x, d)}, and a key has rows of padding there. {fix}"
        )
    plain = is_tensor(call.node) and not moving_dims(call.node)
    return Kept(value=constant(call)) if plain else Kept()


def running(call: OpCall) -> Kept:
    """cumsum and its kind: a row sees none behind it. Counts of repeats need zeros."""
    counts: Any = call.args.get("repeats")
    for d in moving_dims(counts) if is_tensor(counts) else ():
        if not is_all(call.rows(counts).fills.get(d), 0):
            raise Mixes(
                f"repeats by {call.dim(counts, d)} counts ({call.name}), and those of padding are "
                "not known to be 0: they would add up to more than output_size. Let them be 0: "
                f"{valid(call.dim(counts, d))}torch.where(valid, counts, 0)",
                fails=True,
            )
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
    scores = call.args["self"].meta["val"].shape
    classes, moving = size_of(scores[min(1, len(scores) - 1)]), moving_dims(target)
    if moving and not ignored and not is_there(call.rows(target), moving, classes, from_end=False):
        raise Mixes(
            "takes the loss of what padding of a target names, which may be no class: an error, or "
            "the end of a process, for rows of padding alone. Let it ignore them: "
            f"{valid(call.dim(target, 0))}target = torch.where(valid, target, -100)",
            fails=True,
        )
    if reduced and moving_dims(target) and not ignored:
        raise Mixes(
            f"takes the loss over {call.dim(target, 0)}, and a key has rows of padding there. Let "
            f"it ignore them: {valid(call.dim(target, 0))}target = torch.where(valid, target, -100)"
        )
    return Kept()


def product(call: OpCall) -> Kept:
    """Matrix products. The dim that is summed over needs zeros in the padding of one side, and
    finite numbers in that of the other, since 0 * NaN is NaN. Weights are taken to be finite."""
    added = call.name in ("addmm", "baddbmm", "addmv")  # then what is added to comes first
    a, b, *_ = [x for x in call.args.values() if is_tensor(x)][added:]
    rank_a, rank_b = ndim(a), ndim(b)
    d, e = rank_a - 1, max(rank_b - 2, 0)
    summed = d in moving_dims(a) or e in moving_dims(b)
    if summed and not _cancels(call, (a, d), (b, e)) and not _cancels(call, (b, e), (a, d)):
        refuse_unmasked(call, a, d, 0)
    if summed:
        return Kept()
    fills = _finite_rows(call, a, b)
    if call.name not in ("mm", "bmm", "mv"):
        return Kept(fills)
    for i in moving_dims(call.node):
        of_b = i == rank_a - 1 and rank_b > 1
        sides = [(b, rank_b - 1, a)] if of_b else [(a, i, b)]
        sides += [(b, i, a)] if i < rank_a - 2 else []
        both = not of_b and i < rank_a - 2 and all(
            is_all(call.rows(x).fills.get(i), 0) for x in (a, b)
        )  # fmt: skip
        if both or any(
            is_all(call.rows(x).fills.get(at), 0) and _all_finite(call, y) for x, at, y in sides
        ):
            fills[i] = call.zero
    return Kept(fills)


def _finite_rows(call: OpCall, a: Any, b: Any) -> dict[int, Any]:
    """Rows of padding that are finite, since they are of one operand, and the other is weights."""
    first = next(x for x in call.args.values() if is_tensor(x))
    scales = [call.args.get(name, 1) for name in ("alpha", "beta")]
    finite = call.value.dtype in WIDE and all(map(math.isfinite, scales))
    if not finite or not (first is a or call.rows(first).held):
        return {}
    return {
        i: FINITE
        for i in moving_dims(call.node)
        if i < ndim(a) - 1 and _all_finite(call, b) and finite_padding(call, a, i)
    }


def _all_finite(call: OpCall, x: Any) -> bool:
    """Whether all of an operand is finite: weights, integers, constants."""
    state, dtype = call.rows(x), x.meta["val"].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    return state.held if state.value is None else is_finite(state.value)


def _cancels(call: OpCall, zeros: tuple[Any, int], other: tuple[Any, int]) -> bool:
    """Whether the padding of one operand makes zeros of that of the other."""
    fill = call.rows(zeros[0]).fills.get(zeros[1])
    nothing = is_all(fill, 0) or (isinstance(fill, str) and fill == VANISHING)
    return nothing and finite_padding(call, *other)


def finite_padding(call: OpCall, x: Any, dim: int) -> bool:
    """Whether padding along a dim is known to be finite."""
    fill, dtype = call.rows(x).fills.get(dim), x.meta["val"].dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        return True
    return fill == VANISHING if isinstance(fill, str) and fill != FINITE else is_finite(fill)


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
        over = [d for d in range(rank) if d != 1] if training else []
    for d in set(moving_dims(x)) & set(over):
        raise Mixes(
            f"normalizes over {call.dim(x, d)}, and a key has rows of padding there. Normalize "
            "over the features of each row, or pass the statistics in"
        )
    if not is_safe(call):
        return Kept()
    return Kept({d: FINITE for d in moving_dims(x) if is_finite(call.rows(x).fills.get(d))})


def is_safe(call: OpCall) -> bool:
    """Whether a norm gives finite numbers of finite rows: a layer norm with an eps does."""
    scales = [call.args.get(name) for name in ("weight", "bias")]
    held = all(_all_finite(call, x) for x in scales if is_tensor(x))
    eps = call.args.get("eps", 0)
    return call.name == "native_layer_norm" and held and eps > 0 and dtype_of(call) in WIDE


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
    """Keys in T or R need a causal mask over the same rows, or -inf in the padding of the mask.

    And finite padding in keys and values themselves: what is masked is still multiplied by 0.
    """
    key, query, value = (call.args[name] for name in ("key", "query", "value"))
    last = ndim(key) - 2
    if last + 1 in moving_dims(key):
        raise Mixes(
            f"attends by products over {call.dim(key, last + 1)}, a head's width, and a key has "
            "rows of padding there. Let heads be of one width: x[None, :, None] of (T, D) rows"
        )
    if last not in moving_dims(key):
        return Kept()
    same = call.dim(key, last) == call.dim(query, ndim(query) - 2)
    masks = [call.args.get(name) for name in ("attn_mask", "attn_bias")]
    mask = next((x for x in masks if is_tensor(x)), None)
    masked = bool(call.args.get("is_causal")) and same
    if not masked and mask is not None:
        fill = call.rows(mask).fills.get(ndim(mask) - 1)
        masked = is_all(fill, 0 if mask.meta["val"].dtype is torch.bool else -math.inf)
    if not masked:
        refuse_unmasked(call, key, last, -math.inf)
    for name, x in (("keys", key), ("values", value)):
        if not finite_padding(call, x, ndim(x) - 2):
            raise Mixes(
                f"attends over {call.dim(key, last)}, and the {name} of padding may be NaN or "
                "infinite, which the mask multiplies by 0: NaN in every row. Let them be 0: "
                f"{valid(call.dim(key, last))}{where_valid(ndim(x), ndim(x) - 2, name, '0')}"
            )
    return Kept()
