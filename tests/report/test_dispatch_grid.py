"""`fngraph.report`: what the picture says, cell by cell, and that it is drawn."""

import io
import subprocess
import sys

import pytest
import torch

import fngraph as fg
from fngraph.core import BatchSpec, Limits, Mode, build_table, explain, ladders
from fngraph.report import draw_table, explanation_table, mixed_grid, track, uniform_strip
from fngraph.report.dispatch_grid import COLORS

TABLE = build_table("FULL_AND_PIECEWISE", ladders((2, 4), (1, 2), 3), Limits(64, 3))


def test_mixed_cells_are_what_dispatch_says():
    grid = mixed_grid(TABLE, max_tokens=5, max_reqs=3)
    assert [[cell and cell.mode.name[0] for cell in row] for row in grid] == [
        ["P", "P", "P", "P", "N"],
        [None, "P", "P", "P", "N"],
        [None, None, "P", "P", "N"],
    ]
    assert [cell.padding for cell in grid[0]] == [0.5, 0.0, 0.25, 0.0, 0.0]


def test_uniform_cells_are_what_dispatch_says():
    ones = uniform_strip(TABLE, 1, max_tokens=5, max_reqs=3)
    assert [cell and cell.mode for cell in ones] == [*[Mode.FULL] * 3, None, None]
    twos = uniform_strip(TABLE, 2, max_tokens=6, max_reqs=3, adapters=1)
    assert [cell and cell.mode for cell in twos] == [None, Mode.NONE] * 3


def test_picture_has_a_strip_for_each_query_length(tmp_path):
    pytest.importorskip("matplotlib")
    figure = draw_table(TABLE)
    mixed, one, two, bar = figure.axes
    assert mixed.get_title() == repr(TABLE)
    assert [axis.get_ylabel() for axis in (one, two)] == ["1 each", "2 each"]
    image = mixed.collections[0].get_array()
    assert image.shape == (3, 8, 3) and mixed.get_xscale() == "linear"
    assert tuple(image[0, 1]) == pytest.approx(COLORS[Mode.PIECEWISE])  # 2 tokens: no padding
    assert tuple(image[0, 7]) == pytest.approx(COLORS[Mode.NONE])
    assert (image[0, 0] > image[0, 1]).all()  # 1 token: half padding, paler
    assert tuple(image[2, 0]) == (1, 1, 1)  # more requests than tokens
    assert tuple(two.collections[0].get_array()[0, 0]) == pytest.approx(COLORS[Mode.FULL])
    shown = bar.images[0].get_array()  # from no padding, below, to all
    assert tuple(shown[0, 0]) == pytest.approx(COLORS[Mode.FULL]) and shown.shape == (101, 2, 3)
    assert tuple(shown[25, 1]) == pytest.approx(tuple(image[0, 2]))  # 3 tokens in 4
    figure.savefig(tmp_path / "grid.png")


def test_a_default_ladder_is_legible():
    """A row or two of padding in a hundred is another colour, and small keys are wide."""
    pytest.importorskip("matplotlib")
    limits = Limits(8192, 256)
    table = build_table("FULL_AND_PIECEWISE", ladders(fg.core.default_sizes(limits)), limits)
    mixed = draw_table(table).axes[0]
    assert mixed.get_xscale() == mixed.get_yscale() == "log"
    image = mixed.collections[0].get_array()[0]
    assert abs(image[511 - 8] - image[511]).max() > 0.08  # 504 of 512
    left, right = mixed.transData.transform([(1.5, 1), (2.5, 1)])[:, 0]
    assert right - left > 20  # pixels, of a key of 2 tokens


def test_picture_of_nothing():
    pytest.importorskip("matplotlib")
    empty = build_table("NONE", ladders((1,)), Limits(64, 3))
    assert draw_table(empty, max_tokens=4, max_reqs=2).axes[0].collections[0].get_array().shape == (
        *(2, 4, 3),
    )


def test_explanation_in_rich():
    rich = pytest.importorskip("rich.console")
    console = rich.Console(width=120, record=True, file=io.StringIO())
    console.print(explanation_table(explain(TABLE, BatchSpec(3, 2))))
    text = console.export_text()
    assert "BatchSpec(num_tokens=3, num_reqs=2)" in text
    assert "num_tokens: 2 is less than 3" in text and "PIECEWISE" in text


def test_report_has_its_names_and_is_light_until_one_is_used():
    names = {"Bar", "Cell", "bars_of", "draw_runs", "draw_table", "explanation_table"}
    names |= {"mixed_grid", "track", "uniform_strip"}
    names |= {"Chart", "charts_of", "draw_log", "page_of"}
    names |= {"draw_padding", "padded_sizes", "padding_share"}
    assert names == set(fg.report.__all__) and all(hasattr(fg.report, name) for name in names)
    code = "import sys, fngraph as fg; fg.report; print({'rich', 'matplotlib'} & {*sys.modules})"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "set()"


def test_without_rich_progress_is_silent(monkeypatch):
    monkeypatch.setitem(sys.modules, "rich.progress", None)
    assert list(track([3, 1], "capturing")) == [3, 1]


def test_progress_ends_where_a_capture_fails(monkeypatch):
    """The bar is let go of before the error is shown, whoever holds its traceback."""
    progress = pytest.importorskip("rich.progress")
    live = []
    for name, change in (("start", live.append), ("stop", live.remove)):
        old = getattr(progress.Progress, name)
        told = lambda self, old=old, change=change: (change(1), old(self))  # noqa: E731
        monkeypatch.setattr(progress.Progress, name, told)
    run = fg.graphify(lambda w, x: x @ w, stage="x").bind(torch.ones(2, 2))

    def fails(*args):
        assert live == [1]
        raise ValueError("mine")

    monkeypatch.setattr("fngraph.step.capture.obtain", fails)
    with pytest.raises(ValueError, match="mine"):
        try:
            run.capture(batch=torch.ones(2, 2))
        except ValueError:  # whose traceback still holds the loop
            assert live == []
            raise


def test_progress_says_what_goes_on(capsys):
    pytest.importorskip("rich")
    assert list(track([3, 1], "capturing")) == [3, 1]
    assert "capturing" in capsys.readouterr().out
