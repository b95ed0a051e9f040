"""Verified steps of two processes, of which one flips one bit: both keep the step, and `fg.bisect`
says in which of them it was, and where."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "ranks"))  # how processes are started there

import rank_planted
import starting

FILE = "tests/shadow/rank_planted.py"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layer", [1, 2])
def test_one_bit_of_one_layer_of_one_process_is_found_in_that_one(layer: int):
    told = starting.values(starting.run(rank_planted.found_by_all, 2, layer))
    lines = (Path(__file__).parent / "rank_planted.py").read_text().splitlines()
    (line,) = [i for i, one in enumerate(lines, 1) if "torch.tanh(" in one]
    for one in told:
        assert one["calls"] <= 500 and one["verified"] <= 5
        assert (one["rank"], one["kind"]) == (1, "program")
        assert one["line"] == f"{FILE}:{line}" and one["op"] == "aten.tanh.default"
        assert "all_reduce" in one["told"][0] and "aten.tanh" in one["told"][1]
    assert told[0]["own"]  # the sum has brought it there
    assert told[0]["told"] == told[1]["told"]


@pytest.mark.sampled(0)
def test_a_process_that_cannot_copy_is_waited_for_by_nobody():
    mine, other = starting.values(starting.run(rank_planted.one_raises, 2))
    assert mine == "another process could not copy its state"
    assert other.startswith("the batch and its state could not be copied: ZeroDivisionError")
