"""Serving over two processes writes what one does where models have recurrent states, and where
requests share a prefix, which their steps read once."""

from __future__ import annotations

from pathlib import Path

import pytest
import serving_states as run
import starting
import torch

import fngraph as fg
from tests.models import tiny

NAMES = ("mamba2", "qwen3_next", "llama")
MODE = "FULL_AND_PIECEWISE"


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", NAMES)
def test_two_processes_write_what_one_does(tmp_path: Path, name: str, one_thread: None) -> None:
    with torch.no_grad():
        tiny.save(name, tmp_path)
    shares = name == "llama"
    alone = fg.make_mesh("cpu", tp=1)
    want, cascades = run.written(tmp_path, name, alone, "NONE", shares=shares)
    leads, follows = starting.values(starting.run(run.stream, 2, tmp_path, name, MODE, shares))
    assert leads == (want, cascades) and len(want) == 5
    assert (True in cascades) == shares
    assert not follows[0]
