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
from models.requests import Row


def with_drafts(rows: Sequence[Row], policy: Policy, free: int) -> list[Row] | None:
    """The rows of a verify step in place of those of a decode step; None where none pays.

    Args:
        free: blocks that the drafts may take.
    """
    longest = max(policy.query_lens) - 1
    if not longest:
        return None
    found = [row.job.tokens.after_first(policy.ngram, longest) for row in rows]
    query_len = choose([len(guess) for guess in found], policy.query_lens)
    while query_len > 1 and not fits(rows, query_len, policy, free):
        query_len = max(q for q in policy.query_lens if q < query_len)
    if query_len == 1:
        return None
    k = query_len - 1
    return [
        row._replace(drafts=(*guess, *[row.job.tokens.last] * k)[:k])
        for row, guess in zip(rows, found)
    ]


def choose(found: Sequence[int], query_lens: Sequence[int]) -> int:
    """The largest query length of which at least half of all draft places are filled."""
    filled = lambda k: sum(min(n, k) for n in found)  # noqa: E731
    return max(q for q in query_lens if 2 * filled(q - 1) >= len(found) * (q - 1))


def fits(rows: Sequence[Row], query_len: int, policy: Policy, free: int) -> bool:
    """Whether such a step stays within the token budget, each table, and the free blocks."""
    ends = [blocks_for(len(row.job.tokens) + query_len - 1, policy.block_size) for row in rows]
    extra = sum(
        end - len(row.job.blocks) for row, end in zip(rows, ends) if end > len(row.job.blocks)
    )
    within = max(ends) <= policy.max_blocks and query_len * len(rows) <= policy.max_tokens
    return within and extra <= free


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """The tokens of one row: what was drawn, up to the first that is not the draft in its place.

    >>> accept((5, 6, 7), (5, 6, 9, 3))
    (5, 6, 9)
    """
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == drawn[agreed]:
        agreed += 1
    return tuple(drawn[: agreed + 1])
