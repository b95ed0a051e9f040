"""The page of a run: opened in a browser, as wide as a phone and as a screen; and what it is of."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fngraph.__main__ import main
from fngraph.core import BatchSpec, Flown, HostBounds, KeyLog, KeyPart, Log, Mode
from fngraph.errors import SpecError
from fngraph.report import charts_of, draw_log, page_of
from tests.browser import PHONE, SCREEN, View, looked_at

LONG = (
    "a reason that is so long that no phone could show it in one line, with_a_word_of_its_own" * 2
)


def flown(i: int) -> Flown:
    """One of a few kinds of steps."""
    kinds = (
        (BatchSpec(3, 3, 1), Mode.FULL, "FULL 4x4 q1", 4, "least FULL key", 21.0),
        (BatchSpec(13, 2), Mode.PIECEWISE, "PIECEWISE 16", 16, "least PIECEWISE key", 90.0),
        (BatchSpec(900, 5, host=HostBounds(300, 800)), Mode.NONE, "", 900, LONG, None),
    )
    spec, mode, key, padded, reason, device = kinds[i % 3]
    return Flown(i * 100.0, spec, mode, key, padded, reason, 30.0 + i, device)


LOG = Log(
    "forward_of_a_model_with_a_long_name on <NVIDIA & others>",
    tuple(map(flown, range(120))),
    (
        KeyLog("FULL 4x4 q1", 4, (1000, 2000), (1_500_000, 700_000), 4000.0, 1,
               (KeyPart("graph 0", 50.0, 50.0, False),)),
        KeyLog("PIECEWISE 16", 16, (1000, 2000), (0, 900_000), 9000.0, 0,
               (KeyPart("graph 0", 20.0, 22.0, False), KeyPart("attention 0", 30.0, 70.0, True))),
        *(KeyLog(f"PIECEWISE {n}", n, (1000, 2000)) for n in range(17, 90)),
    ),
    (("piece 0", "T 1..16", 3, False, 1.5e6), ("piece 1", "T 1..16", 2, True, 3e3)),
    ((3, 4, "FULL", 60), (13, 16, "PIECEWISE", 30), (900, 900, "NONE", 10)),
    {LONG: 10},
    (4, 1),
)  # fmt: skip


def test_a_log_comes_back_as_it_was_saved(tmp_path: Path):
    LOG.save(tmp_path / "run.json")
    assert Log.loads((tmp_path / "run.json").read_text()) == LOG
    assert LOG.flight.specs == tuple(step.spec for step in LOG.steps)
    text = LOG.as_text(last=2)
    assert text.count("\n|") == 4 and "PIECEWISE 16" in text and "<table>" in LOG._repr_html_()
    assert "11.900" in text and "11.700" not in text  # the last ones
    assert LOG.as_text(last=0).count("\n|") == 2 and LOG.as_text(last=999).count("\n|") == 122


FOREIGN = {
    "": "it is empty.",
    "[]": "it is JSON of a list.",
    "{}": "it is JSON of something else, which holds nothing.",
    '{"model": 1, "b": 2}': "it is JSON of something else, which holds 'model', 'b'.",
    '{"traceEvents": []}': "it is a trace, for Perfetto and TensorBoard.",
    '{"format": "fngraph log 0"}': "it is of another version of fngraph ('fngraph log 0', and",
    '{"format": 3}': "it is JSON of something else, which holds 'format'.",
    "nonsense": "it is no JSON (Expecting value: line 1 column 1 (char 0)).",
    LOG.dumps()[:100]: "it is no JSON (",
    LOG.dumps().replace('"counted"', '"count"'): "it lacks 'counted'.",
    LOG.dumps().replace('"FULL"', '"FUL"'): "a part of it cannot be read (",
    LOG.dumps().replace('"FULL", 60', '"FULL_DECODE_ONLY", 60'): "a part of it cannot be read (",
    LOG.dumps().replace('"title": "', '"title": 5, "a": "'): "a part of it cannot be read (",
    LOG.dumps().replace("[0.0, ", '["0.0", '): "a part of it cannot be read (",
    LOG.dumps().replace("4, 0, 30.0", "4, -1, 30.0"): "a part of it cannot be read (",
    LOG.dumps().replace("9000.0", "NaN"): "a part of it cannot be read (",
}


@pytest.mark.parametrize("text", FOREIGN)
def test_what_is_no_log_is_told_in_one_line(text: str, tmp_path: Path, capsys: Any):
    with pytest.raises(SpecError) as caught:
        Log.loads(text)
    told = str(caught.value)
    assert told.startswith(f"this is not a log that step.log.save wrote: {FOREIGN[text]}")
    assert told.endswith("record=1000 writes one: step.log.save('run.json')")
    assert "KeyError" not in told
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(SystemExit) as status:
        main(["report", str(tmp_path / "run.json")])
    assert status.value.code == 2 and not (tmp_path / "run.html").exists()
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert last.endswith(f"run.json: {told.splitlines()[0]}")


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda path: None, "No such file or directory"),
        (lambda path: path.mkdir(), "Is a directory"),
        (lambda path: path.write_bytes(b"\xff\xfe\x00"), "this is no text"),
    ],
)
def test_a_file_that_cannot_be_read_is_told_in_one_line(make: Any, why: str, tmp_path, capsys):
    make(tmp_path / "run.json")
    with pytest.raises(SystemExit) as status:
        main(["report", str(tmp_path / "run.json")])
    assert status.value.code == 2
    last = capsys.readouterr().err.rstrip().splitlines()[-1]
    assert f"run.json: {why}. A step that is captured with record=1000 writes one: step.log" in last


@pytest.mark.parametrize(
    "flags",
    ["run.json --out run.json", "run.json --trace run.json", "run.html",
     "run.json --out one --trace one", "run.json --trace run.html", "run.json --out x/../run.json"],
)  # fmt: skip
def test_what_is_read_is_not_written_over(flags: str, tmp_path: Path, capsys: Any, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x").mkdir()
    for name in ("run.json", "run.html"):
        (tmp_path / name).write_text("as it was")
    with pytest.raises(SystemExit) as status:
        main(["report", *flags.split()])
    assert status.value.code == 2
    assert "name files of their own" in capsys.readouterr().err
    assert {x.name: x.read_text() for x in tmp_path.iterdir() if x.is_file()} == dict.fromkeys(
        ("run.json", "run.html"), "as it was"
    )


def test_a_trace_has_each_step_and_part_on_its_track(tmp_path: Path):
    LOG.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    assert all(e.keys() >= {"pid", "tid", "ts", "dur", "name"} for e in spans)
    tracks: dict[Any, list[Any]] = {}
    for e in spans:
        tracks.setdefault((e["pid"], e["tid"]), []).append(e)
    assert len(tracks[1, 1]) == 120 and len(tracks[1, 2]) == 80
    assert [(e["name"], e["ts"], e["dur"]) for e in tracks[2, 2]] == [
        ("gap", 0.0, 2.0), ("graph 0", 2.0, 20.0), ("gap", 22.0, 40.0), ("attention 0", 62.0, 30.0)
    ]  # fmt: skip
    for track in (1, 2):  # captures and compilations, in turn
        first, second = tracks[3, track]
        assert (first["ts"], second["ts"]) == (0.0, first["dur"])
    assert [e["dur"] for e in tracks[3, 1]] == [4000.0, 9000.0]
    assert KeyPart("measured with noise", 3.0, 2.5, False).gap == 0.0
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert named[2, 2] == "PIECEWISE 16" and named[1, 2] == "device"


def test_the_device_begins_a_step_where_it_is_through_with_the_one_before(tmp_path: Path):
    """The host is ahead of it: spans of one track lie behind one another."""
    steps = tuple(flown(0)._replace(at=10.0 * i, host=5.0, device=30.0) for i in range(3))
    late = flown(0)._replace(at=500.0, device=30.0)
    log = Log("ahead", (*steps, flown(2)._replace(at=25.0), late))
    log.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    device = [e["ts"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (1, 2)]
    assert device == [0.0, 30.0, 60.0, 500.0]
    (chart,) = (chart for chart in charts_of(log) if chart.title == "Timeline")
    assert [span.start * 1000 for span in chart.bars[1].spans] == device


def test_what_is_left_out_of_a_chart_is_said_and_nothing_is_padded_without_steps():
    steps = tuple(flown(0)._replace(key=f"FULL {i}") for i in range(70))
    log = Log("many", steps)
    (ladder,) = (chart for chart in charts_of(log) if chart.title == "Ladder and traffic")
    assert (
        len(ladder.bars) == 60
        and ladder.left == "10 more are not shown: these had the most tokens."
    )
    assert "0 steps, 0 tokens; 0.0% padding." in page_of(Log("nothing", ()))
    for draw in (charts_of, page_of, draw_log):
        with pytest.raises(TypeError, match=r"expected a Log, got Flight. Pass step\.log"):
            draw(LOG.flight)


class Tags(HTMLParser):
    """Tags of a page, and its text and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.said: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        self.said += [value for _, value in attrs if value]

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def test_names_with_html_in_them_are_text():
    plain = Tags(page_of(LOG)).tags
    evil = '</title><script>alert(1)</script><b onload="x">\'&'
    wide = [flown(0)._replace(key=f"{evil} {i}", reason=evil) for i in range(61)]
    key = KeyLog(evil, 4, (1, 2), (3, 4), 5.0, 1, (KeyPart(evil, 1.0, 2.0, True),))
    log = Log(
        evil, (*wide, flown(2)), (key,), ((evil, evil, 1, True, 2.0),), LOG.counted, {evil: 1}
    )
    page = Tags(page_of(log))
    assert page.tags <= plain and "script" not in page.tags
    for said in (evil, f"{evil} 3", f"{evil}: 1.0 us", f"{evil}, {evil}"):
        assert any(said in text for text in page.said), said
    assert "<script" not in LOG._replace(title=evil)._repr_html_()


def test_the_page_says_what_differs_and_the_slowest_steps_first():
    page = page_of(LOG)
    assert "4 verified, of which 1 differ." in page and "differ" not in page_of(
        LOG._replace(verified=(0, 0))
    )
    rows = [line for line in page[page.index("The slowest") :].splitlines() if "<td" in line]
    assert [re.findall("<td class=n>([^<]*)", row)[1] for row in rows] == [
        str(30 + i) for i in range(119, 109, -1)
    ]


def test_the_timeline_is_of_the_last_steps_from_the_first_of_them():
    steps = tuple(flown(0)._replace(at=1000.0 * i, host=float(i), device=None) for i in range(500))
    (chart,) = (chart for chart in charts_of(Log("long", steps)) if chart.title == "Timeline")
    (bar,) = chart.bars
    assert len(bar.spans) == 400 and bar.spans[0].start == 0.0
    assert bar.spans[-1].start == 399.0 and bar.spans[-1].length == 0.499


def test_charts_are_of_the_log():
    charts = {chart.title: chart for chart in charts_of(LOG)}
    assert [s.length for bar in charts["Modes"].bars for s in bar.spans] == [60, 30, 10]
    full, piecewise, eager = charts["Ladder and traffic"].bars
    assert [s.length for s in full.spans] == [40 * 3, 40] and full.note == "40 steps, 25% padding"
    assert [s.length for s in piecewise.spans] == [40 * 13, 40 * 3]
    assert [s.kind for s in eager.spans] == ["NONE"]
    assert "73 keys of 75 served no step" in charts["Ladder and traffic"].left
    (_, parts) = charts["Keys, part by part"].bars
    assert [(s.kind, s.start, s.length) for s in parts.spans] == [
        ("gap", 0, 2), ("graph", 2, 20), ("gap", 22, 40), ("eager", 62, 30)
    ]  # fmt: skip
    assert [bar.note for bar in charts["Memory"].bars] == ["2.20 MB", "0.90 MB"]
    assert [b.spans[0].kind for b in charts["Captures and compilations"].bars] == [
        "in step", "ahead", "ahead", "loaded"
    ]  # fmt: skip
    assert charts_of(Log("nothing", ())) == []


def test_the_picture_has_a_panel_a_chart(tmp_path: Path):
    pytest.importorskip("matplotlib")
    figure = draw_log(LOG)
    assert [axis.get_title("left") for axis in figure.axes] == [c.title for c in charts_of(LOG)]
    for axis, chart in zip(figure.axes, charts_of(LOG)):
        (left, right), (bottom, top) = axis.get_xlim(), axis.get_ylim()
        assert (left, right) == (0, chart.end) and bottom > top  # the first bar is above
    figure.savefig(tmp_path / "log.png")
    assert draw_log(Log("nothing", ())).axes


def test_the_command_writes_the_page_and_the_trace(tmp_path: Path, capsys):
    LOG.save(tmp_path / "run.json")
    assert main(["report", str(tmp_path / "run.json"), "--trace", str(tmp_path / "t.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'run.html'} {tmp_path / 't.json'}\n"
    assert (tmp_path / "run.html").read_text() == page_of(LOG)
    assert "traceEvents" in (tmp_path / "t.json").read_text()


LOOK = """
const seen = {wide: innerWidth, page: document.documentElement.scrollWidth, cut: 0, empty: 0,
  paper: getComputedStyle(document.body).backgroundColor, bars: 0};
for (const x of document.querySelectorAll("h1, h2, p, .row, .legend, .scale, .wide"))
  seen.cut += x.getBoundingClientRect().right > innerWidth;
for (const x of document.querySelectorAll("svg.bar")) {
  seen.bars += 1;
  const drawn = [...x.querySelectorAll("rect")].every(r =>
    r.getBoundingClientRect().width > 0 && getComputedStyle(r).fill.startsWith("rgb("));
  seen.empty += !drawn || x.getBoundingClientRect().width < 100;
}
seen
"""


def opened(page: str, folder: Path, width: int, dark: bool = False) -> dict[str, Any]:
    """What a browser has made of a page; fails if it says anything on its console."""
    (folder / "page.html").write_text(page)
    (seen,) = looked_at(folder, [View("page.html", width)], LOOK, folder / "profile", dark)
    return seen


@pytest.mark.sampled(0)
def test_a_browser_draws_it_as_wide_as_a_phone_and_as_a_screen(tmp_path: Path):
    page = page_of(LOG)
    assert "http" not in page.replace("http-equiv", "")  # it needs nothing else
    papers = []
    for width, dark in ((PHONE, True), (SCREEN, False)):
        seen = opened(page, tmp_path, width, dark)
        assert seen["wide"] == width and seen["page"] <= width, seen
        assert seen["cut"] == seen["empty"] == 0 and seen["bars"] == page.count("<svg"), seen
        papers.append(seen["paper"])
    assert papers == ["rgb(23, 24, 26)", "rgb(251, 251, 250)"]


def test_a_page_that_is_too_wide_would_be_seen(tmp_path: Path):
    page = page_of(LOG).replace("<h1>", '<h1 style="white-space: nowrap">').replace(
        "max-width: 60rem", "max-width: 60rem; min-width: 700px"
    )  # fmt: skip
    assert opened(page, tmp_path, PHONE)["page"] > PHONE
