"""`python -m benchmarks NAME`: help, mistakes, tables, and figures with the results' fields."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

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
        ("trace --layers 2 1", "[2, 1]"),
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


@pytest.mark.sampled("steps", "host")
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
