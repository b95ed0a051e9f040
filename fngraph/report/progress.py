"""Progress bars, with rich where it is installed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], description: str) -> Iterable[T]:
    """Iterate with a progress bar; without rich (the `report` extra), silently."""
    try:
        import rich.progress
    except ModuleNotFoundError:
        return iter(items)
    return rich.progress.track(items, description, transient=False)
