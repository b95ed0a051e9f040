"""`python -m benchmarks NAME`: help, mistakes, tables, and figures with the results' fields."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import harness

RESULTS = Path(harness.__file__).parent / "results"
QUICK = {
    "capture": ["--modes", "FULL"],
    "compile": ["--modes", "FULL"],
    "decode": ["--batch", "2"],
    "dispatch": [],
    "fp8": ["--parts", "step"],
    "host": [],
    "launch": ["--tokens", "1", "80"],
    "prefill": [],
    "ranks": ["--batch", "2", "--ways", "FULL-fused", "captured"],
    "startup": ["--top", "1", "--mode", "FULL"],  # one key; the second process compiles nothing
    "steps": ["--modes", "FULL_DECODE_ONLY"],  # fewer keys, and an eager batch
    "trace": ["--layers", "1"],
    "traffic": [],
    "train": ["--levels", "none"],
    "verify": [],
}


@pytest.mark.parametrize("argv", [[], *([name] for name in harness.NAMES)], ids=str)
def test_help_is_no_mistake(argv: list[str], capsys):
    with pytest.raises(SystemExit) as stopped:
        harness.main([*argv, "--help"])
    assert stopped.value.code == 0
    shown = capsys.readouterr().out
    assert f"usage: {' '.join(['python -m benchmarks', *argv])} [-h]" in shown
    assert not argv or shown.count(f"python -m benchmarks {argv[0]}") > 1


@pytest.mark.parametrize(
    "argv, told",
    [
        ("", "name"),
        ("peers", "'peers'"),
        ("host --nonsense", "--nonsense"),
        ("host --dim 100", "multiple of 256"),
        ("host --device nonsense", "nonsense"),
        ("host --quick --backend nonsense", "no backend 'nonsense'"),
        ("steps --json tests", "tests is a folder"),
        ("steps --repeats 0", "0 is not 1 or more"),
        ("capture --modes FULLER", "FULLER"),
        ("capture --quick --sizes 3 17", "--sizes 17"),
        ("serve --parts decod", "'decod'"),
        ("compile --models 70B", "'70B'"),
        ("decode --ways FULL", "'FULL'"),
        ("decode --context 100", "multiple of 16"),
        ("launch --tiny --given benchmarks", "--given benchmarks"),
        ("prefill --models 30B-A3B", "'30B-A3B'"),
        ("fp8 --device cpu --quick", "--parts step"),
        ("ranks --tiny --tp 1", "1 is not 2 or more"),
        ("serve --tiny --speed 0", "--speed: 0 is not above 0"),
        ("serve --tiny --blocks 1", "--blocks 1"),
        ("traffic --requests x", "'x'"),
        ("train --models 1B", "'1B'"),
        ("verify --tiny --share 0", "0 is not above 0"),
    ],
)
def test_a_mistake_is_told_in_a_line(argv: str, told: str, capsys):
    try:
        status = harness.main(argv.split())
    except SystemExit as stopped:
        status = stopped.code
    assert status == 2
    assert told in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="here they measure")
@pytest.mark.parametrize("name", ["attention", "latent", "recurrent", "staging"])
def test_a_gpu_that_is_not_there(name: str, capsys):
    with pytest.raises(SystemExit) as stopped:
        harness.main([name])
    assert stopped.value.code == 2 and "needs a device 'cuda'" in capsys.readouterr().err


@pytest.mark.sampled("steps")
@pytest.mark.parametrize("name", QUICK)
def test_a_quick_run_has_the_fields_of_the_results(name: str, tmp_path: Path, capsys):
    flags, path = ["--quick", *QUICK[name]], tmp_path / "new" / "figures.json"
    assert harness.main([name, *flags, "--json", str(path)]) == 0
    written = json.loads(path.read_text())
    command = f"python -m benchmarks {name} {' '.join(flags)}"
    assert written["environment"]["command"] == command
    assert {"device", "torch", "python", "date"} <= written["environment"].keys()
    if (Path(harness.__file__).parents[1] / ".git").exists():
        assert re.fullmatch(r"[0-9a-f]{7,40}(-dirty)?", written["environment"]["commit"])
    for kept in RESULTS.glob(f"*/{name}.json"):
        old, new = (x["figures"] for x in (json.loads(kept.read_text()), written))
        if isinstance(new, dict):  # by part, of which the last runs here
            old, new = old["step"], new["step"]
        assert old[0].keys() <= new[0].keys()
    assert "|--" in capsys.readouterr().out


def kept_of(path: Path) -> Any:
    written = json.loads(path.read_text())
    assert written.pop("unfinished") and written.pop("environment")["command"]
    assert [other.name for other in path.parent.iterdir()] == [path.name]  # nothing aside
    return written["figures"]


def test_rows_are_kept_as_they_come(tmp_path: Path):
    """Read after each of them, as if the run had been cut there."""
    path = tmp_path / "figures.json"
    flags, seen = argparse.Namespace(json=path, command="python -m benchmarks x"), []

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(3):
            yield {"i": i}
            seen.append(kept_of(path))

    assert harness.kept(flags, rows()) == [{"i": 0}, {"i": 1}, {"i": 2}]
    assert [len(found) for found in seen] == [1, 2, 3]
    figures: dict[str, Any] = {"copy TB/s": 4.0}
    assert len(harness.kept(flags, [{"i": 0}], figures, "step")) == 1
    assert len(harness.kept(flags, rows(), figures, "step")) == 4  # behind those that are there
    assert seen[-1] == {"copy TB/s": 4.0, "step": [{"i": 0}, {"i": 0}, {"i": 1}, {"i": 2}]}
    harness.write(flags, figures)
    assert "unfinished" not in json.loads(path.read_text())
    flags.json = None
    assert len(harness.kept(flags, [{"i": 0}])) == 1


def test_figures_go_through_a_link_and_into_a_pipe(tmp_path: Path):
    """They are written aside and renamed, which would put a file in the place of either."""
    flags = argparse.Namespace(json=tmp_path / "link", command="")
    flags.json.symlink_to(tmp_path / "figures.json")
    harness.write(flags, [1])
    assert flags.json.is_symlink() and json.loads(flags.json.read_text())["figures"] == [1]
    told = [sys.executable, "-m", "benchmarks", "traffic", "--quick", "--json", "/dev/stdout"]
    ran = subprocess.run(told, cwd=RESULTS.parents[1], capture_output=True, text=True)
    assert ran.returncode == 0 and '"figures": ' in ran.stdout


CUT = {  # the module whose function makes a row or a few of them, and that function
    "compile": ("benchmarks.compile", "stepped", "--modes FULL NONE --levels none fused"),
    "startup": ("benchmarks.startup", "in_new_process", ""),
    "fp8": ("benchmarks.fp8", "step_of", "--parts step"),
    "steps": ("benchmarks.steps", "median_ms", "--modes NONE"),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", CUT)
def test_a_run_that_is_cut_has_the_rows_before(name: str, tmp_path: Path, monkeypatch):
    module, makes, flags = CUT[name]
    found, path = importlib.import_module(module), tmp_path / "figures.json"
    make, calls = getattr(found, makes), []

    def cut(*args: Any, **kwargs: Any) -> Any:
        calls.append(makes)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return {"s": 1.0} if name == "startup" else make(*args, **kwargs)

    monkeypatch.setattr(found, makes, cut)
    with pytest.raises(KeyboardInterrupt):
        harness.main([name, "--quick", *flags.split(), "--json", str(path)])
    figures = kept_of(path)
    rows = figures if isinstance(figures, list) else figures["step"]
    assert len(rows) == {"compile": 2, "startup": 2, "fp8": 1, "steps": 1}[name]


def test_every_benchmark_keeps_its_rows_as_they_come():
    """But those that take seconds."""
    brief = {"dispatch", "traffic"}
    for name in set(harness.NAMES) - brief:
        source = RESULTS.parent / f"{name}.py"
        folder = [source] if source.exists() else (RESULTS.parent / name).glob("*.py")
        text = "".join(path.read_text() for path in folder)
        assert re.search(r"\bkept\(|unfinished=True|\ball_rows\(", text), name


def test_after_its_seconds_compile_begins_no_way(tmp_path: Path, monkeypatch, capsys):
    """The second level is late; what there is, is judged."""
    module = importlib.import_module("benchmarks.compile")
    clock = iter([0.0, 1.0, 2.0, 9.0])  # when it ends is asked, then of each way
    fake = argparse.Namespace(monotonic=lambda: next(clock), perf_counter=module.time.perf_counter)
    monkeypatch.setattr(module, "time", fake)
    monkeypatch.setattr(harness, "time", fake)
    path = tmp_path / "figures.json"
    flags = ["--quick", "--levels", "none", "fused", "pieces", "--modes", "FULL", "--seconds", "5"]
    assert harness.main(["compile", *flags, "--json", str(path)]) == 0
    rows = json.loads(path.read_text())["figures"]
    assert [row["level"] for row in rows if "ms" in row] == ["none", "fused"]
    (late,) = (row for row in rows if "ms" not in row)
    assert late == {"model": "1 x 256", "level": "pieces", "mode": "FULL", "failed": harness.LATE}
    assert f"1 x 256, pieces: failed: {harness.LATE}" in capsys.readouterr().out
    by_hand = {"model": "1B", "mode": module.BY_HAND, "batch": 1}
    others = [by_hand | {"level": "x", "ms": 1.0}, by_hand | {"failed": harness.LATE}]
    full = {"model": "1B", "mode": "FULL", "batch": 1, "level": "none", "ms": 1.0, "nodes": 9}
    (line,) = module.missed([*others, full, late], argparse.Namespace())
    assert line.startswith("1B, batch 1, none: 1.00 times as fast")


def test_numbers_come_in_ascending_order_however_they_are_given():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", **harness.count([1, 8]))
    assert parser.parse_args(["--batch", "8", "1", "64", "8"]).batch == [1, 8, 64]
    assert parser.parse_args([]).batch == [1, 8]


def test_dispatch_and_traffic_load_no_torch():
    code = "import sys, benchmarks.dispatch, benchmarks.traffic; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=RESULTS.parents[1]).returncode == 0


def test_what_is_above_its_limit_is_missed():
    rows = [{"s": 1.0, "at most": 2}, {"s": 3.0, "at most": 2}, {"s": 9.0, "at most": None}]
    (line,) = harness.over(rows, "s", "at most")
    assert line.startswith("3.000, and at most 2 is asked")


def test_the_docs_say_what_needs_a_gpu_and_all_else_is_small_under_tiny():
    text = " ".join((RESULTS.parents[1] / "docs/performance.md").read_text().split())
    (told,) = re.findall(r"kernels alone has nothing to measure there: (.*?) need a GPU", text)
    declared = {n: importlib.import_module(f"benchmarks.{n}").measure for n in harness.NAMES}
    needs = {name for name, one in declared.items() if one.needs_cuda}
    assert set(re.findall(r"`(\w+)`", told)) == needs
    assert all(one.quick for name, one in declared.items() if name not in needs)
    used = {n: (RESULTS.parent / n).with_suffix(".py") for n in needs}
    sources = {n: p if p.exists() else RESULTS.parent / n / "__init__.py" for n, p in used.items()}
    small = {n for n, p in sources.items() if declared[n].quick or "flags.quick" in p.read_text()}
    assert small == needs
    table = re.findall(r"\| `python -m benchmarks .*?\|", text)
    assert set(re.findall(r"(\w+)`", " ".join(table))) == set(harness.NAMES)


def test_a_table_has_every_column_and_what_failed_below(capsys):
    rows = [
        {"a": 1, "b": 2.34567, "d": None},
        {"a": 12, "c": 123.456, "d": None, "c failed": "why"},
    ]
    harness.show(rows, "title")
    title, head, _, first, second, failed = capsys.readouterr().out.strip().splitlines()
    assert (title, failed) == ("title", "  12, 123.456: c failed: why")
    assert [cell.strip() for cell in head.split("|")[1:-1]] == ["a", "b", "c"]
    assert [cell.strip() for cell in first.split("|")[1:-1]] == ["1", "2.346", "-"]
    assert [cell.strip() for cell in second.split("|")[1:-1]] == ["12", "-", "123.5"]
