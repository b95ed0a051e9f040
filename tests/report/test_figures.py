"""Pictures show themselves in a notebook, and are the same bytes each time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.decode.picture import figure_of
from fngraph.core import (
    BatchSpec,
    Flown,
    KeyLog,
    KeyPart,
    Limits,
    Log,
    Mode,
    build_table,
    ladders,
    pack,
    plan_encoder,
)
from fngraph.models.training.picture import draw_losses
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


def flown(i: int) -> Flown:
    """A step that ran at once as the one before was done, so that no place is left."""
    mode, key = ((Mode.FULL, "FULL 8x8"), (Mode.PIECEWISE, "PIECEWISE 8"), (Mode.NONE, ""))[i % 3]
    return Flown(i * 50.0, BatchSpec(7, 7), mode, key, 8, "", 50.0, 49.0)


BUSY = Log(
    "a long name of a forward " * 2,
    tuple(map(flown, range(30))),
    tuple(
        KeyLog(key, 8, (1000, 2000), (9000, 9000), 90.0, i,
               (KeyPart("a", 9.0, 20.0, False), KeyPart("b", 30.0, 70.0, True)))
        for i, key in enumerate(("FULL 8x8", "PIECEWISE 8"))
    ),
    (("piece 0", "T 1..16", 3, False, 90.0), ("piece 1", "T 1..16", 2, True, 90.0)),
    ((7, 8, "FULL", 10), (7, 8, "PIECEWISE", 10), (7, 8, "NONE", 10)),
)  # fmt: skip


def losses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The picture of a run whose losses go up, as it is saved."""
    from matplotlib.figure import Figure

    saved: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    up = torch.arange(1.0, 100.0)
    draw_losses(folder / "loss.png", up, torch.stack([up[::9], up[::9]], 1), "a run")
    return saved[0]


ROWS = [
    {"model": "1B", "context": 128, "way": way, "batch": n, "wall ms": 1.0 * n, "share": 0.5}
    for way in ("FULL", "compiled", "bare") for n in (1, 8)
]  # fmt: skip
PICTURES = {
    "table": lambda *_: draw_table(build_table("PIECEWISE", ladders((4, 8)), LIMITS)),
    "padding": lambda *_: draw_padding({n: 1 for n in range(1, 64)}, {"a": (64,), "b": (8, 64)}),
    "many ladders": lambda *_: draw_padding({63: 1}, {"abcdefg" * i: (64,) for i in range(1, 5)}),
    "runs": lambda *_: draw_runs(pack([3, 9], PLAN), [3, 9], PLAN),
    "log": lambda *_: draw_log(BUSY),
    "losses": losses,
    "decode": lambda *_: figure_of(ROWS, ["FULL"]),
}


@pytest.mark.parametrize("what", PICTURES)
def test_no_legend_lies_over_what_is_drawn(what: str, tmp_path: Path, monkeypatch):
    """Whatever the figures are: none lies within a panel, and none over a word."""
    pytest.importorskip("matplotlib")
    figure = PICTURES[what](tmp_path, monkeypatch)
    figure.draw_without_rendering()
    legends = [*figure.legends, *filter(None, (axis.get_legend() for axis in figure.axes))]
    assert legends or what == "runs"
    words = [figure._suptitle] if figure._suptitle else []
    for axis in figure.axes:
        words += [axis.title, axis._left_title, axis.xaxis.label, axis.yaxis.label]
        words += [*axis.get_xticklabels(), *axis.get_yticklabels()]
    boxes = [axis.get_window_extent() for axis in figure.axes]
    boxes += [word.get_window_extent() for word in words if word.get_text()]
    for legend in legends:
        own = legend.get_window_extent()
        assert (
            own.x0 >= figure.bbox.x0 and own.x1 <= figure.bbox.x1 + 1 and own.y1 <= figure.bbox.y1
        )
        texts = [text.get_window_extent() for text in legend.get_texts()]
        for box in boxes:
            assert not any(text.overlaps(box.padded(-1)) for text in texts), (legend, box)
