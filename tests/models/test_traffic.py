"""Streams are values: the same on each call, and shaped as their profile says."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from itertools import pairwise

import pytest

from benchmarks.traffic import PROFILES, Lengths, Profile, as_text, popular, quantile, stream

SMALL = Profile(
    rate=20, prompt=Lengths(40, 0.8, 200), output=Lengths(16, 0.5, 64), burst=3, systems=(30, 10),
    adapters=3, adapted=0.5, sampled=0.25,
)  # fmt: skip


def test_the_same_arguments_give_the_same_requests():
    once = stream(SMALL, 50, vocab_size=99, seed=4)
    assert once == stream(SMALL, 50, vocab_size=99, seed=4)
    assert once != stream(SMALL, 50, vocab_size=99, seed=5)
    assert once[:20] == stream(SMALL, 20, vocab_size=99, seed=4)  # a longer stream goes on with it
    first = once[0]  # on any machine
    assert first.at == pytest.approx(0.04292718800537815)
    assert first == first._replace(prompt=(*first.prompt[:-3], 35, 66, 68), max_new=52, adapter=-1)


@pytest.mark.parametrize("name", [*PROFILES, "small"])
def test_requests_are_as_the_profile_says(name):
    profile = PROFILES.get(name, SMALL)
    arrivals = stream(profile, 400, vocab_size=1000, seed=1)
    assert len(arrivals) == 400
    assert all(a.at <= b.at for a, b in pairwise(arrivals))
    assert 0.6 < 400 / profile.rate / arrivals[-1].at < 1.6
    assert 0.6 < 400 / profile.burst / len({a.at for a in arrivals}) < 1.6
    own = [len(a.prompt) - (profile.systems[a.system] if a.system >= 0 else 0) for a in arrivals]
    for values, lengths in ((own, profile.prompt), ([a.max_new for a in arrivals], profile.output)):
        assert 1 <= min(values) and max(values) <= lengths.most
        assert 0.85 < quantile(values, 0.5) / lengths.median < 1.15
        assert quantile(values, 0.9) > 1.4 * quantile(values, 0.5)
    assert max(len(a.prompt) + a.max_new for a in arrivals) <= profile.longest
    assert all(0 <= token < 1000 for a in arrivals for token in a.prompt)
    shares = (sum(a.adapter >= 0 for a in arrivals), sum(a.seed is not None for a in arrivals))
    for got, want in zip(shares, (profile.adapted, profile.sampled)):
        assert abs(got / 400 - want) < (0.08 if want else 1e-9)


def test_system_prompts_are_shared():
    arrivals = stream(SMALL, 60, vocab_size=10**6, seed=2)
    for number, length in enumerate(SMALL.systems):
        heads = {a.prompt[:length] for a in arrivals if a.system == number}
        assert len(heads) == 1
    plain = stream(dataclasses.replace(SMALL, systems=()), 60, vocab_size=10**6, seed=2)
    assert {a.system for a in plain} == {-1} and len({a.prompt[:1] for a in plain}) > 50


def test_the_first_are_the_most_popular():
    rng = random.Random(0)
    counts = Counter(popular(3, rng) for _ in range(6000))
    shares = [counts[i] / 6000 for i in range(3)]
    assert shares == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=0.02)
    assert popular(0, rng) == -1


def test_lengths_without_spread():
    assert {Lengths(7, 0, 9).draw(random.Random(i)) for i in range(9)} == {7}
    assert {Lengths(7, 0, 5).draw(random.Random(i)) for i in range(9)} == {5}


def test_a_stream_prints_its_figures():
    shown = as_text(stream(SMALL, 50, vocab_size=99, seed=4))
    for words in ("| requests", "| 50 ", "prompt tokens, p50 / p99 / most", "with an adapter"):
        assert words in shown


@pytest.mark.sampled(2)
@pytest.mark.parametrize("percent", [0, 1, 7, 50, 90, 99, 100])
def test_quantiles(percent):
    """As they are defined, whatever `percent / 100 * n` rounds to."""
    assert quantile([5, 1, 3], 0.67) == 5 and quantile([1, 2, 3, 4], 0.5) == 2
    for n in range(1, 301):
        values = [i * i % 97 for i in range(n)]
        enough = [x for x in values if 100 * sum(y <= x for y in values) >= percent * n]
        assert quantile(values, percent / 100) == min(enough)
