"""What a step drew for a row, as tokens that its request gets: those that the model has, up to
where it was done, or to the first that is not the draft in its place.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fngraph.models.serving.policy import whole
from fngraph.models.serving.sampling import UNDRAWN

TOKENS = "a list of tokens for each row, as ids.tolist() of a step is, [[5], [9]]"


def tokens_of(new: Sequence[Any], at: int, below: int) -> tuple[int, ...]:
    """The tokens of a row as ints, of whatever type they are.

    Raises:
        TypeError: one is no whole number. ValueError: the model does not have it.
    """
    tokens = tuple(whole(f"drawn[{at}][{i}]", token) for i, token in enumerate(new))
    if strange := [token for token in tokens if not 0 <= token < below]:
        raise ValueError(
            f"drawn[{at}] has {strange[0]}, which is no token: they are counted from 0, below "
            f"{below}. Pass what the step drew, ids.tolist()"
        )
    return tokens


def drawn_of(tokens: Sequence[int]) -> tuple[int, ...]:
    """The tokens of a row that drew one after the other, up to where it was done.

    >>> drawn_of((5, 6, -2, -2))
    (5, 6)
    """
    return tuple(tokens[: tokens.index(UNDRAWN)] if UNDRAWN in tokens else tokens)


def accept(drafts: Sequence[int], drawn: Sequence[int]) -> tuple[int, ...]:
    """The tokens of one row: what was drawn, up to the first that is not the draft in its place.

    >>> accept((5, 6, 7), (5, 6, 9, 3))
    (5, 6, 9)
    """
    agreed = 0
    while agreed < len(drafts) and drafts[agreed] == drawn[agreed]:
        agreed += 1
    return tuple(drawn[: agreed + 1])
