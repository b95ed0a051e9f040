"""Figures that a notebook shows: as the last line of a cell, or by `display`."""

from __future__ import annotations

import functools
import io
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import matplotlib.figure


def make_figure(width: float, height: float) -> matplotlib.figure.Figure:
    """An empty figure without pyplot's global state, in inches. Notebooks show it with `%matplotlib
    inline` and without."""
    return _shown()(figsize=(width, height), layout="constrained")


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
