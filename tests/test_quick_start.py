"""What a process does up to its first step that a second process need not: collections that find
nothing, modules that nobody asks, workers that have nothing to compile.

`python -m benchmarks startup` says how long it takes.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from test_compiled import lowered, rows_model

import fngraph as fg
from fngraph.compile import artefact
from fngraph.step import capture
from fngraph.torch_facts import portable

ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def in_new_process(told: str, *args: str, **env: str) -> Any:
    """What a script has printed last, as JSON."""
    ran = subprocess.run(
        [sys.executable, "-c", told, *args], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, **env},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


# --- the collector --------------------------------------------------------------------------------


def test_nothing_is_collected_while_fngraph_is_imported():
    told = """
import gc, json, sys
import fngraph
seen = {}

class Watch:
    def find_spec(self, name, path=None, target=None):
        seen[name] = gc.isenabled()

sys.meta_path.insert(0, Watch())
fngraph.graphify
print(json.dumps([seen["fngraph.graphified"], seen["fngraph.stages"], gc.isenabled()]))
"""
    assert in_new_process(told) == [False, False, True]


def test_nothing_is_collected_while_a_function_is_traced_or_captured(monkeypatch):
    seen: list[bool] = []
    warm = capture._warm_ahead

    def watched(*args: Any) -> None:
        seen.append(gc.isenabled())
        warm(*args)

    def forward(w: torch.Tensor, batch: toys.Batch) -> torch.Tensor:
        seen.append(gc.isenabled())
        return toys.rows(w, batch)

    monkeypatch.setattr(capture, "_warm_ahead", watched)
    step = fg.graphify(forward, modes="FULL", stage="batch", sizes=(2,))
    step.bind(torch.ones(8)).capture(toys.LIMITS, recorder="tape")
    assert seen == [False, False] and gc.isenabled()
