"""Levels of compilation, and which range serves a size: pure decisions over plain numbers."""

from __future__ import annotations

import pytest

from fngraph.core import Limits, Range, Span
from fngraph.core.compiling import (
    LEVELS,
    check_compile_sizes,
    examples,
    narrowest,
    resolve_level,
    to_try,
    trimmed,
    whole,
)
from fngraph.errors import CompileError

LIMITS = Limits(max_tokens=16, max_reqs=4)
ALL = whole(LIMITS)
BATCHES = [(t, r) for t in range(1, 17) for r in range(1, min(t, 4) + 1)]


def part(low: int, high: int, *reqs: int) -> Range:
    return Range(Span(low, high), Span(*reqs) if reqs else ALL.reqs)


RANGES = [ALL, part(1, 8), part(5, 8), ALL.at(8), part(8, 8, 2, 2), part(3, 16, 1, 1)]


@pytest.mark.parametrize(
    ("tokens", "reqs", "want"),
    [
        (1, 1, part(1, 8)), (5, 4, part(5, 8)), (8, 4, ALL.at(8)), (8, 2, ALL.at(8, 2)),
        (9, 1, part(3, 16, 1, 1)), (9, 2, ALL), (16, 4, ALL), (17, 4, None), (16, 5, None),
    ],
)  # fmt: skip
def test_the_narrowest_range_serves(tokens: int, reqs: int, want: Range | None):
    for ranges in (RANGES, RANGES[::-1]):
        assert narrowest(ranges, tokens, reqs) == want


def test_ranges_print():
    assert [str(one) for one in (ALL, ALL.at(8), ALL.at(1, 1))] == [
        "T 1..16, R 1..4", "T 8, R 1..4", "T 1, R 1"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("holds", "want"),
    [
        (lambda t, r: True, "T 1..16, R 1..4"),
        (lambda t, r: t > 1, "T 2..16, R 1..4"),
        (lambda t, r: r > 1, "T 2..16, R 2..4"),
        (lambda t, r: t > 1 and r > 1, "T 2..16, R 2..4"),
        (lambda t, r: t > 2, "T 2..16, R 1..4"),  # what is not a matter of 1 is asked of each size
    ],
)
def test_a_range_says_that_it_has_no_one(holds, want: str):
    assert str(trimmed(ALL, holds)) == want
    assert trimmed(ALL.at(1, 1), holds) == ALL.at(1, 1)


def test_what_is_missing_is_tried_with_few_numbers_first():
    tried = {sizes: [str(one) for one in to_try(ALL, *sizes)] for sizes in ((1, 1), (7, 1), (7, 3))}
    assert tried == {
        (1, 1): ["T 1, R 1"],
        (7, 1): ["T 1..16, R 1", "T 7, R 1"],
        (7, 3): ["T 7, R 3"],
    }
    for sizes in BATCHES:
        found = to_try(ALL, *sizes)
        assert found[-1] == ALL.at(*sizes) and all(one.covers(*sizes) for one in found)


@pytest.mark.parametrize("least", [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1), (3, 3)])
def test_no_range_has_sizes_that_no_batch_has(least: tuple[int, int]):
    """A request brings a token: T 1, R 2..4 is nobody's. And none loses sizes that a batch has."""
    made = {ALL, *(one for sizes in BATCHES for one in to_try(ALL, *sizes))}
    made |= {ALL.at(t) for t in range(1, 17)} | {ALL.at(None, r) for r in range(1, 5)}
    for wanted in made:
        for one in (wanted, trimmed(wanted, lambda t, r: t >= least[0] and r >= least[1])):
            assert one.tokens.low >= one.reqs.low and one.reqs.high <= one.tokens.high
            assert one.tokens.low <= one.tokens.high and one.reqs.low <= one.reqs.high
        kept = [x for x in BATCHES if wanted.covers(*x) and all(n >= m for n, m in zip(x, least))]
        assert all(one.covers(*x) for x in kept)
    few = Limits(max_tokens=3, max_reqs=64)
    assert str(whole(few)) == "T 1..3, R 1..3" and str(whole(few).at(2)) == "T 2, R 1..2"


def test_examples_are_of_batches():
    for tokens in range(2, 17):
        at = examples(ALL.at(tokens))
        assert 1 < at["R"] <= tokens
    assert examples(ALL) == examples(part(2, 16)) and examples(ALL)["R"] < examples(ALL)["T"]


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_that_cannot_call_backends_gives_way(level: str):
    assert resolve_level(level, ()) == (level, ())
    now, reasons = resolve_level(level, ("attention 0", "attention 1", "attention 2"))
    if level in ("none", "pieces"):
        assert (now, reasons) == (level, ())
    else:
        (reason,) = reasons
        assert now == "pieces"
        assert reason.startswith(f'compile="{level}" -> "pieces": attention 0 and 2 more runs by')


@pytest.mark.parametrize("level", LEVELS)
def test_a_level_of_one_function_gives_way_to_loops(level: str):
    now, reasons = resolve_level(level, (), ("fg.scan, a.py:1", "fg.cond, a.py:2"))
    if level in ("none", "pieces"):
        assert (now, reasons) == (level, ())
    else:
        assert now == "pieces"
        assert reasons[0].startswith(
            f'compile="{level}" -> "pieces": fg.scan, a.py:1 and 1 more is a node of its own'
        )
    assert resolve_level(level, ("attention 0",), ("fg.scan",)) == resolve_level(
        level, ("attention 0",)
    )


@pytest.mark.parametrize("size", [0, -1, 17])
def test_sizes_beyond_the_limits_are_refused(size: int):
    check_compile_sizes((1, 16), LIMITS)
    with pytest.raises(CompileError, match=rf"{size} tokens are not within Limits\(max_tokens=16"):
        check_compile_sizes((1, size), LIMITS)
