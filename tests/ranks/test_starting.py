"""Processes of a test: one that crashes takes what it was doing with it, and nothing else."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import starting
import torch.distributed as dist


def worker(rank: int) -> Callable[[str], dict[str, Any]]:
    """What does a job in a world."""
    dist.init_process_group("gloo")
    kept: list[str] = []

    def do(job: str) -> dict[str, Any]:
        kept.append(job)
        if job == "crashes" and rank == 1:
            starting.die()
        if job == "raises" and rank == 0:
            raise ZeroDivisionError("on purpose")
        if job == "hangs" and rank == 1:
            time.sleep(60)
        every: list[Any] = [None] * 2
        dist.all_gather_object(every, (rank, job))
        return {job: (every, os.getpid(), list(kept))}

    return do


def test_what_crashes_is_lost_alone() -> None:
    names = ("first", "crashes", "second", "raises", "third", "last")
    both = starting.in_turn(worker, 2, names)
    for found in both:
        for name in ("first", "second", "third", "last"):
            assert found[name][0] == [(0, name), (1, name)]
        assert len({found[name][1] for name in ("first", "second", "third")}) == 3
        assert found["last"][1:] == (found["third"][1], ["third", "last"]), "the world goes on"
        assert set(found.lost) == {"crashes", "raises"}
        with pytest.raises(AssertionError, match=r"(?s)crashes was lost: .*rank 1: exit code -9"):
            found["crashes"]
        with pytest.raises(AssertionError, match=r"(?s)raises was lost: rank 0: .*on purpose"):
            found["raises"]


def test_who_is_not_done_in_time_is_lost() -> None:
    (found, _) = starting.in_turn(worker, 2, ("hangs", "after"), within=4)
    assert "not done in time" in found.lost["hangs"]
    assert found["after"][0] == [(0, "after"), (1, "after")]
