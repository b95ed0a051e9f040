"""What padding holds after a pointwise op: the op itself, run on what it held before.

    valid = batch.slot >= 0          # padded with -1: False in padding
    torch.where(valid, x, 0)         # so this is 0 there, whatever x is

Exact where every operand's padding is known, or where one of them decides alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from typing import Any

import torch

from fngraph.fx.advice import valid
from fngraph.fx.nodes import flat, is_tensor, operands
from fngraph.fx.rows.state import (
    FINITE,
    VANISHING,
    Fill,
    Kept,
    Mixes,
    OpCall,
    is_finite,
    is_moving,
    moving_dims,
    ndim,
)

_LONG = {torch.uint16, torch.uint32, torch.uint64}  # which torch compares with no signed ones
_LARGEST = 1 << 16  # elements of a constant that is worth computing
_COPIES = {"_to_copy", "clone", "to", "lift_fresh", "lift_fresh_copy", "contiguous", "copy"}
WIDE = (torch.float32, torch.float64, torch.bfloat16)
"""Dtypes beyond whose range nobody's numbers are taken to go. Half precision ends at 65504."""
DIVISIONS = ("floor_divide", "remainder", "fmod", "div", "divide", "true_divide")
_PICKS = ("threshold_backward", "hardtanh_backward", "leaky_relu_backward")
"""Gradients that are picked by x, and not multiplied by what is made of it."""
_SLOPES = frozenset(
    """sigmoid_backward tanh_backward silu_backward gelu_backward elu_backward mish_backward
    softplus_backward log_sigmoid_backward hardsigmoid_backward hardswish_backward""".split()
)  # gradients that are multiplied by what is finite wherever x is
_SMOOTH = frozenset(
    """add sub rsub mul neg abs square tanh sigmoid relu silu gelu sin cos where masked_fill maximum
    minimum clamp clamp_min clamp_max _to_copy clone copy alias lift_fresh addcmul lerp erf softplus
    tanh_backward sigmoid_backward silu_backward gelu_backward threshold_backward""".split()
)  # which make no NaN and no infinity of finite numbers


def pointwise(call: OpCall) -> Kept:
    """An op that computes each element from the same element of its operands."""
    refuse_counts(call)
    _refuse_zero_divisors(call)
    said, unsaid = _origin(call)
    if not is_tensor(call.node):
        return Kept(said=said, unsaid=unsaid)
    if call.value.dtype not in (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8):
        said = ""  # no index
    moving = moving_dims(call.node)
    if not moving:
        return Kept(value=constant(call))
    fills = {dim: fill for dim in moving if (fill := _fill(call, dim)) is not None}
    return Kept(fills, said=said, unsaid=unsaid)


def refuse_counts(call: OpCall) -> None:
    """Raise `Mixes` if an argument is a number made of T or R."""
    for x in flat(call.args):
        if is_moving(x):
            raise Mixes(
                f"computes with {call.text(x.meta['val'])}, which in a key is the padded number "
                f"of rows ({call.name}). Count the true ones: "
                f"{valid(call.text(x.meta['val']))}valid.sum()",
                fails=call.name == "repeat_interleave",  # whose counts must add up to it
            )


def _refuse_zero_divisors(call: OpCall) -> None:
    divisor: Any = call.args.get("other")
    if call.name not in DIVISIONS or not is_tensor(divisor) or not moving_dims(divisor):
        return
    dtype, state = call.value.dtype, call.rows(divisor)
    if dtype.is_floating_point or dtype.is_complex:
        return
    fills = [state.fills.get(d) for d in moving_dims(divisor)]
    one = len(fills) == 1 and isinstance(fills[0], torch.Tensor) and bool((fills[0] != 0).all())
    if not one and not (state.span is not None and state.span.within(1, state.span.high)):
        raise Mixes(
            f"divides integers by what may be 0 in padding ({call.name}), which is an error for "
            "rows of padding alone. Let it not be: divisor.clamp(min=1)",
            fails=True,
        )


def _origin(call: OpCall) -> tuple[str, str | None]:
    """`said` and `unsaid` of the operands that padding comes from."""
    chosen = _chosen_operands(call)
    given = operands(call.node) if chosen is None else chosen
    states = [call.rows(x) for x in given if moving_dims(x)]
    unsaid = next((s.unsaid for s in states if s.unsaid), None)
    if chosen is not None:  # a choice between true rows and padding says what padding is to be
        return "" if unsaid else "where", unsaid
    if not _tells_apart(call):  # true rows may be sent to padding's row as well
        return "", unsaid
    said = {s.said for s in states}
    return "" if "" in said else "pad" if "pad" in said else "where", unsaid


def _tells_apart(call: OpCall) -> bool:
    """Whether numbers that differ still differ in the result."""
    if call.name == "_to_copy":
        given = operands(call.node)
        if not given:  # a number
            return True
        old, new = given[0].meta["val"].dtype, call.value.dtype
        whole = not any(d.is_floating_point or d.is_complex for d in (old, new))
        if old == new or {old, new} & _LONG:
            return old == new
        return whole and torch.promote_types(old, new) == new
    shifts = call.name in ("add", "sub") and not is_tensor(call.args["other"])
    return shifts or call.name in _COPIES or call.name == "neg"


def _chosen_operands(call: OpCall) -> list[Any] | None:
    """The chosen one, where a choice is known."""
    args = call.args
    pairs = {"where": ("condition", "self", "other"), "masked_fill": ("mask", "value", "self")}
    if call.name in pairs:
        mask, yes, no = (args[name] for name in pairs[call.name])
        fills = [call.rows(mask).fills.get(d) for d in moving_dims(mask)]
        for number, chosen in ((1, yes), (0, no)):
            if fills and all(is_all(fill, number) for fill in fills):
                return [chosen] if is_tensor(chosen) else []
    return None


def constant(call: OpCall) -> torch.Tensor | None:
    """The result of an op on constants, if it is small."""
    if call.value.numel() > _LARGEST:
        return None
    values: dict[Any, Any] = {x: call.rows(x).value for x in operands(call.node)}
    if any(v is None for v in values.values()):
        return None
    exact = not any(_wide(v).isnan().any() for v in values.values())
    return evaluated(call, values) if exact else _computed(call, values)


def _fill(call: OpCall, dim: int) -> Fill | None:
    rank = call.value.dim()
    known: dict[Any, Fill | None] = {}
    for x in operands(call.node):
        at = dim - rank + ndim(x)
        state = call.rows(x)
        weights = FINITE if state.held and state.value is None else state.value
        known[x] = state.fills.get(at) if at in moving_dims(x) else weights
    found = _known_fill(call, known)
    return FINITE if found is None and _stays_finite(call, known) else found


def _known_fill(call: OpCall, known: dict[Any, Fill | None]) -> Fill | None:
    marks = [fill for fill in known.values() if isinstance(fill, str)]
    finite = {x for x, f in known.items() if _stays_number(call, x, f)}
    if marks:
        known = {x: None if isinstance(f, str) else f for x, f in known.items()}
        return marks[0] if _goes_on(call, marks[0]) else _decided(call, known, finite)
    if all(fill is not None for fill in known.values()):
        return _computed(call, known)
    return _decided(call, known, finite)


def _stays_number(call: OpCall, x: Any, fill: Fill | None) -> bool:
    """Whether padding of an operand is finite, in the result's dtype: 2**20 is not in half
    precision, nor any integer of 32 bits for sure."""
    own, dtype = x.meta["val"].dtype, call.value.dtype
    if isinstance(fill, torch.Tensor):
        return is_finite(fill.to(torch.promote_types(own, dtype) if own.is_complex else dtype))
    if not dtype.is_floating_point or own is torch.bool:
        return not _may_be_infinite(x) or is_finite(fill)
    if not _may_be_infinite(x):
        return torch.iinfo(own).max <= torch.finfo(dtype).max
    return is_finite(fill) and torch.finfo(own).max <= torch.finfo(dtype).max


def _computed(call: OpCall, known: Mapping[Any, Any]) -> torch.Tensor | None:
    """The op on padding; none where it differs for 0 and -0.0, which a fill of 0 may be, or for NaN
    with its sign, which a CPU gives (log(-1)) and CUDA does not."""
    values = {x: _in_dims_of(x, fill) for x, fill in known.items()}
    result = evaluated(call, values)
    signed = {x: v for x, v in values.items() if _has_loose_sign(v)}
    if result is None or not signed:
        return result
    complexes = any(v.is_complex() for v in signed.values())
    for parts in _PARTS if complexes else _PARTS[:1]:
        other = {x: _negated(v, *parts) for x, v in signed.items()}
        twin = evaluated(call, values | other)
        if twin is None or not torch.allclose(result, twin, 0, 0, equal_nan=True):
            return None
    return result


_PARTS = ((True, True), (True, False), (False, True))
"""Which zeros and NaN may be of the other sign: of real and of imaginary parts. Real numbers are
the first of both."""


def _has_loose_sign(fill: torch.Tensor) -> bool:
    if fill.is_complex():
        fill = torch.view_as_real(fill.resolve_conj())
    return fill.is_floating_point() and bool(_loose(_wide(fill)).any())


def _negated(fill: torch.Tensor, real: bool, imaginary: bool) -> torch.Tensor:
    """With its zeros and NaN of the other sign."""
    if fill.is_complex():
        a, b = fill.real, fill.imag
        return torch.complex(_negated(a, real, False), _negated(b, imaginary, False))
    wide = _wide(fill)
    return torch.where(_loose(wide), -wide, wide).to(fill.dtype) if real else fill


def _loose(x: torch.Tensor) -> torch.Tensor:
    return (x == 0) | x.isnan()


def _wide(fill: torch.Tensor) -> torch.Tensor:
    return fill.float() if fill.itemsize == 1 else fill  # for float8 torch has no comparisons


def _in_dims_of(x: Any, fill: torch.Tensor) -> torch.Tensor:
    """A number of a tensor's: in as many dims, since of none it would yield to others' dtypes."""
    return fill if fill.dim() else fill.reshape([1] * ndim(x))


def _may_be_infinite(x: Any) -> bool:
    dtype = x.meta["val"].dtype
    return bool(dtype.is_floating_point or dtype.is_complex)


def _stays_finite(call: OpCall, known: Mapping[Any, Fill | None]) -> bool:
    """Whether an op of finite numbers gives some, as far as its dtype goes."""
    if call.name == "nan_to_num":
        numbers = (call.args[name] for name in ("nan", "posinf", "neginf"))
        return call.value.dtype in WIDE and all(n is None or math.isfinite(n) for n in numbers)
    if call.value.dtype not in WIDE:
        return False
    finite = all(is_finite(f) or not _may_be_infinite(x) for x, f in known.items())
    return bool(known) and finite and is_smooth(call)


def dtype_of(call: OpCall) -> torch.dtype:
    """A result's; of several, the first's; of none, one that is always finite."""
    values = flat(call.node.meta.get("val"))
    return next((x.dtype for x in values if isinstance(x, torch.Tensor)), torch.bool)


def is_smooth(call: OpCall) -> bool:
    """Whether an op computes finite numbers of finite ones, each of its own."""
    numbers = [x for x in call.args.values() if isinstance(x, int | float)]
    if not all(map(math.isfinite, numbers)):
        return False
    if call.name == "div":
        other = call.args["other"]
        if is_tensor(other) or not other or call.args.get("rounding_mode"):
            return False
    elif call.name == "pow":
        power = call.args.get("exponent")
        if not isinstance(power, int | float) or power < 1 or power != int(power):
            return False
    elif call.name not in _SMOOTH:
        return False
    return True


def _goes_on(call: OpCall, mark: str) -> bool:
    """Whether padding still is what a mark says: in copies."""
    if mark == FINITE or call.name == "copy":  # which has none of what it overwrites
        return False
    if mark == VANISHING:
        return call.name in _COPIES and call.value.dtype.is_floating_point
    wraps = call.value.dtype not in (torch.int32, torch.int64)
    return call.name in _COPIES and not wraps


def evaluated(call: OpCall, values: dict[Any, Any]) -> torch.Tensor | None:
    """The op on CPU values in place of its operands; None where it does not take them."""

    def value(x: Any) -> Any:
        if isinstance(x, list | tuple):
            return [value(y) for y in x]
        return values[x] if is_tensor(x) else x

    target: Any = call.node.target
    if target._schema.is_mutable:
        functional = getattr(torch.ops.aten, call.name, None)
        target = getattr(functional, target._overloadname, None)
    given = {name: value(x) for name, x in call.args.items()}
    if given.get("device") is not None:
        given["device"] = torch.device("cpu")
    given.pop("pin_memory", None)
    order = [a.name for a in target._schema.arguments if not a.kwarg_only] if target else []
    named = {a.name for a in target._schema.arguments} if target else set()
    try:
        result = target(*[given.pop(name) for name in order],
                        **{k: v for k, v in given.items() if k in named})  # fmt: skip
    except (RuntimeError, TypeError, IndexError, KeyError, NotImplementedError):
        return None
    if not isinstance(result, torch.Tensor) or result.dtype != call.value.dtype:
        return None
    if not _same_anywhere(result.dtype, values):
        return None
    return result if result.numel() <= _LARGEST else None


def _same_anywhere(dtype: torch.dtype, values: Mapping[Any, torch.Tensor]) -> bool:
    """Whether every device has the same integers for these numbers: for NaN and for what is beyond
    them each has its own."""
    if dtype.is_floating_point or dtype.is_complex or dtype == torch.bool:
        return True
    least, most = float(torch.iinfo(dtype).min), float(torch.iinfo(dtype).max)
    if dtype == torch.int64:  # most is no float
        most = math.nextafter(most, 0)
    floats = [_wide(v).double() for v in values.values() if v.is_floating_point()]
    return all(bool(((v.trunc() >= least) & (v.trunc() <= most)).all()) for v in floats)


def is_all(fill: Fill | None, number: float) -> bool:
    """Whether padding holds one number alone."""
    return isinstance(fill, torch.Tensor) and bool((fill == number).all())


def _decided(call: OpCall, known: dict[Any, Any], finite: Set[Any]) -> Fill | None:
    """Where one operand's padding settles it. 0 * x does only where x is finite."""
    args, name = call.args, call.name
    dtype = call.value.dtype

    def of(x: Any) -> Fill | None:
        return known.get(x) if is_tensor(x) else call.rows(x).value

    def among(number: float) -> bool:
        return any(is_all(of(x), number) for x in (args.get("self"), args.get("other")))

    if name == "where":
        return _chosen(of(args["condition"]), of(args["self"]), of(args["other"]), dtype)
    if name == "masked_fill":
        return _chosen(of(args["mask"]), of(args["value"]), of(args["self"]), dtype)
    if name in ("copy", "fill"):  # what was there before does not matter
        source = of(args["src"] if name == "copy" else args["value"])
        return source.to(dtype) if isinstance(source, torch.Tensor) else source
    if name in _PICKS and is_all(of(args.get("grad_output")), 0):
        return call.zero
    given = set(operands(call.node))
    if name == "mul" and among(0) and given <= finite:
        return call.zero
    if name in _SLOPES and dtype in WIDE and is_all(of(args.get("grad_output")), 0):
        return call.zero if given <= finite else None
    if name in ("bitwise_and", "logical_and") and among(0):
        return call.zero
    if name in ("bitwise_or", "logical_or") and dtype is torch.bool and among(1):
        return torch.ones((), dtype=dtype)
    return None


def _chosen(mask: Fill | None, yes: Fill | None, no: Fill | None, dtype: Any) -> Fill | None:
    for number, fill in ((1, yes), (0, no)):
        if is_all(mask, number):
            return fill.to(dtype) if isinstance(fill, torch.Tensor) else fill
    return None
