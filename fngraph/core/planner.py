"""`plan_sizes`: the capture sizes that fit a measured traffic best, exactly."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate

from fngraph.core.cheapest import Bytes, Problem, cheapest_within_bytes, cheapest_within_count
from fngraph.errors import SizesError

Histogram = Mapping[int, float]


def _rows(size: int) -> float:
    """The cost that makes a plan pad least: a step at `size` computes `size` rows."""
    return size


def plan_sizes(
    histogram: Histogram | Iterable[int],
    k: int | None = None,
    cost: Callable[[int], float] = _rows,
    *,
    memory_budget: float | None = None,
    bytes_per_size: float | Bytes | None = None,
    candidates: Iterable[int] | None = None,
) -> tuple[int, ...]:
    """The ladder under which this traffic costs least in sum. The largest step is always covered.

    Args:
        histogram: step size -> how often it came; or the sizes themselves, one a step.
        k: at most so many sizes.
        cost: of one step that runs at a given size, in any unit; the default counts rows, so
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
        if callable(bytes_per_size):
            return cheapest_within_bytes(problem, memory_budget, bytes_per_size)
        what = f"memory_budget={memory_budget:g}"
        k = int(memory_budget / bytes_per_size)
    else:
        raise SizesError(
            "plan_sizes needs either k= or memory_budget= with bytes_per_size=. "
            "Pass plan_sizes(histogram, k=8)."
        )
    if k < 1:
        raise SizesError(f"{what} holds not even one size. Pass more, or capture nothing.")
    return cheapest_within_count(problem, k)


def planned_cost(
    histogram: Histogram | Iterable[int], sizes: Iterable[int], cost: Callable[[int], float] = _rows
) -> float:
    """What this traffic costs in sum on the ladder `sizes`; steps beyond it cost their own size."""
    ladder = sorted(sizes)
    total = 0.0
    for size, count in _counts(histogram).items():
        at = bisect_left(ladder, size)
        total += count * cost(ladder[at] if at < len(ladder) else size)
    return total


def _counts(histogram: Histogram | Iterable[int]) -> dict[int, float]:
    if isinstance(histogram, Mapping):
        counts = dict(histogram)
    else:
        counts = {}
        for size in histogram:
            counts[size] = counts.get(size, 0) + 1
    for size, count in counts.items():
        if size < 1 or count < 0:
            raise SizesError(
                f"The histogram has {count} steps of {size} tokens. Sizes are positive, and "
                "counts are not negative."
            )
    return {size: count for size, count in counts.items() if count}


def _problem(
    histogram: Histogram | Iterable[int],
    cost: Callable[[int], float],
    candidates: Iterable[int] | None,
) -> Problem:
    counts = _counts(histogram)
    if not counts:
        raise SizesError("The histogram is empty. Record at least one step before planning.")
    seen = sorted(counts)
    below = [0, *accumulate(counts[size] for size in seen)]
    sizes = sorted(set(seen if candidates is None else candidates))
    if not sizes or sizes[-1] < seen[-1]:
        raise SizesError(
            f"No candidate holds the largest step, {seen[-1]} tokens. Add {seen[-1]} to them."
        )
    steps = [below[bisect_left(seen, size + 1)] for size in sizes]
    return Problem(tuple(sizes), tuple(map(cost, sizes)), tuple(steps))
