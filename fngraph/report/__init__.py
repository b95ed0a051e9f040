"""Pictures and progress: the only place that imports rich and matplotlib, each when it is used."""

# dispatch_grid.py: a whole table as a picture, one decision as a rich table
from fngraph.report.dispatch_grid import (
    Cell as Cell,
    draw_table as draw_table,
    explanation_table as explanation_table,
    mixed_grid as mixed_grid,
    uniform_strip as uniform_strip,
)

# packed_runs.py: what an encoder packs into its graphs, as a picture
from fngraph.report.packed_runs import (
    Bar as Bar,
    bars_of as bars_of,
    draw_runs as draw_runs,
)

# progress.py: a bar over what is captured
from fngraph.report.progress import track as track

__all__ = [
    "Bar", "Cell", "bars_of", "draw_runs", "draw_table", "explanation_table", "mixed_grid", "track",
    "uniform_strip",
]  # fmt: skip
