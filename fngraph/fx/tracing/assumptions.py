"""What a trace assumes of T and R, and for which batches that is not so.

Python asks (`if x.shape[0] > 5`), or torch does otherwise for some sizes without asking:
`x.squeeze(0)` drops a dim if T is 1, and `x[3]` is an error if T is less than 4; in a key, neither.
Or a kernel wants T rows to fit seven, of which its fake says nothing (`fits`).
"""

from __future__ import annotations

import dataclasses
import math
import operator
import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import sympy
import torch
from torch import fx

from fngraph.core import Limits
from fngraph.errors import BranchError
from fngraph.fx.nodes import flat, is_op, line_of, op_name
from fngraph.fx.tracing.fits import Fit, needed
from fngraph.torch_facts.tracing import in_forward_mode

NOUNS = {"T": "tokens", "R": "requests"}
_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b, "Max": max, "Min": min, "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b, "FloatPow": pow, "PowByNatural": pow, "ToFloat": float,
    "TruncToInt": int, "FloorToInt": math.floor, "CeilToInt": math.ceil, "RoundToInt": round,
    "RoundDecimal": round, "TruncToFloat": math.trunc, "BitwiseFn_bitwise_and": operator.and_,
    "BitwiseFn_bitwise_or": operator.or_, "BitwiseFn_bitwise_xor": operator.xor,
    "LShift": operator.lshift, "RShift": operator.rshift, "Where": lambda c, a, b: a if c else b,
}  # fmt: skip
_FUNCTIONS |= {f"OpaqueUnaryFn_{name}": getattr(math, name) for name in dir(math)}


@dataclasses.dataclass(frozen=True)
class Assumption:
    """A condition over T and R, and the user's line that asked for it."""

    condition: Any
    line: str

    def counterexample(self, limits: Limits) -> tuple[int, int] | None:
        """A batch (T, R) within `limits` for which the condition does not hold, or None."""
        holds = sympy.lambdify(sympy.symbols("T R"), self.condition, modules=[_FUNCTIONS, math])
        letters = {symbol.name for symbol in self.condition.free_symbols}
        return next(((t, r) for t, r in _batches(limits, letters) if not holds(t, r)), None)

    def check(self, limits: Limits) -> None:
        """Raise unless the condition holds for every batch within `limits`.

        Raises:
            BranchError: with a batch for which it does not.
        """
        batch = self.counterexample(limits)
        if batch is not None:
            raise BranchError(
                f"{self.line}: Python in forward depends on the number of tokens or requests: the "
                f"trace took the way where {self.condition}, which is false for T={batch[0]}, "
                f"R={batch[1]}. Write one computation for every size (masks, torch.where)"
                f"{self._limited(batch)}"
            )

    def _limited(self, batch: tuple[int, int]) -> str:
        """The limits within which it holds, as advice; "" if there are none: they begin at 1."""
        letters = {symbol.name for symbol in self.condition.free_symbols}
        name, most = ("max_reqs", batch[1]) if letters == {"R"} else ("max_tokens", batch[0])
        return f", or serve no larger batches: Limits({name}={most - 1})" if most > 1 else ""

    def __repr__(self) -> str:
        return f"{self.condition} ({self.line})"


def _batches(limits: Limits, letters: set[str]) -> Iterator[tuple[int, int]]:
    """Every batch within `limits` that differs in what the condition is about.

    For both letters at once that is up to max_tokens * max_reqs of them, some 0.3 us each.
    """
    tokens, reqs = range(1, limits.max_tokens + 1), range(1, limits.max_reqs + 1)
    if "R" not in letters:
        yield from ((t, 1) for t in tokens)
    elif "T" not in letters:
        yield from ((limits.max_tokens, r) for r in reqs if r <= limits.max_tokens)
    else:
        yield from ((t, r) for t in tokens for r in reqs if r <= t)


def implied(gm: fx.GraphModule, letters: Mapping[Any, str]) -> Iterator[Assumption]:
    """Conditions on T and R under which each op does what it did in the trace."""
    seen: set[Any] = set()
    for node in gm.graph.nodes:
        if not is_op(node):
            continue
        for x in flat(node.meta.get("val")):
            for size in x.shape if isinstance(x, torch.Tensor) else ():
                if isinstance(size, torch.SymInt) and (expr := size.node.expr) not in seen:
                    seen.add(expr)
                    known = expr.free_symbols <= letters.keys()
                    if known and not expr.is_nonnegative:  # T - 2, of x[1:-1]: may be none at all
                        yield Assumption(lettered(expr, letters) >= 0, line_of(node))
        ask = _BY_SIZE.get(op_name(node))
        for holds in ask(*node.args) if ask else ():
            yield Assumption(lettered(holds, letters), line_of(node))
        for fit in needed(node):
            yield from _fitting(fit, letters, line_of(node))


def _fitting(fit: Fit, letters: Mapping[Any, str], line: str) -> Iterator[Assumption]:
    """That one of some pairs of sizes is equal, if it is T and R that say whether it is."""
    pairs = [(sympy.sympify(a), sympy.sympify(b)) for a, b in fit]
    moving = set().union(*(n.free_symbols for pair in pairs for n in pair))
    if moving and moving <= letters.keys() and not any(a == b for a, b in pairs):
        holds = [sympy.Eq(lettered(a, letters), lettered(b, letters)) for a, b in pairs]
        yield Assumption(sympy.Or(*holds), line)


def _dropped(x: fx.Node, dims: Any = None) -> Iterator[Any]:
    """That no size of these dims that varies is 1, which alone is dropped."""
    shape = x.meta["val"].shape
    some = range(len(shape)) if dims is None else [dims] if isinstance(dims, int) else dims
    for size in [shape[d] for d in some if shape]:
        if isinstance(size, torch.SymInt):
            yield sympy.Ne(_expr(size), 1)


def _there(x: fx.Node, *args: Any) -> Iterator[Any]:
    """That a row is there whose number, or whose dim, varies; such a number may be of any sign."""
    *_, dim, index = args
    at = index.meta["val"] if isinstance(index, fx.Node) else index
    size, number = _expr(x.meta["val"].shape[dim]), _expr(at)
    for least, may_be in ((number + 1, number >= 0), (-number, number < 0)):
        if may_be is not sympy.false and (holds := size >= least) is not sympy.true:
            yield holds


def _expr(size: Any) -> Any:
    return sympy.sympify(size.node.expr if isinstance(size, torch.SymInt) else size)


_BY_SIZE = {"aten::squeeze": _dropped, "aten::squeeze_": _dropped, "aten::select": _there,
            "aten::select_scatter": _there}  # fmt: skip


def lettered(expr: Any, letters: Mapping[Any, str]) -> Any:
    """A sympy expression with T and R for torch's own symbols."""
    return expr.xreplace({symbol: sympy.Symbol(letter) for symbol, letter in letters.items()})


def size_fixed(expr: Any, value: Any, line: str) -> BranchError:
    """The error about an expression in T and R that became a number."""
    nouns = " and ".join(NOUNS.get(s.name, s.name) for s in expr.free_symbols)
    return BranchError(
        f"{line}: forward fixes the number of {nouns} at {expr} = {value} (len(x), "
        "int(x.shape[0]), range(x.shape[0]), torch.tensor(x.shape[0] / 2), ...). Keep sizes "
        "symbolic: torch.arange(x.shape[0], device=x.device); where a formula needs the count, "
        "take it from the device, as a leaf of the batch that holds it"
    )


def by_transform(line: str) -> BranchError | None:
    """The error if it is within jvp or vmap that a size became a number: torch's rules do that."""
    if in_forward_mode():
        return BranchError(
            f"{line}: torch's forward-mode derivative (torch.func.jvp, jacfwd, hessian) of an op "
            "here fixes the number of tokens or requests. Take it in reverse mode: "
            "torch.func.jacrev for jacfwd, and for jvp(f, (x,), (t,)): pull = torch.func.vjp(f, "
            "x)[1]; torch.func.vjp(lambda u: pull(u)[0], torch.zeros_like(f(x)))[1](t)[0]"
        )
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "_flat_vmap":
        frame = frame.f_back
    if frame is None:
        return None
    return BranchError(
        f"{line}: torch's batching rule (torch.func.vmap, jacrev) of an op here fixes the "
        "number of tokens or requests. Loop over the samples if they are few, "
        "torch.stack([f(x) for x in xs]); or stage a plain tuple or dict of tensors in place "
        "of an fg.struct: its exact shapes are the key then, and no size is symbolic"
    )
