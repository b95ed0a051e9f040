"""Which numbers the elements of an integer tensor lie between: of its true rows, and of all.

An index into T or R rows must not be negative in a true row: x[-1] is a key's last row. And what
padding looks up must be there, or the device stops: an index error of a kernel ends the process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import is_op, is_size, is_tensor
from fngraph.fx.rows.state import OFFSETS, Kept, OpCall, op_name
from fngraph.fx.schemas import named

_ALONG = set(
    """alias clone contiguous detach expand index index_select gather permute transpose t slice
    select narrow squeeze unsqueeze view _unsafe_view reshape _reshape_alias repeat flip sort amax
    amin max min cummax cummin split split_with_sizes unbind topk embedding roll
    repeat_interleave lift_fresh lift_fresh_copy unfold diagonal _unsafe_index""".split()
)  # the elements of their first tensor
_CHOICES = {"where": ("self", "other"), "masked_fill": ("self", "value"), "cat": ("tensors",),
            "stack": ("tensors",), "minimum": ("self", "other")}  # fmt: skip
_ARGS = {"argmax", "argmin", "argsort"}  # of numbers along a dim
_SHIFTS = {"add", "sub", "rsub", "clamp", "clamp_min", "clamp_max", "relu", "abs"}
_SECOND = {"sort", "topk", "max", "min", "cummax", "cummin"}  # likewise, as their second result


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
    """Whether a <= b wherever T and R are 1 or more."""
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
    if not rest.is_polynomial():
        return False
    more = sympy.expand(rest.subs({s: s + 1 for s in rest.free_symbols}))
    return all(c >= 0 for c in sympy.Poly(more, *more.free_symbols).coeffs())


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
    span = _fitting(dtype, _span(call, state))
    low = max(state.low, _lowest(call, state))
    if span is not None and isinstance(span.low, int):
        low = max(low, span.low)
    return dataclasses.replace(state, low=low, span=span)


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
    if dtype is torch.bool:
        return dataclasses.replace(state, low=0, span=Span(0, 1))
    if dtype.is_floating_point or dtype.is_complex:
        return state
    if dtype is torch.uint8:
        return dataclasses.replace(state, low=0, span=Span(0, 255))
    if leaf.buffer is None:
        return state
    if leaf.buffer.pad == "stride":
        return dataclasses.replace(state, low=0, span=None if tokens is None else Span(0, tokens))
    return state if leaf.buffer.min is None else dataclasses.replace(state, low=leaf.buffer.min)


def _of_value(value: torch.Tensor) -> Span | None:
    return Span(int(value.min()), int(value.max())) if value.numel() else None


def _fitting(dtype: torch.dtype, span: Span | None) -> Span | None:
    """The span, if no number of it could have wrapped around."""
    if span is None or dtype is torch.bool:
        return None if span is None else Span(0, 1)
    least, most = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    wide = dtype in (torch.int32, torch.int64)  # in which every number of rows fits
    low = at_most(least, span.low) if isinstance(span.low, int) else wide
    high = at_most(span.high, most) if isinstance(span.high, int) else wide
    return span if low and high else None


def _source(call: OpCall) -> tuple[fx.Node, int]:
    """The op that a result is of, and which of its results."""
    node = call.node
    if is_op(node):
        return node, 0
    source, number = node.args
    return source, int(number)  # type: ignore[arg-type,return-value]


def _span(call: OpCall, state: Kept) -> Span | None:
    source, number = _source(call)
    name, args = op_name(source), named(source.target, source.args, source.kwargs)
    if call.value.dtype is torch.bool:
        return Span(0, 1)
    if state.value is not None:
        return _of_value(state.value)
    found = _count(name, number, args)
    if found is not None:
        return found
    if name == "_to_copy" or _moves(name, number, args):
        return _of(call, next((x for x in args.values() if is_tensor(x)), None))
    if name in ("minimum", "maximum"):
        return _extreme(name, _of(call, args["self"]), _of(call, args["other"]))
    if name in _CHOICES:
        return _chosen(call, name, args)
    if name in ("arange", "zeros", "ones", "zeros_like", "ones_like", "new_zeros", "new_ones",
                "full", "full_like", "new_full", "eye"):  # fmt: skip
        return _made(name, args, call.value)
    return _computed(call, name, args)


def _moves(name: str, number: int, args: Mapping[str, Any]) -> bool:
    """Whether a result has elements of the op's first tensor; x.view(dtype) has other ones."""
    return name in _ALONG and not number and "dtype" not in args


def _count(name: str, number: int, args: Mapping[str, Any]) -> Span | None:
    """Positions along a dim."""
    if name in _ARGS or (number == 1 and name in _SECOND):
        x, dim = args["self"].meta["val"], args.get("dim", -1)
        if name in ("argmax", "argmin") and dim is None:
            size = math.prod(map(size_of, x.shape))
        else:
            size = size_of(x.shape[dim]) if x.dim() else 1
        return Span(0, size - 1)
    if name in ("searchsorted", "bucketize"):
        edges = args.get("sorted_sequence", args.get("boundaries"))
        return Span(0, size_of(edges.meta["val"].shape[-1]))
    return None


def _of(call: OpCall, x: Any) -> Span | None:
    if isinstance(x, bool | int):
        return Span(int(x), int(x))
    if not is_tensor(x) or x.meta["val"].dtype.is_floating_point:
        return None
    return getattr(call.states[x], "span", None)


def _chosen(call: OpCall, name: str, args: Mapping[str, Any]) -> Span | None:
    given = [args[n] for n in _CHOICES[name]]
    spans = [_of(call, x) for x in (given[0] if name in ("cat", "stack") else given)]
    if any(s is None for s in spans) or (ANY in spans and not all(s == ANY for s in spans)):
        return None
    result = spans[0]
    for span in spans[1:]:
        result = result | span  # type: ignore[operator]
    return result


def _extreme(name: str, a: Span | None, b: Span | None) -> Span | None:
    if a is None or b is None or ANY in (a, b):
        return a if a == b else None
    pick = _least if name == "minimum" else _most
    return Span(pick(a.low, b.low), pick(a.high, b.high))


def _made(name: str, args: Mapping[str, Any], value: torch.Tensor) -> Span | None:
    if name == "arange":
        start, step, end = (args.get(n) for n in ("start", "step", "end"))
        first, last = 0 if start is None else start, _number(end)
        plain = step in (None, 1) and isinstance(first, int) and last is not None
        return Span(first, last - 1) if plain else None  # type: ignore[operator]
    if "full" in name:
        fill = args["fill_value"]
        return Span(int(fill), int(fill)) if isinstance(fill, bool | int) else None
    return Span(0 if "zeros" in name or name == "eye" else 1, 0 if "zeros" in name else 1)


def _number(x: Any) -> Any:
    """An int, or an expression in T and R; else None."""
    if isinstance(x, fx.Node):
        x = x.meta.get("val")
    return size_of(x) if isinstance(x, int | torch.SymInt) else None


def _computed(call: OpCall, name: str, args: Mapping[str, Any]) -> Span | None:
    a, b = _of(call, args.get("self")), _of(call, args.get("other"))
    plain = args.get("alpha") in (None, 1) and args.get("rounding_mode") in (None, "floor")
    if ANY in (a, b) and name not in ("remainder", "bitwise_and", "count_nonzero"):
        return ANY if name in _SHIFTS else None  # a product of what fits may not
    if name == "rsub" and a and b and plain:
        return Span(b.low - a.high, b.high - a.low)
    if name in ("add", "sub") and a and b and plain:
        return (
            Span(a.low + b.low, a.high + b.high) if name == "add"
            else Span(a.low - b.high, a.high - b.low)
        )  # fmt: skip
    if name == "mul" and a and b and at_most(0, a.low) and at_most(0, b.low):
        return Span(a.low * b.low, a.high * b.high)
    if name in ("clamp", "clamp_min", "clamp_max"):
        return _clamped(call, args, a)
    if name == "remainder" and b and b.low == b.high and isinstance(b.low, int) and b.low > 0:
        return Span(0, b.low - 1)
    divides = name == "floor_divide" or (name == "div" and args.get("rounding_mode") == "floor")
    if divides and a and b and at_most(0, a.low) and at_most(1, b.low):
        return Span(0, a.high)
    if name == "bitwise_and":
        masks = [s.high for s in (a, b) if s and s != ANY and at_most(0, s.low)]
        return Span(0, masks[0]) if masks else None
    if name in ("relu", "abs") and a and at_most(0, a.low):
        return a
    if name in ("sum", "cumsum", "count_nonzero"):
        shape, dims = args["self"].meta["val"].shape, args.get("dim")
        dims = [dims] if isinstance(dims, int) else dims or range(len(shape))
        many = math.prod(size_of(shape[d]) for d in dims) if shape else 1
        one = Span(0, 1) if name == "count_nonzero" else a
        if one and at_most(0, one.low):
            return Span(0, one.high * many)
    return None


def _clamped(call: OpCall, args: Mapping[str, Any], a: Span | None) -> Span | None:
    low, high = _of(call, args.get("min")), _of(call, args.get("max"))
    if (args.get("min") is not None and low is None) or (
        args.get("max") is not None and high is None
    ):
        return None
    lows = [s.low for s in (a, low) if s]
    highs = [s.high for s in (a, high) if s]
    if not lows or not highs:
        return None
    least = lows[0] if len(lows) == 1 else _most(*lows)  # of the two lower bounds, the greater
    if high is not None:  # the upper bound is what counts where the two cross
        least = _least(least, high.low)
    most = highs[0] if len(highs) == 1 else _least(*highs)
    if low is not None:
        most = most if high is not None else _most(most, low.high)
    return Span(least, most)


def _lowest(call: OpCall, state: Kept) -> float:
    """A number that no true element is below; -inf if none is known."""
    if call.value.dtype in (torch.bool, torch.uint8):
        return 0
    source, number = _source(call)
    name, args = op_name(source), named(source.target, source.args, source.kwargs)
    first = next((x for x in args.values() if is_tensor(x)), None)

    def of(x: Any) -> float:
        if is_tensor(x):
            return getattr(call.states[x], "low", -math.inf)  # type: ignore[no-any-return]
        if is_size(x) and _number(x) is not None:
            return 0 if at_most(0, _number(x)) else -math.inf
        return x if isinstance(x, int) else -math.inf

    if name == "slice" and isinstance(args["start"], int) and args["start"] > 0:
        if any(isinstance(f, str) and f == OFFSETS for f in call.rows(first).fills.values()):
            return 1  # offsets without their leading 0: each request has brought a token
    if _moves(name, number, args):
        return of(first)
    if name == "_to_copy":
        wide = torch.iinfo(call.value.dtype).max >= _most_of(first)
        return of(first) if wide else -math.inf
    a, b = of(args.get("self")), of(args.get("other"))
    if name == "sub" and isinstance(args["other"], int) and args.get("alpha") == 1:
        return a - args["other"] if a >= 0 and args["other"] >= 0 else -math.inf
    if name in ("floor_divide", "bitwise_right_shift") and min(a, b) >= 0:
        return 0
    if name == "bitwise_and" and max(a, b) >= 0:
        return 0
    if name == "bitwise_or" and min(a, b) >= 0:
        return 0
    if name == "remainder" and b > 0:  # the divisor's sign
        return 0
    if name in ("clamp", "clamp_min", "clamp_max"):
        low = max(a, of(args["min"])) if args.get("min") is not None else a
        return low if args.get("max") is None else min(low, of(args["max"]))
    if name == "maximum":
        return max(a, b)
    if name in _CHOICES:
        given = [args[n] for n in _CHOICES[name]]
        return min(map(of, given[0] if name in ("cat", "stack") else given))
    return -math.inf


def _most_of(x: Any) -> float:
    dtype = x.meta["val"].dtype
    if dtype.is_floating_point or dtype.is_complex:
        return math.inf
    return 1 if dtype is torch.bool else torch.iinfo(dtype).max
