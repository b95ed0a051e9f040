"""`fngraph.report.draw_runs`: bars are runs, and as long as what they hold."""

import pytest

from fngraph.core import Path, pack, plan_encoder
from fngraph.report import Bar, bars_of, draw_runs

ONE = plan_encoder(64, 512, max_items=4)  # budgets 64, 128, 256, 512
TWO = plan_encoder(
    64, 512, max_items=4, paths={"view": Path(64), "crops": Path(128, allow_zero=True)}
)


def test_bars_are_runs():
    items = [60, 250, 700]
    bars = bars_of(pack(items, ONE), items, ONE)
    assert bars == {
        "default": [Bar((0,), (60,), 64), Bar((1,), (250,), 256), Bar((2,), (700,), None)]
    }
    assert [bar.padding for bar in bars["default"]] == [4, 6, 0]


def test_an_item_is_in_bars_of_its_own_paths():
    items = [{"view": 64, "crops": 0}, {"view": 64, "crops": 100}]
    bars = bars_of(pack(items, TWO), items, TWO)
    assert [bar.items for bar in bars["view"]] == [(0, 1)]
    assert bars["crops"] == [Bar((1,), (100,), 128)]


def test_the_picture_is_as_long_as_its_graphs(tmp_path):
    pytest.importorskip("matplotlib")
    items = [60, 30, 250, 700]
    packed = pack(items, ONE)
    figure = draw_runs(packed, items, ONE)
    (axis,) = figure.axes
    found = {}
    for patch in axis.patches:
        y = round(patch.get_y() + patch.get_height() / 2)
        found[y] = max(found.get(y, 0), round(patch.get_x() + patch.get_width()))
    bars = bars_of(packed, items, ONE)["default"]
    assert found == {y: bar.budget or sum(bar.tokens) for y, bar in enumerate(bars)}
    labels = [text.get_text() for text in axis.get_yticklabels()]
    assert labels == [str(bar.budget or "eager") for bar in bars] and "eager" in labels
    hatched = [round(patch.get_width()) for patch in axis.patches if patch.get_hatch()]
    assert hatched == [bar.padding for bar in bars if bar.padding]
    assert len(draw_runs(pack([], TWO), [], TWO).axes) == 2
    figure.savefig(tmp_path / "runs.png")
