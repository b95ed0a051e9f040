"""The rows as a picture beside their JSON: a panel a model and context, a line a way.

Above, ms a token with its way back; below, the share of the copy bandwidth. fngraph's ways are
solid, others dashed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

FIGURES = (("wall ms", "ms a token", "log"), ("share", "share of copy bandwidth", "linear"))


def draw(
    rows: Sequence[Mapping[str, Any]], ours: Collection[str], path: Path | None
) -> Path | None:
    """Where it is; nowhere without a file of figures, figures, or matplotlib."""
    measured = [row for row in rows if "wall ms" in row]
    if path is None or not measured:
        return None
    try:
        figure = figure_of(measured, ours)
    except ImportError as error:
        print(f"no picture: {error}")
        return None
    to = path.with_suffix(".png")
    figure.savefig(to, dpi=120)
    return to


def figure_of(measured: Sequence[Mapping[str, Any]], ours: Collection[str]) -> Any:
    """A `matplotlib.figure.Figure`."""
    import matplotlib.figure

    panels = list(dict.fromkeys((row["model"], row["context"]) for row in measured))
    ways = list(dict.fromkeys(row["way"] for row in measured))
    figure = matplotlib.figure.Figure(figsize=(4.2 * len(panels) + 2.5, 8), layout="constrained")
    axes = figure.subplots(2, len(panels), squeeze=False, sharex=True)
    colors = matplotlib.colormaps["tab20"].colors  # type: ignore[attr-defined]
    for column, (model, context) in enumerate(panels):
        here = [row for row in measured if (row["model"], row["context"]) == (model, context)]
        axes[0][column].set_title(f"{model}, context {context}")
        for at, (name, label, scale) in enumerate(FIGURES):
            axis = axes[at][column]
            for number, way in enumerate(ways):
                points = sorted((row["batch"], row[name]) for row in here if row["way"] == way)
                if points:
                    axis.plot(
                        *zip(*points, strict=True), marker=".", color=colors[number % len(colors)],
                        label=way, linestyle="-" if way.removesuffix(", again") in ours else "--",
                    )  # fmt: skip
            axis.set_xscale("log", base=2)
            axis.set_yscale(scale)
            for ticks in (axis.xaxis, axis.yaxis):
                ticks.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter("{x:g}")
            axis.grid(alpha=0.3)
            if column == 0:
                axis.set_ylabel(label)
        axes[1][column].set_xlabel("requests")
    lines = {line.get_label(): line for axis in axes.flat for line in axis.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside right upper")
    return figure
