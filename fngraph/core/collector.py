"""Python's collector of cycles, paused where hundreds of thousands of objects are made to stay.

It looks at all of them again and again, and finds nothing: a quarter of the time of an import, a
third of that of a trace.
"""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator


class _Pauses:
    """How many there are now, in all threads: one that ends must not wake it for the others."""

    def __init__(self) -> None:
        self.lock, self.number, self.was_enabled = threading.Lock(), 0, False

    def begin(self) -> None:
        with self.lock:
            if self.number == 0:
                self.was_enabled = gc.isenabled()
                gc.disable()
            self.number += 1

    def end(self) -> None:
        with self.lock:
            self.number -= 1
            if self.number == 0 and self.was_enabled:
                gc.enable()


_PAUSES = _Pauses()


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Meanwhile nothing is collected but by `gc.collect()`, whatever ends in other threads. Then it
    is as it was before the first of those that overlap."""
    _PAUSES.begin()
    try:
        yield
    finally:
        _PAUSES.end()
