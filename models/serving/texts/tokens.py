"""A growing run of ids as a value: appending makes a new one, and no older one ever changes.

Versions share one array. The newest writes behind its own end; another version that is appended
to, whose place there is taken, moves to an array of its own. So a step costs what it appends.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np


class _Log:
    """What versions share: an array, how much of it is taken, and where each n-gram ends first."""

    __slots__ = ("data", "first", "indexed", "used")

    def __init__(self, ids: np.ndarray, room: int) -> None:
        self.data = np.zeros(room, ids.dtype)
        self.data[: len(ids)] = ids
        self.used, self.indexed = len(ids), 0
        self.first: dict[tuple[int, ...], int] = {}


class Tokens:
    """So many leading ids of a log. Compares and iterates as a tuple of ints does."""

    __slots__ = ("_length", "_log")

    def __init__(self, ids: Iterable[int] = (), dtype: type[np.generic] = np.int64) -> None:
        given = np.fromiter(ids, dtype)
        self._log, self._length = _Log(given, len(given) + 16), len(given)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        return iter(self._log.data[: self._length].tolist())

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Tokens):
            return NotImplemented
        return np.array_equal(self.view(), other.view())

    __hash__ = None  # type: ignore[assignment]

    def view(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Ids `start` to `stop`, without a copy. Not to be written."""
        end = self._length if stop is None else min(stop, self._length)
        return self._log.data[start:end]

    @property
    def last(self) -> int:
        """The last id."""
        return int(self._log.data[self._length - 1])

    def append(self, ids: Iterable[int]) -> Tokens:
        """These ids behind the others."""
        log, start, new = self._log, self._length, tuple(ids)
        end = start + len(new)
        if log.used != start or end > len(log.data):
            log = _Log(log.data[:start], 2 * end)
        log.data[start:end] = new
        log.used = end
        longer = object.__new__(Tokens)
        longer._log, longer._length = log, end
        return longer

    def after_first(self, n: int, most: int) -> list[int]:
        """What followed the first occurrence of the last n ids, at most `most` of it: drafts.

        Each id is indexed once, so that asking costs what was appended.
        """
        log, length = self._log, self._length
        if length <= n:
            return []
        if log.indexed < log.used:
            start = max(0, log.indexed - n + 1)
            ids = log.data[start : log.used].tolist()
            for end, gram in enumerate(zip(*(ids[i:] for i in range(n))), start + n):
                log.first.setdefault(gram, end)
            log.indexed = log.used
        end = log.first[tuple(log.data[length - n : length].tolist())]
        return log.data[end : min(end + most, length)].tolist()

    def __repr__(self) -> str:
        return f"Tokens({list(self)})"
