"""Dispatch, to look at: a whole table as a picture, and one decision as a rich table.

The picture shows tokens by requests, coloured by what a batch there runs as; the paler the colour,
the more of the step is padding, as the bar at its side says. Below it, a strip for each query
length of uniform batches. Where a table reaches far, its axes are logarithmic, so that small keys
are seen.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from fngraph.core import BatchSpec, DispatchTable, Explanation, Mode, dispatch
from fngraph.core.kinds import checked
from fngraph.core.text import with_suggestions
from fngraph.report.figures import make_figure

if TYPE_CHECKING:
    import matplotlib.figure
    import rich.table

COLORS = {
    Mode.FULL: (0.12, 0.37, 0.66),
    Mode.PIECEWISE: (0.90, 0.45, 0.10),
    Mode.NONE: (0.55, 0.55, 0.55),
}
PALEST = 0.15
"""Strength of the colour of a step that is all padding; 1 for one without any."""
FAR = 64
"""Tokens or requests from which on an axis is logarithmic."""


class Cell(NamedTuple):
    """What one batch runs as, and the share of its step that is padding."""

    mode: Mode
    padding: float


@checked
def mixed_grid(
    table: DispatchTable, max_tokens: int, max_reqs: int, adapters: int = 0
) -> list[list[Cell | None]]:
    """`grid[reqs - 1][tokens - 1]`: mixed batches; None where requests outnumber tokens."""
    return [
        [
            _cell(table, BatchSpec(tokens, reqs, adapters=adapters)) if reqs <= tokens else None
            for tokens in range(1, max_tokens + 1)
        ]
        for reqs in range(1, max_reqs + 1)
    ]


@checked
def uniform_strip(
    table: DispatchTable, query_len: int, max_tokens: int, max_reqs: int, adapters: int = 0
) -> list[Cell | None]:
    """`strip[tokens - 1]`: uniform batches; None where no whole number of requests makes them."""
    return [
        _cell(table, BatchSpec(tokens, tokens // query_len, query_len, adapters))
        if tokens % query_len == 0 and tokens // query_len <= max_reqs
        else None
        for tokens in range(1, max_tokens + 1)
    ]


@checked
@with_suggestions
def draw_table(
    table: DispatchTable,
    *,
    max_tokens: int | None = None,
    max_reqs: int | None = None,
    adapters: int = 0,
) -> matplotlib.figure.Figure:
    """The picture of `table`, without pyplot's global state. In a notebook, the last line shows it.

    Args:
        max_tokens: the right edge; None: a little beyond the largest key.
        max_reqs: the upper edge; None: the table's limit, or the right edge if that is less.
        adapters: of all batches shown.
    """
    from matplotlib.patches import Patch

    right = max_tokens or max(table.top + table.top // 8, 8)
    upper = max_reqs or min(table.limits.max_reqs, right)
    lengths = sorted({key.query_len for key in table.full if key.query_len is not None})
    figure = make_figure(9, 3.6 + 0.45 * len(lengths))
    grid = figure.add_gridspec(
        1 + len(lengths), 2, height_ratios=[8, *[1] * len(lengths)], width_ratios=[24, 1]
    )
    axes = [figure.add_subplot(grid[0, 0])]
    axes += [figure.add_subplot(grid[i, 0], sharex=axes[0]) for i in range(1, 1 + len(lengths))]
    _paint(axes[0], mixed_grid(table, right, upper, adapters))
    axes[0].set(title=repr(table), ylabel="requests (mixed)")
    if upper >= FAR:
        _logarithmic(axes[0].yaxis, upper)
    for axis, query_len in zip(axes[1:], lengths):
        strip = uniform_strip(table, query_len, right, table.limits.max_reqs, adapters)
        _paint(axis, [[cell or _next(strip, i) for i, cell in enumerate(strip)]])
        axis.set_yticks([])
        axis.set_ylabel(f"{query_len} each", rotation=0, ha="right", va="center")
    for axis in axes[:-1]:
        axis.tick_params(labelbottom=False)
    axes[-1].set_xlabel("tokens")
    if right >= FAR:
        _logarithmic(axes[-1].xaxis, right)
    patches = [Patch(color=color, label=str(mode)) for mode, color in COLORS.items()]
    figure.legend(handles=patches, loc="outside lower left", ncols=len(patches))
    _bar(figure.add_subplot(grid[0, 1]))
    return figure


@checked
def explanation_table(explanation: Explanation) -> rich.table.Table:
    """One decision: the chosen key first, then each other key and the field that ruled it out."""
    from rich.table import Table

    mode, key, reason = explanation.chosen
    shown = Table(title=repr(explanation.spec), title_justify="left")
    for name in ("mode", "key", "field", "why"):
        shown.add_column(name)
    shown.add_row(str(mode), repr(key), "", reason, style="bold green")
    for other in explanation.others:
        style = "" if other.field is None else "dim"
        shown.add_row(
            str(other.mode), repr(other.descriptor), other.field or "", other.why, style=style
        )
    return shown


def _cell(table: DispatchTable, spec: BatchSpec) -> Cell:
    mode, key, _ = dispatch(table, spec)
    return Cell(mode, 1 - spec.num_tokens / key.num_tokens)


def _next(strip: list[Cell | None], at: int) -> Cell | None:
    """Token counts between two uniform batches are drawn like the next one."""
    return next((cell for cell in strip[at:] if cell is not None), None)


def _paint(axis: Any, cells: list[list[Cell | None]]) -> None:
    """Cells as squares around their numbers, the first of which are 1 and 1."""
    columns, rows = ([k + 0.5 for k in range(n + 1)] for n in (len(cells[0]), len(cells)))
    image = [[_rgb(cell) for cell in row] for row in cells]
    for along in (axis.xaxis, axis.yaxis):
        along.get_major_locator().set_params(integer=True)
    axis.pcolormesh(columns, rows, image, rasterized=True)


def _logarithmic(axis: Any, end: int) -> None:
    """Ticks at powers of two up to `end`."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    ticks = [1 << k for k in range(end.bit_length())]
    axis.set_ticks(ticks, [str(tick) for tick in ticks])
    axis.set_ticks([], minor=True)


def _bar(axis: Any) -> None:
    """The colour bar: how pale each mode is at which share of padding."""
    modes = (Mode.FULL, Mode.PIECEWISE)  # NONE has no padding
    shares = [k / 100 for k in range(101)]
    image = [[_rgb(Cell(mode, share)) for mode in modes] for share in shares]
    axis.imshow(image, origin="lower", aspect="auto", extent=(0, len(modes), 0, 1))
    axis.yaxis.tick_right()
    axis.yaxis.set_label_position("right")
    axis.set(xticks=[], yticks=[k / 4 for k in range(5)], ylabel="padding, of the step")
    axis.set_yticklabels([f"{k / 4:.0%}" for k in range(5)])


def _rgb(cell: Cell | None) -> tuple[float, ...]:
    if cell is None:
        return (1.0, 1.0, 1.0)
    # by its root, or the few percent of a fine ladder could not be told from none
    strength = 1 - (1 - PALEST) * cell.padding**0.5
    return tuple(1 - strength * (1 - part) for part in COLORS[cell.mode])
