"""`fngraph.core.costs.planner`: exact against brute force, and saving on real traffic."""

import random
from collections import Counter
from itertools import chain, combinations

import numpy
import pytest
from hypothesis import given, settings, strategies as st

from fngraph.core import BatchSpec, Flight, Limits, Log, default_sizes, plan_sizes, planned_cost
from fngraph.errors import SizesError


def brute(histogram, candidates, cost, allowed):
    """The least cost over every allowed subset that covers the largest step."""
    top = max(size for size, count in histogram.items() if count)
    subsets = chain.from_iterable(
        combinations(candidates, n) for n in range(1, len(candidates) + 1)
    )
    return min(
        planned_cost(histogram, sizes, cost)
        for sizes in subsets
        if sizes[-1] >= top and allowed(sizes)
    )


SIZES = (1, 2, 3, 5, 7, 8, 11, 12, 16, 20, 31, 32)  # 12 sizes


def best_of_each_length(histogram):
    """k -> the least padded cost of at most k of the histogram's own sizes, by trying them all."""
    seen = sorted(histogram)
    best = [float("inf")] * (len(seen) + 1)
    for smaller in chain.from_iterable(combinations(seen[:-1], n) for n in range(len(seen))):
        ladder, total, at = (*smaller, seen[-1]), 0, 0
        for size in seen:
            at += size > ladder[at]
            total += histogram[size] * ladder[at]
        best[len(ladder)] = min(best[len(ladder)], total)
    return {k: min(best[: k + 1]) for k in range(1, len(best))}


@pytest.mark.sampled(0)
def test_every_subset_of_twelve_sizes_and_every_k():
    counts = dict(zip(SIZES, random.Random(0).sample(range(1, 100), 12)))
    for present in range(1, 2**12):
        histogram = {size: counts[size] for i, size in enumerate(SIZES) if present >> i & 1}
        for k, least in best_of_each_length(histogram).items():
            plan = plan_sizes(histogram, k)
            assert len(plan) <= k and planned_cost(histogram, plan) == least


def test_every_histogram_of_small_counts_over_six_sizes_and_every_k():
    """All counts 0..2."""
    for number in range(1, 3**6):
        counts = ((size, number // 3**i % 3) for i, size in enumerate(SIZES[:6]))
        histogram = {size: count for size, count in counts if count}
        for k, least in best_of_each_length(histogram).items():
            plan = plan_sizes(histogram, k)
            assert len(plan) <= k and planned_cost(histogram, plan) == least


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(SIZES), st.integers(0, 9), min_size=1),
    st.lists(st.integers(0, 40), min_size=12, max_size=12),
    st.integers(1, 12),
    st.booleans(),
)
def test_any_cost_over_any_candidates(histogram, costs, k, all_candidates):
    if not any(histogram.values()):
        return
    cost = dict(zip(SIZES, costs)).__getitem__
    seen = sorted(size for size, count in histogram.items() if count)
    candidates = SIZES if all_candidates else seen
    plan = plan_sizes(histogram, k, cost, candidates=candidates)
    assert len(plan) <= k and set(plan) <= set(candidates) and list(plan) == sorted(set(plan))
    best = brute(histogram, candidates, cost, lambda found: len(found) <= k)
    assert planned_cost(histogram, plan, cost) == best


@settings(max_examples=150, deadline=None)
@given(
    st.dictionaries(st.sampled_from(SIZES[:9]), st.integers(1, 9), min_size=1),
    st.lists(st.integers(1, 20), min_size=9, max_size=9),
    st.integers(1, 90),
)
def test_bytes_of_their_own_within_a_budget(histogram, weights, budget):
    bytes_of = dict(zip(SIZES, weights)).__getitem__
    seen = sorted(histogram)
    if bytes_of(seen[-1]) > budget:
        with pytest.raises(SizesError, match="does not hold a size for"):
            plan_sizes(histogram, memory_budget=budget, bytes_per_size=bytes_of)
        return
    plan = plan_sizes(histogram, memory_budget=budget, bytes_per_size=bytes_of)
    assert sum(map(bytes_of, plan)) <= budget
    best = brute(histogram, seen, float, lambda found: sum(map(bytes_of, found)) <= budget)
    assert planned_cost(histogram, plan) == best


def test_one_number_of_bytes_is_a_count():
    histogram = {1: 90, 2: 5, 7: 5, 9: 1}
    for budget, k in ((10, 1), (29, 2), (30, 3), (1000, 4)):
        assert plan_sizes(histogram, memory_budget=budget, bytes_per_size=10) == plan_sizes(
            histogram, k
        )


def test_small_plans_by_hand():
    assert plan_sizes({1: 90, 2: 5, 7: 5}, 1) == (7,)
    assert plan_sizes({1: 90, 2: 5, 7: 5}, 2) == (1, 7)
    assert plan_sizes({1: 90, 2: 5, 7: 5}, 3) == plan_sizes({1: 90, 2: 5, 7: 5}, 9) == (1, 2, 7)
    assert plan_sizes([1, 1, 1, 2, 7], 2) == plan_sizes({1: 3, 2: 1, 7: 1, 9: 0}, 2) == (2, 7)
    assert plan_sizes({3: 1}, 1, candidates=(4, 8)) == (4,)
    assert plan_sizes({4: 1}, 2, candidates=(1, 4)) == (4,)  # nothing would run at 1
    assert plan_sizes({3: 1, 1: 1}, 5, candidates=(2, 4, 8)) == (2, 4)
    flat = plan_sizes({1: 5, 63: 5, 64: 5}, 3, cost=lambda size: -(-size // 64))
    assert flat == (64,)  # one tile costs the same at any size up to 64
    largest = plan_sizes(
        {1: 5, 5: 5}, 2, cost=lambda size: {1: 1, 5: 9, 8: 4}[size], candidates=(1, 5, 8)
    )
    assert largest == (1, 8)


def test_of_plans_that_cost_the_same_the_one_of_fewer_bytes():
    plan = plan_sizes(
        {3: 2},
        cost=lambda size: 1,
        memory_budget=20,
        bytes_per_size={4: 9, 8: 3}.__getitem__,
        candidates=(4, 8),
    )
    assert plan == (8,)


def test_planned_cost_counts_steps_beyond_the_ladder_at_their_own_size():
    assert planned_cost({1: 2, 3: 1, 9: 4}, (4, 2)) == 2 * 2 + 4 + 36
    assert planned_cost([1, 1, 3, 4, 5], (4,), cost=lambda size: size * 10) == 40 * 4 + 50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            dict(histogram={}, k=1),
            "The histogram is empty. Record at least one step before planning.",
        ),
        (dict(histogram={4: 0}, k=1), "The histogram is empty."),
        (
            dict(histogram={0: 2}, k=1),
            (
                "The histogram has 2 steps of 0 tokens. Sizes are positive, and counts are not "
                "negative."
            ),
        ),
        (dict(histogram={2: -1}, k=1), "The histogram has -1 steps of 2 tokens."),
        (
            dict(histogram={1: 1}),
            (
                "plan_sizes needs either k= or memory_budget= with bytes_per_size=. "
                "Pass plan_sizes(histogram, k=8)."
            ),
        ),
        (dict(histogram={1: 1}, k=1, memory_budget=1), "plan_sizes needs either"),
        (dict(histogram={1: 1}, k=1, bytes_per_size=1), "plan_sizes needs either"),
        (dict(histogram={1: 1}, memory_budget=1), "plan_sizes needs either"),
        (dict(histogram={1: 1}, bytes_per_size=1), "plan_sizes needs either"),
        (
            dict(histogram={1: 1}, k=0),
            "k=0 holds not even one size. Pass more, or capture nothing.",
        ),
        (
            dict(histogram={1: 1}, memory_budget=9, bytes_per_size=10),
            "memory_budget=9 holds not even one size.",
        ),
        (
            dict(histogram={1: 1, 4: 1}, memory_budget=9, bytes_per_size=lambda size: size * 5),
            "memory_budget=9 does not hold a size for 4 tokens, which takes 20 bytes. Pass more,",
        ),
        (
            dict(histogram={9: 1}, k=1, candidates=(8,)),
            "No candidate holds the largest step, 9 tokens. Add 9 to them.",
        ),
        (dict(histogram={9: 1}, k=1, candidates=()), "No candidate holds the largest step"),
        (
            dict(histogram={1.5: 3, 2: 4}, k=2),
            "The histogram has steps of 1.5, which is no whole number. Round it up: math.ceil",
        ),
        (dict(histogram=[2, 1.5], k=1), "The histogram has steps of 1.5, which"),
        (dict(histogram={"8": 1}, k=1), "The histogram has steps of '8', which"),
        (dict(histogram={True: 1}, k=1), "The histogram has steps of True, which"),
        (dict(histogram={1: "x"}, k=1), "The histogram has x steps of 1 tokens."),
        (dict(histogram={1: float("nan")}, k=1), "The histogram has nan steps of 1 tokens."),
        (dict(histogram={1: 1, 3: 1}, k=1.5), "k is 1.5, which"),
        (dict(histogram={1: 1}, k=1, candidates=(1.5,)), "candidates= has 1.5, which"),
    ],
)
def test_bad_input(arguments, message):
    with pytest.raises(SizesError) as info:
        plan_sizes(**arguments)
    assert str(info.value).startswith(message)
    assert message[-1] != "." or str(info.value).endswith(message) or message.count(".") < 2


def test_recorded_specs_are_told_to_be_counted_in_few_words():
    with pytest.raises(SizesError) as info:
        plan_sizes(Flight((BatchSpec(3, 1),) * 5000), k=1)
    assert "Flight(specs).histogram(query_len=1)" in str(info.value)
    assert len(str(info.value)) < 400
    with pytest.raises(SizesError, match=r"Flight\(specs\)\.histogram"):
        plan_sizes(Log("a run", ()), k=3)


# --- three kinds of traffic -----------------------------------------------------------------------


def poisson(draw, n):
    return 1 + draw.poisson(6, n)


def lognormal(draw, n):
    return numpy.minimum(256, numpy.ceil(numpy.exp(draw.normal(3, 1, n)))).astype(int)


def two_uniforms(draw, n):
    small = draw.random(n) < 0.7
    return numpy.where(small, draw.integers(1, 9, n), draw.integers(9, 129, n))


@pytest.mark.parametrize(
    ("traffic", "num_sizes", "saves"),
    [(poisson, 6, 0.70), (lognormal, 35, 0.55), (two_uniforms, 19, 0.13)],
)
def test_planned_ladders_pad_less_than_the_default_one(traffic, num_sizes, saves):
    train, score = (
        Counter(traffic(numpy.random.default_rng(seed), 20_000).tolist()) for seed in (1, 2)
    )
    largest = max(train)
    default = [size for size in default_sizes(Limits(8192, largest)) if size <= largest]
    assert len(default) == num_sizes
    plan = plan_sizes(train, num_sizes)
    assert len(plan) == num_sizes
    rows = sum(size * count for size, count in score.items())
    padded, before = (planned_cost(score, ladder) - rows for ladder in (plan, default))
    assert padded <= (1 - saves) * before, f"pads only {1 - padded / before:.1%} less"
