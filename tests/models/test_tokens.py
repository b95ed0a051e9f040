"""Versions of a text share memory and never change one another; lookup is exact."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from fngraph.models import Policy
from fngraph.models.serving.drawn import accept
from fngraph.models.serving.requests import Job, Request
from fngraph.models.serving.scheduling import choose, find_drafts
from fngraph.models.serving.texts.tokens import Tokens

runs = st.lists(st.integers(0, 2), max_size=6)


@given(first=runs, edits=st.lists(st.tuples(st.integers(0, 8), runs), max_size=12))
def test_every_version_stays_what_it_was(first, edits):
    """Any version may be gone on with, at any time."""
    versions = [(Tokens(first), tuple(first))]
    for which, run in edits:
        tokens, plain = versions[which % len(versions)]
        versions.append((tokens.append(run), plain + tuple(run)))
    for tokens, plain in versions:
        assert tuple(tokens) == plain and len(tokens) == len(plain)
        assert tokens == Tokens(plain) and tuple(tokens.view(1, 3).tolist()) == plain[1:3]
        if plain:
            assert tokens.last == plain[-1]


@given(
    first=runs, edits=st.lists(st.tuples(st.integers(0, 8), runs), max_size=12),
    n=st.integers(1, 3), most=st.integers(1, 4),
)  # fmt: skip
def test_what_followed_the_first_time(first, edits, n, most):
    versions = [(Tokens(first), tuple(first))]
    for which, run in edits:
        tokens, plain = versions[which % len(versions)]
        tokens.after_first(n, most)  # whoever asks first indexes for all who share the log
        versions.append((tokens.append(run), plain + tuple(run)))
    for tokens, plain in reversed(versions):
        tail, want = plain[-n:], []
        if len(plain) > n:
            end = next(i for i in range(n, len(plain) + 1) if plain[i - n : i] == tail)
            want = list(plain[end : end + most])
        assert tokens.after_first(n, most) == want


def test_appending_shares_until_two_want_the_same_place():
    one = Tokens([1, 2])
    two, other = one.append([3]), one.append([4])
    assert np.shares_memory(one.view(), two.view())
    assert not np.shares_memory(two.view(), other.view())
    assert two.append(range(100)).view(0, 3).tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "found, query_len",
    [([], 5), ([4, 4], 5), ([4, 0], 5), ([4, 0, 0], 1), ([2, 2, 0], 3), ([2, 1], 3), ([0], 1)],
)
def test_the_longest_drafts_of_which_half_are_there(found, query_len):
    assert choose(found, (1, 3, 5)) == query_len


@pytest.mark.parametrize(
    "drafts, drawn, got",
    [((), (7,), (7,)), ((5, 6), (5, 6, 7), (5, 6, 7)), ((5, 6), (5, 9, 7), (5, 9)),
     ((5, 6), (4, 6, 7), (4,))],
)  # fmt: skip
def test_drafts_are_kept_up_to_the_first_that_differs(drafts, drawn, got):
    assert accept(drafts, drawn) == got


def jobs(*texts: list[int]) -> list[Job]:
    """Jobs that decode these texts, in a block of 8 each."""
    return [
        Job(Request(i, tuple(t[:1]), 9), Tokens(t), len(t) - 1, Tokens([i], np.int32), -1)
        for i, t in enumerate(texts)
    ]


def test_drafts_fill_up_with_the_last_token_and_mind_all_bounds():
    policy = Policy(8, 2, 1, 8, query_lens=(1, 3), ngram=1)
    repeats, new = [1, 2, 3, 1], [4, 5]
    assert find_drafts(jobs(repeats, new), policy, 0) == [(2, 3), (5, 5)]
    assert find_drafts(jobs(new, new), policy, 9) == []
    assert find_drafts(jobs([1] * 7, new), policy, 9) == []  # the table of the first is full
    tight = Policy(5, 2, 1, 8, query_lens=(1, 3), ngram=1)
    assert find_drafts(jobs(repeats, repeats), tight, 9) == []  # 6 tokens
    wide = Policy(8, 2, 2, 8, query_lens=(1, 3), ngram=1)
    assert find_drafts(jobs([1] * 7, repeats), wide, 0) == []  # no block for it
    assert find_drafts(jobs([1] * 7, repeats), wide, 1) != []
