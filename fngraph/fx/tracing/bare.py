"""Whether bare `forward` runs here: then what is graphified within it runs bare as well, as a trace
takes it. It would capture graphs of its own else, and of copies."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

_RUNS: contextvars.ContextVar[bool] = contextvars.ContextVar("bare forward runs", default=False)
is_bare = _RUNS.get


@contextlib.contextmanager
def running_bare() -> Iterator[None]:
    """Meanwhile `is_bare()`, in this thread alone."""
    token = _RUNS.set(True)
    try:
        yield
    finally:
        _RUNS.reset(token)
