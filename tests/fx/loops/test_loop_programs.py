"""Random loops equal Python's, in every mode, at every level, on both recorders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_programs import Python, forward_of, given

import fngraph as fg

DEVICES = {"tape": "cpu", "cuda": "cuda"}
CLOSE = {"atol": 1e-9, "rtol": 1e-9}


def check(seed: int, mode: str, recorder: str, **options: Any) -> None:
    """One program, with 0, 1 and 4 turns where the batch says how many."""
    program, device = forward_of(seed), DEVICES[recorder]
    python, ours = program(Python), program(fg)
    fast = fg.graphify(ours, donate="state", stage="x", modes=mode, recorder=recorder, **options)
    w, state, _ = given(seed, device, 0)
    for turns in (0, 1, 4, 1):
        x = given(seed + turns, device, turns)[2]
        copies = [{k: v.clone() for k, v in state.items()} for _ in "ab"]
        want, after = python(w, copies[0], x)
        bare, bare_after = ours(w, copies[1], x)
        got, back = fast(w, state, x)
        for a, b in ((bare, want), (got, want)):
            torch.testing.assert_close(a, b, **CLOSE)
        for key in state:
            torch.testing.assert_close(bare_after[key], after[key], **CLOSE)
            torch.testing.assert_close(state[key], after[key], **CLOSE)
            assert back[key] is state[key]
    (ran,) = {str(m) for _, _, m in fast.stats.counts}
    assert ran == mode


@pytest.mark.sampled(8)
@pytest.mark.parametrize("seed", range(200))
def test_a_random_loop_equals_pythons(seed, recorder_name):
    check(seed, ("FULL", "FULL", "PIECEWISE", "NONE")[seed % 4], recorder_name)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("seed", range(40, 80))
def test_a_random_loop_under_passes(seed, recorder_name):
    check(seed, ("FULL", "NONE")[seed % 2], recorder_name, passes="all")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(80, 92))
def test_a_random_loop_compiled(seed, recorder_name):
    check(seed, ("FULL", "FULL", "NONE")[seed % 3], recorder_name, compile="pieces")
