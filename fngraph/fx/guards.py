"""Guards: what a trace assumed of T and R, checked for every batch that can come.

Torch notes a guard whenever Python asks something of a symbolic size (`if x.shape[0] > 5`, a slice
that may be clamped). One graph serves all batches only if each guard holds for all of them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

import sympy

from fngraph.core import Limits
from fngraph.errors import BranchError

NOUNS = {"T": "tokens", "R": "requests"}
_FUNCTIONS = {
    "FloorDiv": lambda a, b: a // b, "CleanDiv": lambda a, b: a // b, "Mod": lambda a, b: a % b,
    "PythonMod": lambda a, b: a % b, "Max": max, "Min": min, "IntTrueDiv": lambda a, b: a / b,
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Guard:
    """A condition over sympy symbols T and R, and the user's line that asked for it."""

    condition: Any
    line: str

    def counterexample(self, limits: Limits) -> tuple[int, int] | None:
        """A batch (T, R) within `limits` for which the condition does not hold, or None."""
        T, R = sympy.symbols("T R")
        holds = sympy.lambdify((T, R), self.condition, modules=[_FUNCTIONS, math])
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
    """Every value of the letter that matters; of two, all of each with extremes of the other."""
    tokens, reqs = range(1, limits.max_tokens + 1), range(1, limits.max_reqs + 1)
    if "R" not in letters:
        yield from ((t, 1) for t in tokens)
        return
    for r in reqs:
        yield from ((t, r) for t in {r, r + 1, 2 * r, limits.max_tokens} if r <= t <= tokens[-1])
    if "T" in letters:
        for t in tokens:
            yield from ((t, r) for r in {1, 2, min(t, reqs[-1])} if r <= t)


def check_fixed(replacements: Mapping[Any, Any], symbols: Mapping[Any, str], line: str) -> None:
    """Raise if the trace fixed T or R to a number.

    Raises:
        BranchError: with the number.
    """
    for symbol, value in replacements.items():
        if symbol in symbols:
            raise BranchError(
                f"{line}: forward fixes the number of {NOUNS[symbols[symbol]]} to {value} "
                "(int(x.shape[0]), range(x.shape[0]), ...). Keep sizes symbolic: "
                "torch.arange(x.shape[0], device=x.device)"
            )
