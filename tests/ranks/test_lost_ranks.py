"""A process that raises, is killed or stalls, in a capture or in step 1,000: every other one raises
in time and says which; none hangs; and those that are left go on as a group of their own."""

from __future__ import annotations

from typing import Any

import pytest
import rank_faults
import starting
import torch
from rank_faults import FAILING, TIMEOUT_S
from starting import Ended

from fngraph.ranks.faults import ROLL_CALL_S

RUNS: dict[str, tuple[int, Any, tuple[Any, ...]]] = {
    "raises in a capture": (2, rank_faults.fails, ("raises", "capture")),
    "is killed in a capture": (2, rank_faults.fails, ("is killed", "capture")),
    "stalls in a capture": (2, rank_faults.fails, ("stalls", "capture")),
    "is killed after steps": (2, rank_faults.fails, ("is killed", "steps")),
    "stalls after steps": (3, rank_faults.fails, ("stalls", "steps", 3)),
    "raises in a trace": (2, rank_faults.in_a_trace, ()),
    "raises in an op": (2, rank_faults.fails, ("raises", "op")),
    "raises in a replay": (3, rank_faults.fails, ("raises", "replay", 3)),
    "stalls in a replay": (2, rank_faults.fails, ("stalls", "replay")),
    "is killed in a collective": (3, rank_faults.fails, ("is killed", "collective", 3)),
    "is frozen in a collective": (3, rank_faults.fails, ("is frozen", "collective", 3)),
    "survived": (2, rank_faults.survived, ()),
    "survived a capture": (2, rank_faults.survived_capture, ()),
    "survived elsewhere": (2, rank_faults.survived_elsewhere, ()),
    "in a grid": (4, rank_faults.in_a_grid, ()),
    "others go on": (3, rank_faults.goes_on, ("steps",)),
    "others go on, out of a collective": (3, rank_faults.goes_on, ("collective",)),
    "elsewhere": (2, rank_faults.elsewhere, ()),
    "the same again": (2, rank_faults.same_again, ()),
}


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[str, list[Ended]]:
    return starting.run_asked(request, RUNS, WHO, at_once=6)


WHO = {
    "raises in a capture": "cannot be captured by every process, so none keeps it: rank 1: Capture",
    "is killed in a capture": "rank 1 is gone, or did not come in time",
    "stalls in a capture": "rank 1 came ",
    "is killed after steps": "rank 1 is gone, or did not come in time",
    "stalls after steps": "rank 1 came ",
    "raises in a trace": "rank 1 raised ValueError: no such luck",
    "raises in an op": "rank 1 raised ValueError: no such luck",
    "raises in a replay": "rank 1 raised ValueError: no such luck",
    "stalls in a replay": "rank 1 came ",
    "is killed in a collective": "rank 1 is gone, or did not come in time",
    "is frozen in a collective": "rank 1 is gone, or did not come in time",
}
IN_A_STEP = (
    "In the step that runs as FULL BatchDescriptor(4, 4); all_reduce over 'tp' is called at "
    "tests/ranks/rank_differs.py:"
)
WHERE = {
    "raises in a capture": "FULL BatchDescriptor(4, 4)",
    "is killed in a capture": "to keep FULL BatchDescriptor(4, 4), which was captured",
    "stalls in a capture": "to keep FULL BatchDescriptor(4, 4), which was captured",
    "is killed after steps": "to run a step as FULL BatchDescriptor(4, 4)",
    "stalls after steps": "to run a step as FULL BatchDescriptor(4, 4)",
    "raises in a trace": "to capture 2 keys",
    "raises in an op": "In the step that runs as NONE BatchDescriptor(3, 2); all_reduce over 'tp' "
    "is called at tests/ranks/rank_differs.py:",
    "raises in a replay": IN_A_STEP,
    "stalls in a replay": IN_A_STEP,
    "is killed in a collective": IN_A_STEP,
    "is frozen in a collective": IN_A_STEP,
}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("name", WHO)
def test_every_other_process_raises_in_time(ran: dict[str, list[Ended]], name: str) -> None:
    ended = ran[name]
    assert ended[FAILING].code == (-9 if "killed" in name else 0)
    for rank, one in enumerate(ended):
        if rank == FAILING:
            continue
        assert not one.error, one.error
        error, took = one.value
        assert error.startswith("RankError: ")
        assert WHERE[name] in error
        assert took < TIMEOUT_S + ROLL_CALL_S + 3, "3 s: this machine may be busy"
    said = [one.value[0] for rank, one in enumerate(ended) if rank != FAILING]
    assert all(WHO[name] in error for error in said), said


@pytest.mark.parametrize("name", ["survived", "survived a capture", "survived elsewhere"])
def test_what_was_survived_is_not_blamed_later(ran: dict[str, list[Ended]], name: str) -> None:
    first, then = ran[name][0].value
    assert "no such luck" in first
    assert "rank 1 is gone" in then and "no such luck" not in then


def test_who_shares_no_axis_with_it_is_told_too(ran: dict[str, list[Ended]]) -> None:
    *left, killed = ran["in a grid"]
    assert killed.code == -9
    said = starting.values(left)
    assert all(error.startswith("RankError: ") and "rank 3 is gone" in error for error, _ in said)
    assert all(took < TIMEOUT_S + ROLL_CALL_S + 3 for _, took in said)
    assert "rank 2 found that rank 3" in said[0][0] or "rank 1 found that rank 3" in said[0][0]


@pytest.mark.parametrize("name", ["others go on", "others go on, out of a collective"])
def test_those_that_are_left_go_on(ran: dict[str, list[Ended]], name: str) -> None:
    """State is as the last whole step left it; a new group, a new mesh and a new trace."""
    ended = ran[name]
    assert [one.code for one in ended] == [0, 0, -9]
    for error, untouched, waking, right in starting.values(ended[:2]):
        assert "rank 2 is gone" in error
        assert untouched
        assert waking.startswith("RankError: ") and "Make the mesh again" in waking
        assert right


def test_a_step_wakes_over_a_group_of_the_same_name(ran: dict[str, list[Ended]]) -> None:
    for missing, same, right in starting.values(ran["the same again"]):
        assert missing.startswith("RankError: axis 'tp' has no processes")
        assert same and right


def test_who_is_in_a_collective_by_itself_is_not_taken_for_one_that_agrees(
    ran: dict[str, list[Ended]],
) -> None:
    """It has sent as many numbers as an agreement: nobody has them, and both are told in time."""
    for one, where in zip(
        ran["elsewhere"], ("the agreement to run a step", "all_gather over axis")
    ):
        error, seconds, unchanged = one.value
        assert error.startswith("RankError: ") and where in error and "differ" not in error
        assert unchanged and seconds <= TIMEOUT_S + ROLL_CALL_S + 1


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two CUDA devices")
@pytest.mark.parametrize("kind", ["raises", "is killed", "is frozen"])
def test_on_two_devices_the_next_step_tells_who_is_not_in_the_last_one(kind: str) -> None:
    """What has been launched waits in the kernel, for nobody; its process is told nevertheless."""
    ended = starting.run(rank_faults.fails_on_device, 2, kind, within=120)
    assert not ended[0].error, ended[0].error
    _, error, took = ended[0].value
    assert error.startswith("RankError: ") and "to run a step as FULL" in error
    assert "rank 1" in error, error
    assert took < TIMEOUT_S + ROLL_CALL_S + 3
