"""Every notebook runs from top to bottom and shows what is stored of it: all that it prints and
draws, and nothing of the machine that it ran on."""

from __future__ import annotations

import base64
import re
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.notebooks_run import code_of, executed, kept, notebooks, read, same, shown
from tests.site.pages import ROOT

NOTEBOOKS = notebooks()
PICTURES = {  # where one would rather look than read
    "00_tour": 2, "01_batches_and_dispatch": 3, "02_when_graphs_help": 2,
    "03_loops_and_training": 1, "05_attention_backends": 2, "06_encoder_budgets": 2,
}  # fmt: skip
PIN = re.search(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
MACHINE = re.compile(r"(?<![\w.])/(?:home|root|tmp|work|usr|Users|private|mnt)/|0x[0-9a-f]{6,}")
MOST = 2 << 20
PLACED = re.compile(r"\w+\.(\w+?)_?\.\w+ \(((?:fngraph|models)/[\w/]+\.py):(\d+)\)")  # op, line
SIGNS = {"add": "+", "sub": "-", "mul": "*", "div": "/", "mm": "@"}  # other ops are called by name


def pictures(notebook: Any) -> list[bytes]:
    """The PNGs of a notebook."""
    outputs = [output for cell in code_of(notebook) for output in cell["outputs"]]
    found = [
        output["data"]["image/png"] for output in outputs if "image/png" in output.get("data", ())
    ]
    return [base64.b64decode(text) for text in found]


def faults(notebook: Any) -> list[str]:
    """What a stored notebook should not have."""
    found = []
    cells = code_of(notebook)
    if [cell["execution_count"] for cell in cells] != [*range(1, len(cells) + 1)]:
        found.append("cells are not those of one run: python -m tests.notebooks_run")
    for cell in cells:
        said = [
            *shown(cell),
            *((k, x) for o in cell["outputs"] for k, x in o.get("data", {}).items()),
        ]
        for kind, text in said:
            if kind in ("error", "stderr"):
                found.append(f"{kind}: {text}")
            elif not kind.startswith("image/") and (seen := MACHINE.search(text)):
                found.append(f"of a machine: {text[seen.start() : seen.start() + 80]}")
    return found


@pytest.mark.sampled("00_", "01_")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
# ipykernel and zmq warn of event loops of their own when the client starts a kernel
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
def test_a_notebook_runs_and_shows_what_is_stored(path: Path) -> None:
    import torch

    ran, stored = executed(path), read(path)
    assert PIN is not None
    if torch.__version__.partition("+")[0] == PIN[1]:  # another torch may have other ops
        for now, before in zip(code_of(ran), code_of(stored), strict=True):
            assert same(now, before), f"make notebooks\n{shown(now)}\nis stored as\n{shown(before)}"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_what_is_stored_is_of_one_run_and_of_no_machine(path: Path) -> None:
    notebook = read(path)
    assert faults(notebook) == []
    assert sum(bool(cell["outputs"]) for cell in code_of(notebook)) > len(code_of(notebook)) / 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_it_has_its_pictures(path: Path) -> None:
    drawn = pictures(read(path))
    assert len(drawn) == PICTURES.get(path.stem, 0)
    for png in drawn:
        width, height = struct.unpack(">II", png[16:24])
        assert png.startswith(b"\x89PNG") and width > 500 and height > 200
        assert len(png) > width * height / 40, "hardly anything is drawn"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_lines_of_this_repository_that_it_shows_have_the_ops_that_it_says(path: Path) -> None:
    """A change above them moves them: `make notebooks` stores them anew."""
    text = "".join(said for cell in code_of(read(path)) for _, said in shown(cell))
    for op, file, number in PLACED.findall(text):
        line = (ROOT / file).read_text().splitlines()[int(number) - 1]
        assert op in line or SIGNS.get(op, op) in line, f"{op} is not at {file}:{number}: {line}"


def test_all_of_them_are_small() -> None:
    assert [p.stem for p in NOTEBOOKS][:1] == ["00_tour"]
    assert sum(path.stat().st_size for path in NOTEBOOKS) < MOST


def test_faults_would_be_seen() -> None:
    notebook = read(NOTEBOOKS[0])
    first, second, *_ = code_of(notebook)
    first["outputs"] = [{"output_type": "stream", "name": "stderr", "text": "a warning"}]
    second["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "in /home/me/x.py:3"}]
    second["execution_count"] = 7
    assert [fault.partition(":")[0] for fault in faults(notebook)] == [
        "cells are not those of one run", "stderr", "of a machine"
    ]  # fmt: skip


def test_another_number_is_another_output_and_another_time_is_none() -> None:
    def notebook(text: str) -> Any:
        output = {"output_type": "stream", "name": "stdout", "text": text}
        cell = {"cell_type": "code", "source": "f()", "metadata": {}, "outputs": [output]}
        return {"cells": [cell]}

    stored = notebook("5 keys in 1.25 ms")
    for text, keeps in (("5 keys in 3.5 ms", True), ("6 keys in 1.25 ms", False)):
        (cell,) = kept(notebook(text), stored)["cells"]
        assert (cell["outputs"][0]["text"] == "5 keys in 1.25 ms") is keeps
