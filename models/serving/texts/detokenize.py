"""Text out of tokens as they come, and where it stops.

A character may take several tokens, and a stop several characters: text is given out once it is
certain. What is given out, one after the other, is the text of all tokens up to the stop.

| tokens                                      | their text                        |
|---------------------------------------------|-----------------------------------|
| end within a character                      | waits for the rest of it          |
| end with what a stop begins with            | waits until it is none            |
| complete a stop                             | is given out up to it, no further |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

BROKEN = "\ufffd"  # what decoders put in place of a character that is not all there


class Reading(NamedTuple):
    """How far new tokens have been read.

    Attributes:
        first: from here on tokens are decoded again with those that follow, as decoders write a
            token by what is before it.
        read: tokens whose text is known.
        held: the last of that text, which may be the beginning of a stop and is not given out.
    """

    first: int = 0
    read: int = 0
    held: str = ""


def read(
    reading: Reading, new: np.ndarray, decode: Callable[[Sequence[int]], str],
    stops: Sequence[str], *, last: bool = False,
) -> tuple[Reading, str, bool]:  # fmt: skip
    """Read on.

    Args:
        new: all new tokens of a request that may be read, those that have been read among them.
        stops: texts that end it.
        last: nothing follows: all there is is given out.

    Returns:
        How far that is, the text that is certain now, and whether a stop was found behind it.
    """
    first, done, held = reading
    before = decode(new[first:done].tolist()) if first < done else ""
    all_ = decode(new[first:].tolist()) if done < len(new) else before
    if not isinstance(all_, str):
        raise TypeError(f"it returned a {type(all_).__name__}, no str")
    if all_.endswith(BROKEN) and not last:
        return reading, "", False
    text = held + all_[len(before) :]
    reading = Reading(done, len(new)) if done < len(new) else reading
    found = [at for stop in stops if (at := text.find(stop)) >= 0]
    if found:
        return reading._replace(held=""), text[: min(found)], True
    keep = 0 if last else overlap(text, stops)
    sure = len(text) - keep
    return reading._replace(held=text[sure:]), text[:sure], False


def overlap(text: str, stops: Sequence[str]) -> int:
    """The most characters at the end of a text that a stop begins with.

    >>> overlap("a list.\\n", ["\\n\\n", "END"])
    1
    """
    longest = min(len(text), max(map(len, stops), default=1) - 1)
    for size in range(longest, 0, -1):
        if any(stop.startswith(text[-size:]) for stop in stops if len(stop) > size):
            return size
    return 0
