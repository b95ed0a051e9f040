"""Padding of ladders against a traffic, to look at: rows of padding by the size of a step, with how
many steps had that size below."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from fngraph.core.kinds import checked
from fngraph.report.figures import legend_above, make_figure

if TYPE_CHECKING:
    import matplotlib.figure

COLORS = ("#85827a", "#1f5fa8", "#c96a12", "#4f9a5b", "#b3382c")


@checked
def padded_sizes(ladder: Sequence[int], top: int) -> list[int]:
    """`found[n - 1]`: the size that a step of n rows runs at, for n up to `top`.

    Args:
        ladder: capture sizes, ascending. A step beyond its largest runs as it is.
    """
    found = []
    for n in range(1, top + 1):
        at = bisect_left(ladder, n)
        found.append(ladder[at] if at < len(ladder) else n)
    return found


@checked
def padding_share(histogram: Mapping[int, float], ladder: Sequence[int]) -> float:
    """Rows of padding for each true row, over the whole traffic; 0 for no traffic."""
    sizes = padded_sizes(ladder, max(histogram, default=0))
    rows = sum(n * steps for n, steps in histogram.items())
    return sum(sizes[n - 1] * steps for n, steps in histogram.items()) / rows - 1 if rows else 0.0


@checked
def draw_padding(
    histogram: Mapping[int, float], ladders: Mapping[str, Sequence[int]]
) -> matplotlib.figure.Figure:
    """The picture, without pyplot's global state. In a notebook, the last line shows it.

    Args:
        histogram: rows of a step -> how many steps had so many, as `Flight.histogram` counts them.
        ladders: capture sizes, ascending, by the name that the legend gives them.
    """
    top = max(histogram, default=1)
    counts = list(range(1, top + 1))
    figure = make_figure(9, 4.2)
    padding, traffic = figure.subplots(2, sharex=True, height_ratios=[2, 1])
    for i, (name, ladder) in enumerate(ladders.items()):
        share, color = padding_share(histogram, ladder), COLORS[i % len(COLORS)]
        rows = [size - n for n, size in zip(counts, padded_sizes(ladder, top))]
        sizes = sum(size <= top for size in ladder)
        label = f"{name}: {sizes} sizes, {share:.1%} padding"
        padding.step(counts, rows, where="mid", color=color, label=label, linewidth=1.4)
    padding.set(ylabel="rows of padding")
    padding.set_ylim(bottom=0)
    legend_above(padding)
    traffic.bar(list(histogram), list(histogram.values()), width=0.9, color="#1c1c1a")
    traffic.set(xlabel="rows of a step", ylabel="steps")
    return figure
