"""Pictures show themselves in a notebook, and are the same bytes each time."""

from __future__ import annotations

import pytest

from fngraph.core import Limits, Log, build_table, ladders, pack, plan_encoder
from fngraph.report import draw_log, draw_padding, draw_runs, draw_table

LIMITS = Limits(16, 4)
PLAN = plan_encoder(4, 16, max_items=2)


@pytest.mark.parametrize(
    "draw",
    [
        lambda: draw_table(build_table("PIECEWISE", ladders((4, 8)), LIMITS)),
        lambda: draw_padding({3: 1, 7: 2}, {"a": (4, 8)}),
        lambda: draw_runs(pack([3, 9], PLAN), [3, 9], PLAN),
        lambda: draw_log(Log("nothing", ())),
    ],
    ids=["table", "padding", "runs", "log"],
)
def test_a_picture_is_a_png_to_a_notebook(draw):
    pytest.importorskip("matplotlib")
    from IPython.core.formatters import DisplayFormatter

    figure = draw()
    shown, _ = DisplayFormatter().format(figure, include=["image/png"])
    assert shown["image/png"].startswith(b"\x89PNG")
    assert shown["image/png"] == draw()._repr_png_()
