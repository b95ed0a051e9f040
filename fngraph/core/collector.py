"""Python's collector of cycles, paused where hundreds of thousands of objects are made to stay.

It looks at all of them again and again, and finds nothing: a quarter of the time of an import, a
third of that of a trace.
"""

from __future__ import annotations

import gc
import threading


class Pauses:
    """Those that go on now, in all threads: one that ends must not wake it for the others."""

    def __init__(self) -> None:
        self._lock, self._number, self._was_enabled = threading.Lock(), 0, False

    def __enter__(self) -> Pauses:
        with self._lock:
            if self._number == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._number += 1
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._number -= 1
            if self._number == 0 and self._was_enabled:
                gc.enable()


_PAUSES = Pauses()


def without_collector() -> Pauses:
    """Meanwhile nothing is collected but by `gc.collect()`, whatever ends in other threads. Then it
    is as it was before the first of those that overlap."""
    return _PAUSES
