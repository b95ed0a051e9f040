"""Prompt lookup: drafts are what followed the same few tokens before, in the request's own text.

All rows of a verify batch bring 1 + k tokens, with the k of each step among those that are
captured. A row with fewer drafts repeats its last token: a draft is only a guess, and which guesses
are made never changes the text.

Source: Saxena, "Prompt Lookup Decoding", 2023; exact for sampled text too, since the token drawn
depends on its request and place alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from models.blocks import blocks_for
from models.policy import Policy
from models.requests import Job


def find_drafts(jobs: Sequence[Job], policy: Policy, free: int) -> list[tuple[int, ...]]:
    """The drafts of each job of a verify step; none at all where a decode step does as well.

    Args:
        free: blocks that the drafts may take.
    """
    longest = max(policy.query_lens) - 1
    if not longest or not jobs:
        return []
    found = [job.tokens.after_first(policy.ngram, longest) for job in jobs]
    query_len = choose([len(guess) for guess in found], policy.query_lens)
    while query_len > 1 and not fits(jobs, query_len, policy, free):
        query_len = max(q for q in policy.query_lens if q < query_len)
    k = query_len - 1
    if not k:
        return []
    return [(*guess, *[job.tokens.last] * k)[:k] for job, guess in zip(jobs, found)]


def choose(found: Sequence[int], query_lens: Sequence[int]) -> int:
    """The largest query length of which at least half of all draft places are filled."""
    filled = lambda k: sum(min(n, k) for n in found)  # noqa: E731
    return max(q for q in query_lens if 2 * filled(q - 1) >= len(found) * (q - 1))


def fits(jobs: Sequence[Job], query_len: int, policy: Policy, free: int) -> bool:
    """Whether such a step stays within the token budget, each table, and the free blocks."""
    if query_len * len(jobs) > policy.max_tokens:
        return False
    size = policy.block_size
    ends = [blocks_for(len(job.tokens) + query_len - 1, size) for job in jobs]
    extra = sum(max(0, end - len(job.blocks)) for job, end in zip(jobs, ends))
    return max(ends) <= policy.max_blocks and extra <= free


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """The tokens of one row: what was drawn, up to the first that is not the draft in its place.

    >>> accept((5, 6, 7), (5, 6, 9, 3))
    (5, 6, 9)
    """
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == drawn[agreed]:
        agreed += 1
    return tuple(drawn[: agreed + 1])
