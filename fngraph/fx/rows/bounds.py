"""Which numbers the elements of an integer tensor lie between: of its true rows, and of all.

An index into T or R rows must not be negative in a true row: x[-1] is a key's last row. And what
padding looks up must be there, or the device stops: an index error of a kernel ends the process.

Each op has one rule, from what its operands lie between to what its result does. It runs twice: on
what bounds all elements, and on what bounds the true ones.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.core.buffers import STRIDE
from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import is_op, is_tensor
from fngraph.fx.rows.state import OFFSETS, Kept, OpCall
from fngraph.fx.schemas import named, plain_name
from fngraph.torch_facts.tracing import FloorDiv

LARGEST = 1 << 24
"""More than T and R ever are: numbers made of them fit an integer if they fit it for these."""
_ALONG = set(
    """alias clone contiguous detach expand index index_select gather permute transpose t slice
    select narrow squeeze unsqueeze view _unsafe_view reshape _reshape_alias repeat flip sort amax
    amin max min cummax cummin split split_with_sizes unbind topk embedding roll
    repeat_interleave lift_fresh lift_fresh_copy unfold diagonal _unsafe_index unsafe_split
    unsafe_split_with_sizes split_copy split_with_sizes_copy unbind_copy all_gather
    all_to_all""".split()
)  # the elements of their first tensor
_CHOICES = {"where": ("self", "other"), "masked_fill": ("self", "value"), "cat": ("tensors",),
            "stack": ("tensors",), "copy": ("src",), "fill": ("value",),
            "constant_pad_nd": ("self", "value")}  # fmt: skip
_ARGS = {"argmax", "argmin", "argsort"}  # of numbers along a dim
_SECOND = {"sort", "topk", "max", "min", "cummax", "cummin"}  # likewise, as their second result
_IMAGES = {"max_pool2d_with_indices": 2, "max_pool3d_with_indices": 3, "adaptive_max_pool2d": 2,
           "adaptive_max_pool3d": 3}  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Every element lies from `low` to `high`, which may be expressions in T and R."""

    low: Any
    high: Any

    def within(self, low: Any, high: Any) -> bool:
        """Whether that is within these bounds, at all sizes."""
        return at_most(low, self.low) and at_most(self.high, high)

    def at(self, sizes: Mapping[Any, int]) -> tuple[int, int]:
        """The bounds as numbers."""
        low, high = (n if isinstance(n, int) else int(n.subs(sizes)) for n in (self.low, self.high))
        return low, high

    def __or__(self, other: Span) -> Span:
        return Span(
            self.low if at_most(self.low, other.low) else _least(self.low, other.low),
            self.high if at_most(other.high, self.high) else _most(self.high, other.high),
        )


ANY = Span(sympy.oo, -sympy.oo)
"""Of what the user vouches for: it fits wherever he puts it."""


def at_most(a: Any, b: Any) -> bool:
    """Whether a <= b wherever T and R are 1 or more, and none is beyond `LARGEST`."""
    if isinstance(a, int) and isinstance(b, int):
        return a <= b
    if a == b:  # of infinities too, whose difference is no number
        return True
    if isinstance(a, sympy.Max) or isinstance(b, sympy.Min):
        parts = [(x, b) for x in a.args] if isinstance(a, sympy.Max) else [(a, x) for x in b.args]
        return all(at_most(*pair) for pair in parts)
    if isinstance(a, sympy.Min) or isinstance(b, sympy.Max):
        parts = [(x, b) for x in a.args] if isinstance(a, sympy.Min) else [(a, x) for x in b.args]
        return any(at_most(*pair) for pair in parts)
    rest = sympy.sympify(b) - sympy.sympify(a)
    if rest.is_number:
        return bool(rest >= 0)
    if quotients := sorted(rest.atoms(FloorDiv), key=str):
        return any(at_most(0, x) for x in _with_less(sympy.expand(rest), quotients[0]))
    if not rest.is_polynomial():
        return False
    more = sympy.expand(rest.subs({s: s + 1 for s in rest.free_symbols}))
    terms = sympy.Poly(more, *more.free_symbols).terms()
    return bool(
        sum(c * LARGEST ** sum(powers) for powers, c in terms if c < 0 or not any(powers)) >= 0
    )


def _with_less(x: sympy.Expr, quotient: FloorDiv) -> list[sympy.Expr]:
    """`x` with a bound in place of a rounded quotient that it has; none of them is above `x`."""
    whole, by = quotient.args
    times = x.coeff(quotient)
    rest = sympy.expand(x - times * quotient)
    if not (by.is_Integer and by > 0 and times.is_number and not rest.has(quotient)):
        return []
    if times < 0:
        return [rest + times * whole / by]
    nothing = [rest] if at_most(0, whole) else []
    return [*nothing, rest + times * (whole - by + 1) / by]


def _least(a: Any, b: Any) -> Any:
    return a if at_most(a, b) else b if at_most(b, a) else sympy.Min(a, b)


def _most(a: Any, b: Any) -> Any:
    return b if at_most(a, b) else a if at_most(b, a) else sympy.Max(a, b)


def size_of(n: Any) -> Any:
    """A dim's size, as an int or an expression in T and R."""
    return n.node.expr if isinstance(n, torch.SymInt) else n


def bounded(call: OpCall, state: Kept) -> Kept:
    """What is known of a result, with its bounds."""
    dtype = call.node.meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return state
    true = _result(call, state, _true).low
    low = true if isinstance(true, int) else 0 if at_most(0, true) else -math.inf
    return dataclasses.replace(state, low=max(state.low, low), span=_result(call, state, _all))


def of_constant(state: Kept) -> Kept:
    """A constant's."""
    value = state.value
    if value is None or value.dtype.is_floating_point or value.dtype.is_complex:
        return state
    span = _of_value(value)
    return state if span is None else dataclasses.replace(state, low=span.low, span=span)


def of_leaf(state: Kept, leaf: Leaf, value: torch.Tensor, tokens: Any) -> Kept:
    """A leaf's: what its dtype and its field say."""
    dtype = value.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return state
    if leaf.buffer is None:
        return state
    if leaf.buffer.pad == STRIDE:
        return dataclasses.replace(state, low=0, span=None if tokens is None else Span(0, tokens))
    whole = _whole(dtype)
    low = whole.low if leaf.buffer.min is None else max(whole.low, leaf.buffer.min)
    return dataclasses.replace(state, low=low, span=state.span or whole)


def _of_value(value: torch.Tensor) -> Span | None:
    return Span(int(value.min()), int(value.max())) if value.numel() else None


def _whole(dtype: torch.dtype) -> Span:
    """All numbers of a dtype."""
    if dtype.is_floating_point or dtype.is_complex:
        return Span(-sympy.oo, sympy.oo)
    if dtype is torch.bool:
        return Span(0, 1)
    return Span(torch.iinfo(dtype).min, torch.iinfo(dtype).max)


def _all(call: OpCall, x: Any) -> Span:
    """What all elements of an operand lie between; a number's own."""
    if isinstance(x, bool | int):
        return Span(int(x), int(x))
    if not is_tensor(x):
        size = _number(x)
        return Span(-sympy.oo, sympy.oo) if size is None else Span(size, size)
    known = getattr(call.states[x], "span", None)
    return _whole(x.meta["val"].dtype) if known is None else known


def _true(call: OpCall, x: Any) -> Span:
    """What its true elements lie between."""
    known = _all(call, x)
    if not is_tensor(x):
        return known
    whole = _whole(x.meta["val"].dtype)
    low = getattr(call.states[x], "low", -math.inf)
    if known == ANY:
        known = whole
    return Span(_most(known.low, int(low)), known.high) if low > -math.inf else known


def _number(x: Any) -> Any:
    """An int, or an expression in T and R; else None."""
    if isinstance(x, fx.Node):
        x = x.meta.get("val")
    return size_of(x) if isinstance(x, int | torch.SymInt) else None


def _source(call: OpCall) -> tuple[fx.Node, int]:
    """The op that a result is of, and which of its results."""
    node = call.node
    if is_op(node):
        return node, 0
    source, number = node.args
    return source, int(number)  # type: ignore[arg-type,return-value]


def _result(call: OpCall, state: Kept, look: Callable[[OpCall, Any], Span]) -> Span:
    """What a result lies between, if its operands do between what `look` says."""
    whole = _whole(call.value.dtype)
    source, number = _source(call)
    name, args = plain_name(source.target), named(source.target, source.args, source.kwargs)
    if state.value is not None:
        span = _of_value(state.value)
    elif name == "slice" and look is _true and _without_first(call, args):
        span = Span(1, whole.high)
    else:
        span = _moved(lambda x: look(call, x), name, number, args)
        if span is None:

            def of(x: Any) -> Span:
                known = look(call, x)
                return _whole(x.meta["val"].dtype) if known == ANY else known

            span = _computed(of, name, args)
    fits = span is not None and (span == ANY or span.within(whole.low, whole.high))
    return span if span is not None and fits else whole  # what wraps around may be any number


def _without_first(call: OpCall, args: Mapping[str, Any]) -> bool:
    """Whether it is offsets without their leading 0: each request has brought a token."""
    x, start = args["self"], args["start"]
    mark = call.rows(x).fills.get(args["dim"] % max(x.meta["val"].dim(), 1))
    return isinstance(start, int) and start > 0 and isinstance(mark, str) and mark == OFFSETS


def _moved(
    of: Callable[[Any], Span], name: str, number: int, args: Mapping[str, Any]
) -> Span | None:
    """Of what the user vouches for too: elements of operands, or positions among them."""
    found = _count(name, number, args)
    if found is not None:
        return found
    first = next((x for x in args.values() if is_tensor(x)), None)
    if name in _ALONG and "dtype" not in args:  # x.view(dtype) has other ones
        return of(first)
    if name == "_to_copy" and not first.meta["val"].dtype.is_floating_point:  # type: ignore[union-attr]
        return of(first)
    if name in _CHOICES:
        given = [args[n] for n in _CHOICES[name]]
        spans = [of(x) for x in (given[0] if name in ("cat", "stack") else given)]
        if ANY in spans:
            return ANY if all(s == ANY for s in spans) else None
        result = spans[0]
        for span in spans[1:]:
            result = result | span
        return result
    if name in ("clamp", "clamp_min", "relu") and of(first) == ANY:  # no further from 0
        low, high = args.get("min", 0), args.get("max")
        bounds = isinstance(low, int) and low <= 0 and (high is None or of(high).within(0, high))
        return ANY if bounds else None
    return None


def _count(name: str, number: int, args: Mapping[str, Any]) -> Span | None:
    """Positions along a dim."""
    if name in _ARGS or (number == 1 and name in _SECOND):
        x, dim = args["self"].meta["val"], args.get("dim", -1)
        if name in ("argmax", "argmin") and dim is None:
            size = math.prod(map(size_of, x.shape))
        else:
            size = size_of(x.shape[dim]) if x.dim() else 1
        return Span(0, size - 1)
    if number == 1 and name in _IMAGES:  # of each within its image
        return Span(
            0, math.prod(map(size_of, args["self"].meta["val"].shape[-_IMAGES[name] :])) - 1
        )
    if name in ("searchsorted", "bucketize"):
        edges = args.get("sorted_sequence", args.get("boundaries"))
        return Span(0, size_of(edges.meta["val"].shape[-1]))
    if name == "repeat_interleave" and "self" not in args:
        return Span(0, size_of(args["repeats"].meta["val"].shape[0]) - 1)
    return None


def _computed(of: Callable[[Any], Span], name: str, args: Mapping[str, Any]) -> Span | None:
    """Of numbers that are computed. What does not fit the dtype is told by who asks."""
    rule = _RULES.get(name)
    if rule is not None:
        return rule(of, args)
    if name == "arange":
        first, end, step = args.get("start") or 0, _number(args.get("end")), args.get("step")
        rises = step is None or (isinstance(step, int) and step > 0)
        return (
            Span(first, end - 1) if rises and isinstance(first, int) and end is not None else None
        )
    if name in ("eye", "zero") or "zeros" in name or "ones" in name:
        return Span(int("ones" in name), int("ones" in name or name == "eye"))
    return of(args["fill_value"]) if "full" in name else None


def _add(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span:
    a, b = of(args["self"]), _scaled(of(args["other"]), args.get("alpha"))
    return Span(a.low + b.low, a.high + b.high)


def _sub(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span:
    a, b = of(args["self"]), _scaled(of(args["other"]), args.get("alpha"))
    return Span(a.low - b.high, a.high - b.low)


def _rsub(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span:
    a, b = _scaled(of(args["self"]), args.get("alpha")), of(args["other"])
    return Span(b.low - a.high, b.high - a.low)


def _scaled(a: Span, by: Any) -> Span:
    by = 1 if by is None else by
    return Span(a.low * by, a.high * by) if by > 0 else Span(a.high * by, a.low * by)


def _mul(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    a, b = of(args["self"]), of(args["other"])
    ends = (a.low, a.high, b.low, b.high)
    if all(isinstance(n, int) for n in ends):
        products = [x * y for x in (a.low, a.high) for y in (b.low, b.high)]
        return Span(min(products), max(products))
    known = at_most(0, a.low) and at_most(0, b.low) and sympy.oo not in ends
    return Span(a.low * b.low, a.high * b.high) if known else None


def _floor_divide(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    a, b = of(args["self"]), of(args["other"])
    whole = args.get("rounding_mode", "floor") in ("floor", "trunc")
    return Span(0, a.high) if whole and at_most(0, a.low) and at_most(1, b.low) else None


def _remainder(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    b = of(args["other"])  # the divisor's sign
    return Span(0, b.high - 1) if at_most(1, b.low) else None


def _shift_right(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    a, b = of(args["self"]), of(args["other"])
    return Span(0, a.high) if at_most(0, a.low) and at_most(0, b.low) else None


def _bitwise_and(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    masks = [s.high for s in map(of, (args["self"], args["other"])) if at_most(0, s.low)]
    return Span(0, masks[0] if len(masks) == 1 else _least(*masks)) if masks else None


def _bitwise_or(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    a, b = of(args["self"]), of(args["other"])
    known = all(isinstance(n, int) and n >= 0 for n in (a.low, b.low, a.high, b.high))
    return Span(0, (1 << int(max(a.high, b.high)).bit_length()) - 1) if known else None


def _abs(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    a = of(args["self"])  # of the least number of all: itself
    if at_most(0, a.low):
        return a
    known = isinstance(a.low, int) and isinstance(a.high, int)
    return Span(0, max(-a.low, a.high)) if known else None


def _clamp(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span:
    a = of(args["self"])
    low, high = args.get("min"), args.get("max")
    if low is not None:
        b = of(low)
        a = Span(_most(a.low, b.low), _most(a.high, b.high))
    if high is not None:  # the upper bound is what counts where the two cross
        b = of(high)
        a = Span(_least(a.low, b.low), _least(a.high, b.high))
    return a


def _sum(of: Callable[[Any], Span], args: Mapping[str, Any]) -> Span | None:
    shape, dims = args["self"].meta["val"].shape, args.get("dim")
    dims = [dims] if isinstance(dims, int) else dims or range(len(shape))
    many = math.prod(size_of(shape[d]) for d in dims) if shape else 1
    a = of(args["self"])
    return Span(0, a.high * many) if at_most(0, a.low) and a.high != sympy.oo else None


_RULES: dict[str, Callable[[Callable[[Any], Span], Mapping[str, Any]], Span | None]] = {
    "add": _add, "sub": _sub, "rsub": _rsub, "mul": _mul, "floor_divide": _floor_divide,
    "div": _floor_divide, "remainder": _remainder, "bitwise_right_shift": _shift_right,
    "__rshift__": _shift_right, "bitwise_and": _bitwise_and, "bitwise_or": _bitwise_or,
    "bitwise_xor": _bitwise_or, "abs": _abs, "sum": _sum, "cumsum": _sum, "clamp": _clamp,
    "clamp_min": _clamp, "clamp_max": _clamp,
    "neg": lambda of, args: _scaled(of(args["self"]), -1),
    "relu": lambda of, args: _clamp(of, {"self": args["self"], "min": 0}),
    "minimum": lambda of, args: _clamp(of, {"self": args["self"], "max": args["other"]}),
    "maximum": lambda of, args: _clamp(of, {"self": args["self"], "min": args["other"]}),
    "count_nonzero": lambda of, args: _sum(lambda x: Span(0, 1), args),
}  # fmt: skip
