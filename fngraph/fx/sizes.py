"""T and R as symbols, and a note of everything that the user's Python asks of them.

A graph serves every batch, so `if x.shape[0] > 5` is a question that a trace must not answer for
all of them by one example; `Guard` says for which batches the answer would be another one. Only
questions from outside torch count: torch asks many, whose answers do not change what it computes.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._sympy.functions import Mod, PythonMod

from fngraph.core import Limits
from fngraph.core.where import user_line
from fngraph.errors import BranchError

_NOUNS = {"T": "tokens", "R": "requests"}
_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b, "Max": max, "Min": min, "IntTrueDiv": lambda a, b: a / b,
    "FloatTrueDiv": lambda a, b: a / b, "FloatPow": pow, "PowByNatural": pow, "ToFloat": float,
    "TruncToInt": int, "FloorToInt": math.floor, "CeilToInt": math.ceil,
    "OpaqueUnaryFn_sqrt": math.sqrt, "OpaqueUnaryFn_exp": math.exp, "OpaqueUnaryFn_log": math.log,
}  # fmt: skip
_CLAMPS = {"_compute_slice_index"}  # torch's own, but x[:n] is as long as the answer


@dataclasses.dataclass(frozen=True)
class Guard:
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
                f"R={batch[1]}. Write one computation for every size (masks, torch.where), or "
                f"narrow {limits!r} to sizes for which it holds"
            )

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


class Sizes(ShapeEnv):
    """Torch's environment of symbolic sizes, which notes the user's questions as guards.

    0 and 1 are not special (`specialize_zero_one=False`): torch would take `T == 1` to be false
    without a word. Examples are above one and differ, so that T and R never share a symbol.
    """

    def __init__(self, limits: Limits, taken: Sequence[int]) -> None:
        super().__init__(specialize_zero_one=False, duck_shape=False)
        self.limits = limits
        self.guards_asked: dict[Guard, None] = {}
        examples = example_sizes(limits, taken)
        self.letters = {letter: self._symbol(letter, n) for letter, n in examples.items()}
        self.symbols = {size.node.expr: letter for letter, size in self.letters.items()}

    def _symbol(self, letter: str, example: int) -> Any:
        source = ConstantSource(letter)
        symbol = self.create_symbol(example, source, DimDynamic.DYNAMIC, constraint_dim=None)
        return self.create_symintnode(symbol, hint=example, source=source)

    def evaluate_expr(self, orig_expr: Any, *args: Any, **kwargs: Any) -> Any:
        """Torch's own, with a look at who asks.

        Raises:
            BranchError: the user's Python asks something that not every batch answers alike.
        """
        answer = super().evaluate_expr(orig_expr, *args, **kwargs)
        asks = getattr(orig_expr, "free_symbols", None)
        if asks and (_asked_outside_torch() or _asks_for_a_rest(orig_expr)):
            expr = lettered(orig_expr, self.symbols)
            if not isinstance(answer, bool | sympy.logic.boolalg.BooleanAtom):
                refuse_fixed(expr, answer, user_line())
            guard = Guard(expr if answer else sympy.Not(expr), user_line())
            if guard not in self.guards_asked:
                guard.check(self.limits)
                self.guards_asked[guard] = None
        return answer

    def check_fixed(self, line: str) -> None:
        """Raise `BranchError` if torch itself has fixed T or R (iteration, jvp, hessian do)."""
        for symbol, value in self.replacements.items():
            if symbol in self.symbols:
                refuse_fixed(sympy.Symbol(self.symbols[symbol]), value, line)


def refuse_fixed(expr: Any, value: Any, line: str) -> None:
    """Raise because an expression in T and R became a number.

    Raises:
        BranchError: always.
    """
    nouns = " and ".join(_NOUNS.get(s.name, s.name) for s in expr.free_symbols)
    raise BranchError(
        f"{line}: forward fixes the number of {nouns} at {expr} = {value} (int(x.shape[0]), "
        "range(x.shape[0]), ...). Keep sizes symbolic: torch.arange(x.shape[0], device=x.device)"
    )


def lettered(expr: Any, symbols: Mapping[Any, str]) -> Any:
    """A sympy expression with T and R for torch's own symbols."""
    return expr.xreplace({symbol: sympy.Symbol(letter) for symbol, letter in symbols.items()})


def example_sizes(limits: Limits, taken: Sequence[int]) -> dict[str, int]:
    """T and R of the example: different, above one, no dim of a leaf, and within limits if any is.

    Within the limits, because beyond them Python may rightly go another way.
    """
    R = next((n for n in range(min(limits.max_reqs, 13), 1, -1) if n not in taken), None)
    T = next((n for n in range(min(limits.max_tokens, 31), 2, -1) if n not in {*taken, R}), None)
    if T is not None and R is not None and R < T:
        return {"T": T, "R": R}
    free = [n for n in (1009, 1013, 1019, 1021, 1031, 1033) if n not in taken]
    return {"T": T or free[1], "R": R if R and R < (T or free[1]) else min(2, T or 2)}


def _asks_for_a_rest(expr: Any) -> bool:
    """Whether T or R are divisible by a number, by which torch's C++ cuts (tensor_split)."""
    rests = expr.atoms(Mod, PythonMod) if isinstance(expr, sympy.Basic) else ()
    return any(rest.args[0].free_symbols and rest.args[1].is_number for rest in rests)


def _asked_outside_torch() -> bool:
    """Whether SymBool.__bool__ or SymInt.__int__ was called by code that is not torch's."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torch.fx.experimental", "torch.utils._stats")
    ):
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None or frame.f_code.co_name in _CLAMPS:
        return frame is not None
    if frame.f_globals.get("__name__") != "torch":
        return False
    caller = frame.f_back
    name = "" if caller is None else caller.f_globals.get("__name__", "")
    return not name.startswith(("torch.", "fngraph.fx"))
