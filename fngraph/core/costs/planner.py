"""`plan_sizes`: the capture sizes that fit a measured traffic best, within a count or within bytes.

Both searches are exact. A `Problem` is all that they look at: the candidates, what a step at each
costs, and how many steps each would hold.
"""

from __future__ import annotations

import math
import reprlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate
from numbers import Real
from operator import index, itemgetter
from typing import NamedTuple, SupportsIndex

from fngraph.core.kinds import checked
from fngraph.core.text import with_suggestions
from fngraph.errors import SizesError

Histogram = Mapping[int, float] | Iterable[int]
Cost = Callable[[int], float]
BytesOf = Callable[[int], float]


def _rows(size: int) -> float:
    """The cost that makes a plan pad least: a step at `size` computes `size` rows."""
    return size


@checked
@with_suggestions
def plan_sizes(
    histogram: Histogram,
    k: int | None = None,
    cost: Cost = _rows,
    *,
    memory_budget: float | None = None,
    bytes_per_size: float | BytesOf | None = None,
    candidates: Iterable[int] | None = None,
) -> tuple[int, ...]:
    """The ladder under which this traffic costs least in sum. The largest step is always covered.

    Args:
        histogram: step size -> how often it came; or the sizes themselves, one a step.
        k: at most so many sizes.
        cost: what a step that runs at a given size costs, in any unit; the default counts rows, so
            that the plan pads least.
        memory_budget: at most so many bytes, in place of `k`.
        bytes_per_size: bytes that a captured size takes: one number, or a function of the size.
        candidates: sizes to choose from; None: those of the histogram, which hold the optimum
            wherever a larger size costs at least as much.

    Raises:
        SizesError: an empty histogram; neither or both of `k` and `memory_budget`; a budget
            that holds not even one size.

    >>> plan_sizes({1: 90, 2: 5, 7: 5}, k=2)
    (1, 7)
    """
    problem = _problem(histogram, cost, candidates)
    if k is not None and memory_budget is None and bytes_per_size is None:
        what = f"k={k}"
    elif k is None and memory_budget is not None and bytes_per_size is not None:
        if not memory_budget > 0:  # nan too
            raise SizesError(f"memory_budget={memory_budget:g} holds nothing. Pass bytes, 2e9.")
        if not callable(bytes_per_size) and not bytes_per_size > 0:
            raise SizesError(f"bytes_per_size={bytes_per_size:g}: a size takes some. Pass 1e6.")
        if callable(bytes_per_size):
            return _cheapest_within_bytes(problem, memory_budget, bytes_per_size)
        what = f"memory_budget={memory_budget:g}"
        k = int(memory_budget / bytes_per_size)
    else:
        raise SizesError(
            "plan_sizes needs either k= or memory_budget= with bytes_per_size=. "
            "Pass plan_sizes(histogram, k=8)."
        )
    _check_whole("k is", k)
    if k < 1:
        raise SizesError(f"{what} holds not even one size. Pass more, or capture nothing.")
    return _cheapest_within_count(problem, k)


@checked
def planned_cost(histogram: Histogram, sizes: Iterable[int], cost: Cost = _rows) -> float:
    """What this traffic costs in sum on the ladder `sizes`; steps beyond it cost their own size."""
    ladder = sorted(sizes)
    total = 0.0
    for size, count in counts_of(histogram).items():
        at = bisect_left(ladder, size)
        total += count * cost(ladder[at] if at < len(ladder) else size)
    return total


def counts_of(histogram: Histogram) -> dict[int, float]:
    """How often each size came, where it did.

    Raises:
        SizesError: sizes or counts that are none.
    """
    if isinstance(histogram, Mapping):
        counts = dict(histogram)
    else:
        counts = {}
        for size in histogram:
            _check_whole("The histogram has steps of", size)
            counts[size] = counts.get(size, 0) + 1
    for size, count in counts.items():
        _check_whole("The histogram has steps of", size)
        if size < 1 or not isinstance(count, int | float) or not 0 <= count < math.inf:
            raise SizesError(
                f"The histogram has {count} steps of {size} tokens. Sizes are positive, and "
                "counts are not negative."
            )
    return {size: count for size, count in counts.items() if count}


def _check_whole(what: str, number: object) -> None:
    if isinstance(number, float):
        raise SizesError(
            f"{what} {number!r}, which is no whole number. Round it up: math.ceil(size)."
        )
    if not isinstance(number, SupportsIndex) or isinstance(number, bool):
        raise SizesError(
            f"{what} {reprlib.repr(number)}, which is no whole number. Of "
            "recorded specs pass their sizes: Flight(specs).histogram(query_len=1)."
        )


class Problem(NamedTuple):
    """Candidate sizes, ascending; what a step at each costs; steps that are no larger."""

    sizes: tuple[int, ...]
    costs: tuple[float, ...]
    steps: tuple[float, ...]


def _problem(
    histogram: Histogram,
    cost: Cost,
    candidates: Iterable[int] | None,
) -> Problem:
    counts = counts_of(histogram)
    if not counts:
        raise SizesError("The histogram is empty. Record at least one step before planning.")
    seen = sorted(counts)
    below = [0, *accumulate(counts[size] for size in seen)]
    sizes = list(seen if candidates is None else candidates)
    for size in sizes:
        _check_whole("candidates= has", size)
    sizes = sorted(set(sizes))
    if not sizes or sizes[-1] < seen[-1]:
        raise SizesError(
            f"No candidate holds the largest step, {seen[-1]} tokens. Add {seen[-1]} to them."
        )
    steps = [below[bisect_left(seen, size + 1)] for size in sizes]
    costs = tuple(_numbers("cost", cost, sizes))
    return Problem(tuple(map(index, sizes)), costs, tuple(steps))


def _numbers(name: str, fn: Callable[[int], float], sizes: Iterable[int]) -> Iterator[float]:
    """What a function says of each size.

    Raises:
        SizesError: no number, or one that nothing can be compared with.
    """
    for size in sizes:
        found = fn(size)
        if not isinstance(found, Real) or math.isnan(found):
            raise SizesError(f"{name}({size}) is {reprlib.repr(found)}. Give a number, 2.5.")
        yield float(found)


def _cheapest_within_count(problem: Problem, k: int) -> tuple[int, ...]:
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


Plan = tuple[float, float, tuple[int, ...]]
"""Bytes and cost in sum, and the sizes. A bare tuple: the search makes many."""


def _cheapest_within_bytes(problem: Problem, budget: float, bytes_of: BytesOf) -> tuple[int, ...]:
    """Sizes of least cost whose bytes sum to at most `budget`.

    For each largest size, keeps the plans that no other beats in both bytes and cost.
    """
    sizes, costs, steps = problem
    plans: list[list[Plan]] = []
    needed = _numbers("bytes_per_size", bytes_of, sizes)
    for i, (size, need) in enumerate(zip(sizes, needed)):
        found: list[Plan] = [(need, costs[i] * steps[i], (size,))]
        for below, shorter in enumerate(plans):
            more = costs[i] * (steps[i] - steps[below])
            found += [(used + need, cost + more, (*ladder, size)) for used, cost, ladder in shorter]
        plans.append(_unbeaten(plan for plan in found if plan[0] <= budget))
    whole = [plan for i, found in enumerate(plans) if steps[i] == steps[-1] for plan in found]
    if not whole:
        raise SizesError(
            f"memory_budget={budget:g} does not hold a size for {sizes[-1]} tokens, which takes "
            f"{bytes_of(sizes[-1]):g} bytes. Pass more, or capture nothing."
        )
    return min(whole, key=itemgetter(1, 0))[2]


def _unbeaten(plans: Iterable[Plan]) -> list[Plan]:
    kept: list[Plan] = []
    for plan in sorted(plans):
        if not kept or plan[1] < kept[-1][1]:
            kept.append(plan)
    return kept
