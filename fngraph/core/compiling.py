"""Levels of compilation, and the ranges of sizes that compiled code serves.

A piece is compiled for a range of T and of R, in which both stay symbols, and for exact numbers of
tokens that were asked for. Which one serves a key is decided here, over plain numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from fngraph.core.limits import Limits
from fngraph.errors import CompileError

LEVELS = ("none", "stock", "once", "pieces")
"""What `graphify(compile=...)` may say; see `docs/compile.md`."""


class Span(NamedTuple):
    """The numbers from `low` to `high`, both included."""

    low: int
    high: int

    @property
    def exact(self) -> bool:
        """Whether it is one number."""
        return self.low == self.high

    def covers(self, number: int) -> bool:
        """Whether `number` is one of them."""
        return self.low <= number <= self.high

    def __str__(self) -> str:
        return str(self.low) if self.exact else f"{self.low}..{self.high}"


class Range(NamedTuple):
    """Sizes that one artefact serves: tokens (T) and requests (R)."""

    tokens: Span
    reqs: Span

    @property
    def width(self) -> tuple[int, int]:
        """How many sizes it has, tokens first: the narrowest range is the least."""
        return self.tokens.high - self.tokens.low, self.reqs.high - self.reqs.low

    def covers(self, num_tokens: int, num_reqs: int) -> bool:
        """Whether it has these sizes."""
        return self.tokens.covers(num_tokens) and self.reqs.covers(num_reqs)

    def at(self, num_tokens: int | None = None, num_reqs: int | None = None) -> Range:
        """The part of it with these numbers; None: all that it has, of what a batch can have."""
        tokens = self.tokens if num_tokens is None else Span(num_tokens, num_tokens)
        return of_batches(tokens, self.reqs if num_reqs is None else Span(num_reqs, num_reqs))

    def __str__(self) -> str:
        return f"T {self.tokens}, R {self.reqs}"


def of_batches(tokens: Span, reqs: Span) -> Range:
    """The sizes among these that a batch can have: each request brings at least one token."""
    low, high = reqs.low, min(reqs.high, tokens.high)
    return Range(Span(max(tokens.low, low), tokens.high), Span(low, max(low, high)))


def whole(limits: Limits) -> Range:
    """All sizes within limits."""
    return of_batches(Span(1, limits.max_tokens), Span(1, limits.max_reqs))


def narrowest(ranges: Iterable[Range], num_tokens: int, num_reqs: int) -> Range | None:
    """The narrowest range that covers these sizes, so that an exact one comes first; or None."""
    covering = (one for one in ranges if one.covers(num_tokens, num_reqs))
    return min(covering, key=lambda one: one.width, default=None)


def trimmed(part: Range, holds: Callable[[int, int], bool]) -> Range:
    """`part` without its least sizes, where what it is for holds of no batch that has them."""
    tokens, reqs = part
    if not tokens.exact and not any(holds(tokens.low, r) for r in part.at(tokens.low).reqs):
        tokens = Span(tokens.low + 1, tokens.high)
    if not reqs.exact and not any(holds(t, reqs.low) for t in part.at(None, reqs.low).tokens):
        reqs = Span(reqs.low + 1, reqs.high)
    return of_batches(tokens, reqs)


def examples(part: Range) -> dict[str, int]:
    """Sizes to compile for, where they stay symbols: what a batch can have, if T is one number.

    Both are above one, neither is a power of two nor near a dim, as far as that goes.
    """
    tokens, reqs = 1031, 509
    return {
        "T": tokens,
        "R": min(reqs, max(part.tokens.high - 1, 2)) if part.tokens.exact else reqs,
    }


def to_try(within: Range, num_tokens: int, num_reqs: int) -> tuple[Range, ...]:
    """Ranges to compile for, in turn, till one holds at these sizes, which no artefact has served.

    Inductor lets a symbol be no 1, so that a 1 becomes a number first, and all sizes do at last.
    """
    ones = within.at(1 if num_tokens == 1 else None, 1 if num_reqs == 1 else None)
    parts = (within.at(1) if num_tokens == 1 else ones, ones, within.at(num_tokens, num_reqs))
    return tuple(dict.fromkeys(part for part in parts if part != within))


def check_compile_sizes(sizes: Sequence[int], limits: Limits) -> None:
    """Raise `CompileError` for a number of tokens that no batch can have."""
    beyond = [n for n in sizes if not 1 <= n <= limits.max_tokens]
    if beyond:
        raise CompileError(
            f"compile_sizes={tuple(sizes)}: {beyond[0]} tokens are not within {limits!r}. Pass "
            f"numbers from 1 to {limits.max_tokens}, or larger limits"
        )


def resolve_level(
    level: str, cuts: Sequence[str], loops: Sequence[str] = ()
) -> tuple[str, tuple[str, ...]]:
    """The level that serves every mode, and why it is another than was asked for.

    | asked for | no cut, no loop | cuts or loops |
    |-----------|-----------------|---------------|
    | none      | none            | none          |
    | stock     | stock           | pieces        |
    | once      | once            | pieces        |
    | pieces    | pieces          | pieces        |

    Args:
        cuts: the calls of primitives, each of which runs by a backend: eagerly, in PIECEWISE.
        loops: those that take turns on the device, or choose there, with their lines.
    """
    if level not in ("stock", "once") or not (cuts or loops):
        return level, ()
    more = f" and {len(cuts or loops) - 1} more" if len(cuts or loops) > 1 else ""
    if cuts:
        why = f"{cuts[0]}{more} runs by a backend, which one compiled function cannot call"
    else:
        why = f"{loops[0]}{more} is a node of its own, which one compiled function cannot hold"
    return "pieces", (f'compile="{level}" -> "pieces": {why}',)
