"""Pictures and progress: the only place that imports rich and matplotlib, each when it is used."""

# dispatch_grid.py: a whole table as a picture, one decision as a rich table
from fngraph.report.dispatch_grid import (
    Cell as Cell,
    draw_table as draw_table,
    explanation_table as explanation_table,
    mixed_grid as mixed_grid,
    uniform_strip as uniform_strip,
)

# ladder_padding.py: what ladders pad of a traffic, as a picture
from fngraph.report.ladder_padding import (
    draw_padding as draw_padding,
    padded_sizes as padded_sizes,
    padding_share as padding_share,
)

# log_charts.py: what is drawn of a run's log; log_page.py: as a page; log_pictures.py: as a picture
from fngraph.report.log_charts import Chart as Chart, charts_of as charts_of
from fngraph.report.log_page import page_of as page_of
from fngraph.report.log_pictures import draw_log as draw_log

# packed_runs.py: what an encoder packs into its graphs, as a picture
from fngraph.report.packed_runs import (
    Bar as Bar,
    bars_of as bars_of,
    draw_runs as draw_runs,
)

# progress.py: a bar over what is captured
from fngraph.report.progress import track as track

__all__ = [
    "Bar", "Cell", "Chart", "bars_of", "charts_of", "draw_log", "draw_padding", "draw_runs",
    "draw_table", "explanation_table", "mixed_grid", "padded_sizes", "padding_share", "page_of",
    "track", "uniform_strip",
]  # fmt: skip
