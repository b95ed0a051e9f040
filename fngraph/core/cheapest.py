"""The two exact searches behind `plan_sizes`: within a count of sizes, or a sum of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from fngraph.errors import SizesError

Bytes = Callable[[int], float]
Ladder = tuple[float, float, tuple[int, ...]]
"""Bytes, cost, sizes."""


class Problem(NamedTuple):
    """Candidate sizes, ascending; what a step at each costs; steps that are no larger."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    steps: tuple[float, ...]


def cheapest_within_count(problem: Problem, k: int) -> tuple[int, ...]:
    """At most `k` sizes of least cost, by adding one size at a time."""
    sizes, costs, steps = _rising(problem)
    best = [cost * upto for cost, upto in zip(costs, steps)]
    choices: list[list[int | None]] = []
    for _ in range(min(k, len(sizes)) - 1):
        best, choice = _one_more(best, costs, steps)
        choices.append(choice)
    ladder = [len(sizes) - 1]
    for choice in reversed(choices):
        below = choice[ladder[-1]]
        if below is None:
            break
        ladder.append(below)
    return tuple(sizes[i] for i in reversed(ladder))


def _one_more(
    fewer: list[float], costs: tuple[float, ...], steps: tuple[float, ...]
) -> tuple[list[float], list[int | None]]:
    """(best, choice) with one size more than `fewer` has.

    best[i] is the least cost of all steps up to size i where size i is the largest taken: the
    minimum over the next smaller one, l, of fewer[l] + cost(i) * (steps(i) - steps(l)), or with
    none below. choice[i] is that l. Since costs rise, the term satisfies the quadrangle
    inequality, so that the best l never falls as i grows; halving the range of i narrows that
    of l: n * log(n) in all.
    """
    best = [cost * upto for cost, upto in zip(costs, steps)]
    choice: list[int | None] = [None] * len(best)

    def solve(low: int, high: int, least: int, most: int) -> None:
        if low == high:
            return
        i = (low + high) // 2
        for below in range(least, min(i, most)):
            value = fewer[below] + costs[i] * (steps[i] - steps[below])
            if value < best[i]:
                best[i], choice[i] = value, below
        at = choice[i] or least
        solve(low, i, least, at + 1)
        solve(i + 1, high, at, most)

    solve(1, len(best), 0, len(best))  # nothing is below size 0
    return best, choice


def _rising(problem: Problem) -> Problem:
    """Without sizes that cost no less than a larger one, and without a second one at the top.

    Whatever uses the first might use the larger one; nothing needs the second.
    """
    kept: list[tuple] = []
    for row in reversed(list(zip(*problem))):
        if not kept or row[1] < kept[-1][1]:
            if len(kept) == 1 and row[2] == kept[0][2]:
                kept.pop()
            kept.append(row)
    return Problem(*zip(*reversed(kept)))


def cheapest_within_bytes(problem: Problem, budget: float, bytes_of: Bytes) -> tuple[int, ...]:
    """Sizes of least cost whose bytes sum to at most `budget`.

    For each largest size, keeps the ladders that no other beats in both bytes and cost.
    """
    sizes, costs, steps = problem
    ladders: list[list[Ladder]] = []
    for i, size in enumerate(sizes):
        need = bytes_of(size)
        found: list[Ladder] = [(need, costs[i] * steps[i], (size,))]
        for below, shorter in enumerate(ladders):
            more = costs[i] * (steps[i] - steps[below])
            found += [(used + need, cost + more, (*ladder, size)) for used, cost, ladder in shorter]
        ladders.append(_unbeaten(ladder for ladder in found if ladder[0] <= budget))
    whole = [ladder for i, found in enumerate(ladders) if steps[i] == steps[-1] for ladder in found]
    if not whole:
        raise SizesError(
            f"memory_budget={budget:g} does not hold a size for {sizes[-1]} tokens, which takes "
            f"{bytes_of(sizes[-1]):g} bytes. Pass more, or capture nothing."
        )
    return min(whole, key=lambda ladder: (ladder[1], ladder[0]))[2]


def _unbeaten(ladders: Iterable[Ladder]) -> list[Ladder]:
    kept: list[Ladder] = []
    for ladder in sorted(ladders, key=lambda ladder: ladder[:2]):
        if not kept or ladder[1] < kept[-1][1]:
            kept.append(ladder)
    return kept
