"""Progress bars, with rich where it is installed."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

T = TypeVar("T")


def track(items: Sequence[T], description: str) -> Generator[T]:
    """Iterate with a progress bar; without rich (the `report` extra), silently.

    Where the loop may raise, close it (`contextlib.closing`), or the bar stays on the screen.
    """
    try:
        import rich.progress
    except ModuleNotFoundError:
        yield from items
    else:
        yield from rich.progress.track(items, description, transient=False)
