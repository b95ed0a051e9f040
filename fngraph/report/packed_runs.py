"""Packing, to look at: each run of an encoder as a bar of its items, padding behind them.

Bars of a path are as long as their graphs; a run without a graph is grey, and as long as its items.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from fngraph.core import EncoderPlan, Item, Packed, item_of
from fngraph.core.kinds import checked
from fngraph.report.figures import make_figure

if TYPE_CHECKING:
    import matplotlib.figure

SHADES = ((0.12, 0.37, 0.66), (0.45, 0.65, 0.87))  # of items side by side
EAGER = ((0.45, 0.45, 0.45), (0.65, 0.65, 0.65))


class Bar(NamedTuple):
    """One run of a path.

    Attributes:
        items: numbers of those that bring it tokens, in order.
        tokens: how many, each.
        budget: of its graph; None: it has none.
    """

    items: tuple[int, ...]
    tokens: tuple[int, ...]
    budget: int | None

    @property
    def padding(self) -> int:
        """Tokens of the graph that are nobody's."""
        return 0 if self.budget is None else self.budget - sum(self.tokens)


@checked
def bars_of(
    packed: Packed, items: Iterable[int | Mapping[str, int] | Item], plan: EncoderPlan
) -> dict[str, list[Bar]]:
    """The runs of each path, in order; `items` as `fg.core.pack` takes them."""
    known = [item_of(item, plan) for item in items]
    bars: dict[str, list[Bar]] = {path: [] for path in plan.path_budgets}
    for run in packed.runs:
        place = list(plan.path_budgets).index(run.path)
        there = tuple(at for at in run.items if known[at].tokens[place])
        bars[run.path].append(
            Bar(there, tuple(known[at].tokens[place] for at in there), run.budget)
        )
    return bars


@checked
def draw_runs(
    packed: Packed, items: Iterable[int | Mapping[str, int] | Item], plan: EncoderPlan
) -> matplotlib.figure.Figure:
    """The picture of `packed`, a panel a path, without pyplot's global state.

    Args:
        items: what was packed, as `fg.core.pack` takes them.
    """
    bars = bars_of(packed, items, plan)
    heights = [1 + 0.4 * len(rows) for rows in bars.values()]
    figure = make_figure(9, 0.6 + sum(heights))
    panels = figure.subplots(len(bars), squeeze=False, height_ratios=heights)
    for (axis,), (path, rows) in zip(panels, bars.items()):
        for y, bar in enumerate(rows):
            _draw(axis, y, bar)
        graphs: Sequence[int] = [budget for budget in plan.path_budgets[path] if budget]
        for budget in graphs:
            axis.axvline(budget, color="0.85", linewidth=0.8, zorder=0)
        axis.set_yticks(range(len(rows)), [f"{b.budget or 'eager'}" for b in rows])
        axis.set(title=path, xlabel="output tokens", ylabel="graph")
        axis.invert_yaxis()
    return figure


def _draw(axis: object, y: int, bar: Bar) -> None:
    """One bar: its items from the left, padding hatched behind them."""
    barh = axis.barh  # type: ignore[attr-defined]
    left = 0
    for i, (item, tokens) in enumerate(zip(bar.items, bar.tokens)):
        shade = (EAGER if bar.budget is None else SHADES)[i % 2]
        barh(y, tokens, left=left, color=shade, label=str(item))
        left += tokens
    if bar.padding:
        barh(y, bar.padding, left=left, color="white", edgecolor="0.6", hatch="//", label="padding")
