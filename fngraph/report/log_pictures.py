"""A log as one picture: the charts of the page, a panel each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fngraph.core import Log
from fngraph.report.figures import legend_above, make_figure
from fngraph.report.log_charts import KINDS, Chart, charts_of

if TYPE_CHECKING:
    import matplotlib.figure

COLORS = {
    "FULL": "#1f5fa8", "PIECEWISE": "#c96a12", "NONE": "#85827a", "padding": "#c9c5b9",
    "graph": "#1f5fa8", "eager": "#c96a12", "gap": "#c9c5b9", "pool": "#1f5fa8",
    "graphs": "#4f9a5b", "ahead": "#1f5fa8", "in step": "#b3382c", "loaded": "#4f9a5b",
}  # fmt: skip


def draw_log(log: Log) -> matplotlib.figure.Figure:
    """What the last steps were, and what keys cost; without pyplot's global state.

    In a notebook, the last line shows it.
    """
    charts = charts_of(log)
    heights = [1.1 + 0.28 * len(chart.bars) for chart in charts] or [1.0]
    figure = make_figure(9, sum(heights))
    figure.suptitle(log.title)
    panels = figure.subplots(max(len(charts), 1), squeeze=False, height_ratios=heights)
    for (axis,), chart in zip(panels, charts):
        _draw(axis, chart)
    return figure


def _draw(axis: object, chart: Chart) -> None:
    from matplotlib.patches import Patch

    axis.set_title(chart.title, loc="left")  # type: ignore[attr-defined]
    axis.set_xlabel(chart.unit)  # type: ignore[attr-defined]
    for y, bar in enumerate(chart.bars):
        for kind in chart.kinds:
            spans = [(s.start, s.length) for s in bar.spans if s.kind == kind]
            axis.broken_barh(  # type: ignore[attr-defined]
                spans, (y - 0.4, 0.8), facecolors=COLORS[kind]
            )
    labels = [bar.label for bar in chart.bars]
    axis.set_yticks(range(len(labels)), labels)  # type: ignore[attr-defined]
    axis.set_xlim(0, chart.end)  # type: ignore[attr-defined]
    axis.invert_yaxis()  # type: ignore[attr-defined]
    patches = [Patch(color=COLORS[kind], label=KINDS[kind]) for kind in chart.kinds]
    legend_above(axis, patches, len(patches))
