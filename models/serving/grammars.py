"""Which tokens may be next, asked of each request's own function before a step.

A grammar is a function of a request's new tokens so far, and gives the tokens that may follow them:

| it returns                                       | which is                     |
|--------------------------------------------------|------------------------------|
| None                                             | every token may              |
| a bool for each token of the vocabulary          | an array or a tensor         |
| int32, uint32, (W,) for at most 32 W tokens      | the bitmask of xgrammar, ... |
| whole numbers                                    | the ids, in any collection   |

Drafts are asked about as far as they are allowed: what follows one that is not is never taken.
"""

from __future__ import annotations

import reprlib
from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from fngraph.models.serving.requests import Row


def words_for(vocab_size: int) -> int:
    """32-bit words that hold a bit for each token."""
    return -(-vocab_size // 32)


def ask(
    rows: Sequence[Row], refused: Container[int], vocab_size: int | None
) -> tuple[dict[int, np.ndarray], dict[int, str]]:
    """The masks of a step, and why requests end with it.

    Args:
        refused: numbers of requests that are not asked.

    Returns:
        By the request's number, (places, W) int32; and why it fails, where its function raised, or
        allows no token at all.
    """
    allowed: dict[int, np.ndarray] = {}
    faults: dict[int, str] = {}
    for job, count, drafts in rows:
        grammar = job.request.grammar
        if grammar is None or job.id in refused or job.computed + count < len(job.tokens):
            continue
        assert vocab_size is not None, "steps without a vocabulary refuse grammars"
        new, masks = job.generated, []
        for place in range(1 + len(drafts)):
            try:
                mask = words_of(grammar((*new, *drafts[:place])), vocab_size)
            except Exception as error:  # whatever a user's function raises is its request's alone
                if place == 0:
                    faults[job.id] = f"its grammar raised {type(error).__name__}: {error}"
                break
            if not mask.any():
                if place == 0:
                    faults[job.id] = f"its grammar allows no token after {len(new)} new ones"
                break
            masks.append(mask)
            if place < len(drafts) and not mask[drafts[place] // 32] >> drafts[place] % 32 & 1:
                break
        if masks:  # where none was asked for, nothing is drawn, and the next step asks again
            none = np.zeros((1 + len(drafts) - len(masks), words_for(vocab_size)), np.int32)
            allowed[job.id] = np.concatenate([np.stack(masks), none])
    return allowed, faults


def words_of(given: Any, vocab_size: int) -> np.ndarray:
    """What a grammar returned as (W,) int32, with no bit beyond the vocabulary.

    Raises:
        ValueError: another length; a token beyond the vocabulary.
        TypeError: ids that are not whole numbers.
    """
    bits = np.zeros(32 * words_for(vocab_size), bool)
    if given is None:
        bits[:vocab_size] = True
    elif isinstance(given, list | tuple) and given and isinstance(given[0], bool):
        return words_of(np.asarray(given), vocab_size)
    elif (kind := np.asarray(given) if hasattr(given, "dtype") else None) is not None and (
        kind.dtype == bool
    ):
        if kind.shape != (vocab_size,):
            raise ValueError(f"its bools are {list(kind.shape)}, the vocabulary is {vocab_size}")
        bits[:vocab_size] = kind
    elif kind is not None and kind.dtype in (np.int32, np.uint32):
        if kind.shape != (words_for(vocab_size),):
            raise ValueError(
                f"its bitmask is {list(kind.shape)}, {vocab_size} tokens take "
                f"{words_for(vocab_size)} words of 32. Return ids as a list"
            )
        bits = np.unpackbits(kind.astype("<i4").view(np.uint8), bitorder="little").astype(bool)
        bits[vocab_size:] = False
    else:
        ids = np.asarray(list(given) if hasattr(given, "__iter__") else [None])
        if ids.size and not np.issubdtype(ids.dtype, np.integer):
            told = reprlib.repr(given) if kind is None else f"{kind.dtype}, {list(kind.shape)}"
            raise TypeError(f"it returned {told}: return ids, bools or an int32 bitmask")
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            wrong = next(i for i in ids.tolist() if not 0 <= i < vocab_size)
            raise ValueError(f"it allows {wrong}, the vocabulary is {vocab_size}")
        bits[ids.astype(np.int64)] = True
        if kind is not None and bits.sum() < ids.size == vocab_size:
            raise ValueError("it returned a number for each token: return bools, or ids once each")
    return np.packbits(bits, bitorder="little").view("<i4").astype(np.int32)
