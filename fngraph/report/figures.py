"""Figures that a notebook shows: as the last line of a cell, or by `display`."""

from __future__ import annotations

import functools
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import matplotlib.figure


def make_figure(width: float, height: float) -> matplotlib.figure.Figure:
    """An empty figure without pyplot's global state, in inches. Notebooks show it with `%matplotlib
    inline` and without."""
    return _shown()(figsize=(width, height), layout="constrained")


def legend_above(axis: Any, handles: Sequence[Any] | None = None, columns: int = 2) -> None:
    """A panel's legend above its right end, where it lies over nothing; its title is on the left.

    Args:
        handles: what it shows; None: what has a label.
        columns: at most so many beside each other.
    """
    shown = handles if handles is not None else axis.get_legend_handles_labels()[0]
    axis.legend(
        handles=shown, loc="lower right", bbox_to_anchor=(1, 1), ncols=min(len(shown), columns),
        frameon=False, fontsize="small", borderaxespad=0.1,
    )  # fmt: skip


@functools.cache
def _shown() -> type[matplotlib.figure.Figure]:
    """The class, made once matplotlib is needed."""
    from matplotlib.figure import Figure

    class Shown(Figure):
        """A figure that knows its picture. The same figure is the same bytes."""

        def _repr_png_(self) -> bytes:
            written = io.BytesIO()
            self.savefig(written, format="png", metadata={"Software": None})
            return written.getvalue()

    return Shown
