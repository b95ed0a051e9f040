"""`fngraph.report.draw_padding`: what a ladder pads of a traffic."""

import pytest

from fngraph.core import plan_sizes, planned_cost
from fngraph.report import draw_padding, padded_sizes, padding_share

TRAFFIC = {1: 40, 3: 10, 7: 5, 12: 1}


def test_a_step_runs_at_the_next_size():
    assert padded_sizes((1, 4, 8), 10) == [1, 4, 4, 4, 8, 8, 8, 8, 9, 10]
    assert padded_sizes((), 2) == [1, 2]


def test_the_share_is_what_the_planner_counts():
    ladder = plan_sizes(TRAFFIC, 2)
    rows = sum(n * steps for n, steps in TRAFFIC.items())
    assert padding_share(TRAFFIC, ladder) == pytest.approx(planned_cost(TRAFFIC, ladder) / rows - 1)
    assert padding_share(TRAFFIC, (1, 3, 7, 12)) == padding_share({}, (1,)) == 0


def test_the_picture_has_a_line_a_ladder_and_the_traffic(tmp_path):
    pytest.importorskip("matplotlib")
    figure = draw_padding(TRAFFIC, {"twos": (2, 4, 8, 16), "exact": (1, 3, 7, 12)})
    padding, traffic = figure.axes
    twos, exact = padding.lines
    assert list(twos.get_ydata()[:5]) == [1, 0, 1, 0, 3] and exact.get_ydata()[6] == 0
    assert twos.get_label() == "twos: 3 sizes, 50.4% padding"
    assert [bar.get_height() for bar in traffic.patches] == list(TRAFFIC.values())
    figure.savefig(tmp_path / "padding.png")
