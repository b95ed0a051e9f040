"""One of the processes that serve a stream is killed or stalls in the middle of it: all others
raise in time, and say which; those that are left write the rest as one process does."""

from __future__ import annotations

from typing import Any

import pytest
import rank_served_faults as faults
import starting
import torch
from rank_served_faults import TIMEOUT_S
from starting import Ended

from fngraph.ranks.faults import ROLL_CALL_S

TP, PP, DP = {"tp": 2}, {"pp": 2}, {"dp": 2}
AT_ONCE = 2.0  # of an end that is noticed in 10 ms, other work of the machine included
CASES: dict[str, tuple[dict[str, int], int, str, str]] = {
    "the leader is killed": (TP, 0, "is killed", "before"),
    "the leader stalls": (TP, 0, "stalls", "before"),
    "a follower is killed": (TP, 1, "is killed", "before"),
    "a follower is killed in a collective": (TP, 1, "is killed", "collective"),
    "a follower stalls": (TP, 1, "stalls", "before"),
    "a follower stalls in a collective": (TP, 1, "stalls", "collective"),
    "one of three is killed": ({"tp": 3}, 2, "is killed", "before"),
    "a stage is killed": (PP, 1, "is killed", "before"),
    "a stage stalls": (PP, 1, "stalls", "before"),
    "another team is killed": (DP, 1, "is killed", "before"),
    "another team stalls": (DP, 1, "stalls", "before"),
}
RUNS: dict[str, tuple[int, Any, tuple[Any, ...]]] = {
    **{name: (max(case[0].values()), faults.lost, case) for name, case in CASES.items()},
    "the others serve on": (3, faults.served_by_the_others, ()),
    "they serve again": (2, faults.served_again, ()),
}


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> dict[str, list[Ended]]:
    return starting.run_asked(request, RUNS, CASES, at_once=4)


@pytest.fixture(scope="module")
def one(one_thread: None) -> dict[int, tuple[int, ...]]:
    """What one process writes."""
    return faults.alone()


def check(ended: list[Ended], who: int, how: str, within: float) -> None:
    """All others have raised in time, and each names the one."""
    assert ended[who].code == (-9 if how == "is killed" else 0)
    for rank, each in enumerate(ended):
        if rank != who:
            assert not each.error, each.error
            error, took = each.value
            assert error.startswith("RankError: ") and f"rank {who}" in error, error
            assert took < within, (took, error)


@pytest.mark.sampled("leader is killed", "killed in a", "stage is killed", "team is killed")
@pytest.mark.parametrize("name", CASES)
def test_every_other_process_raises_in_time(ran: dict[str, list[Ended]], name: str) -> None:
    _, who, how, where = CASES[name]
    late = TIMEOUT_S if how == "stalls" else 0.2 * (where == "collective")
    check(ran[name], who, how, late + ROLL_CALL_S + AT_ONCE)


@pytest.mark.parametrize("name", ["the leader is killed", "another team is killed"])
def test_an_end_is_noticed_at_once(ran: dict[str, list[Ended]], name: str) -> None:
    """Where a word of the one that is gone is waited for, nobody is asked who it is."""
    _, who, *_ = CASES[name]
    _, took = ran[name][1 - who].value
    assert took < AT_ONCE


def test_those_that_are_left_serve_the_rest(
    ran: dict[str, list[Ended]], one: dict[int, tuple[int, ...]]
) -> None:
    *left, killed = ran["the others serve on"]
    assert killed.code == -9
    (error, begun, texts), follows = starting.values(left)
    assert "rank 2 is gone" in error and "rank 2 is gone" in follows[0]
    assert 0 < begun < sum(map(len, one.values()))
    assert texts == one and not follows[2]


def test_what_slept_wakes_and_serves_the_rest(
    ran: dict[str, list[Ended]], one: dict[int, tuple[int, ...]]
) -> None:
    (error, begun, texts), follows = starting.values(ran["they serve again"])
    assert "rank 1 raised ValueError: no such luck" in error
    assert follows[0] == "ValueError: no such luck"
    assert 0 < begun < sum(map(len, one.values()))
    assert texts == one and not follows[2]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two CUDA devices")
@pytest.mark.parametrize(("who", "where"), [(0, "before"), (1, "before"), (1, "launch")])
@pytest.mark.parametrize("how", ["is killed", "stalls"])
def test_two_devices(who: int, how: str, where: str) -> None:
    """In "launch" the leader's graph is under way when its follower is lost."""
    ended = starting.run(faults.lost, 2, TP, who, how, where, "cuda", within=120)
    check(ended, who, how, 2 * TIMEOUT_S + ROLL_CALL_S + AT_ONCE)
