"""Messages of a team by whichever way they go, and a wait for the device that ends when one of the
team is lost. No process is started here but for messages."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import starting
import torch
import torch.distributed as dist

import fngraph as fg
from fngraph.models import Policy, start, start_over, submit
from fngraph.models.serving.ranks import circles
from fngraph.models.serving.ranks.circles import (
    FIRST,
    LENGTH,
    Circle,
    Ranks,
    hear,
    make_ranks,
    tell,
)
from fngraph.models.serving.ranks.following import leading, listened_to
from fngraph.models.serving.ranks.losing import lost, wait_until
from fngraph.models.serving.scheduling import plan


class Known:
    """A board, of which somebody is known to be absent."""

    def __init__(self, *gone: int) -> None:
        self.gone = list(gone)

    def absent(self) -> list[int]:
        return self.gone


def team(*gone: int, timeout_s: float = 60.0) -> Circle:
    board: Any = Known(*gone)
    return Circle(object(), 0, (4, 6, 8), board, timeout_s)


def test_who_has_ended_is_named() -> None:
    both = str(lost(team(1, 2), "each step together", "why"))
    assert both.startswith("ranks [6, 8] are gone") and both.endswith("each step together: why")
    assert str(lost(team(1), "it", "why", rank=2)).startswith("rank 6 is gone")
    assert str(lost(team(), "it", "why", rank=2)).startswith("rank 8 is gone, or has done nothing")
    assert str(lost(team(), "it", "why")).startswith("one of ranks [6, 8] is gone, or has done")
    late = fg.errors.AbsentError("process 2 of 3 is late", 2, False)
    assert str(lost(team(), "it", late)).startswith("rank 8 is gone, or")


def after(seconds: float) -> Any:
    until = time.monotonic() + seconds
    return lambda: time.monotonic() > until


def test_a_step_that_is_done_is_waited_for() -> None:
    began = time.monotonic()
    wait_until(after(0.1), team())
    assert 0.1 <= time.monotonic() - began < 0.3


def test_a_step_that_waits_for_who_is_gone_is_not() -> None:
    began = time.monotonic()
    with pytest.raises(fg.errors.RankError, match=r"rank 8 is gone.* End this process"):
        wait_until(after(60), team(2))
    assert time.monotonic() - began < 0.3


def test_nor_is_one_for_longer_than_the_timeout() -> None:
    began = time.monotonic()
    with pytest.raises(fg.errors.RankError, match=r"one of ranks \[6, 8\] is gone, or has done"):
        wait_until(after(60), team(timeout_s=0.2))
    assert 0.2 < time.monotonic() - began < 1.5


def test_requests_go_on_over_another_cache() -> None:
    policy = Policy(16, 4, 4, 16)
    state = start(8, policy)
    for i in range(3):
        state = submit(state, policy, [1, 2, 3 + i], 4, deadline=50.0 + i)
    begun = plan(state, policy)
    assert len(begun.running) == 3 and len(begun.pool.free) < 8
    anew = start_over(begun, 5, policy)
    assert [job.id for job in anew.waiting] == [0, 1, 2] and not anew.running and not anew.rows
    assert all(not job.computed and not len(job.blocks) for job in anew.waiting)
    assert len(anew.pool.free) == 5
    assert (anew.submitted, anew.soonest) == (3, 50.0)


ALONE = fg.make_mesh("cpu", tp=1)


@pytest.mark.parametrize(
    ("mesh", "named", "text"),
    [
        (ALONE["tp"], {}, "is an Axis. Pass the whole mesh, fg.make_mesh"),
        (2, {}, "mesh=2 is an int"),
        (ALONE, {"meet": "no"}, "meet='no' is a str. Pass True or False"),
        (ALONE, {"ahead": 1}, "ahead=1 is an int. Pass True or False"),
        (ALONE, {"apart": "dp"}, "apart='dp' is a str. Pass names of axes"),
        (ALONE, {"timeout": "3"}, "timeout='3' is a str. Pass seconds, or datetime.timedelta"),
        (ALONE, {"timeout": timedelta()}, "a time above 0"),
        (ALONE, {"timeout": 0}, "a time above 0"),
        (ALONE, {"timeout": float("inf")}, "timeout=inf is a float. Pass seconds"),
    ],
)  # fmt: skip
def test_teams_of_another_kind(mesh: Any, named: Any, text: str) -> None:
    with pytest.raises(fg.errors.RankError, match=text):
        make_ranks(mesh, **named)


def told_to_nobody(rank: int) -> str:
    """What a leader that tells something is told, when its follower has ended."""
    ranks = make_ranks(fg.make_mesh("cpu", tp=2))
    if rank == 1:
        hear(ranks.team)
        starting.die()
    tell(ranks.team, "word").wait()
    try:
        with listened_to(ranks.team):
            tell(ranks.team, "another").wait()
    except fg.errors.RankError as error:
        return str(error)
    return ""


def test_who_does_not_hear_is_named() -> None:
    leads, _ = starting.run(told_to_nobody, 2)
    assert leads.value.startswith("rank 1 is gone") and "process 1 of 2 has ended" in leads.value


def told_all_ways(rank: int) -> Any:
    """Words with leaves of several lengths, over a board with room for some, and over gloo; and by
    which way each went."""
    circles.ROOM = 30000  # type: ignore[misc]
    ranks = make_ranks(fg.make_mesh("cpu", tp=2))
    by_group: list[int] = []
    broadcast = dist.broadcast

    def counted(*args: Any, **kwargs: Any) -> Any:
        by_group.append(1)
        return broadcast(*args, **kwargs)

    dist.broadcast = counted
    found = []
    for circle in (ranks.team, ranks.team._replace(board=None)):
        for length in (0, 100, 9000, 29000, 31000, 90000, 100):
            by_group.clear()
            leaves = torch.arange(length) % 251
            leaf = leaves.to(torch.uint8)
            if rank == 0:
                tell(circle, ("word", length), (leaf[:50], leaf[50:])).wait()
                right = True
            else:
                word, payload = hear(circle)
                right = word == ("word", length) and torch.equal(payload, leaf)
            found.append((right, len(by_group)))
    return found


def test_what_has_no_room_on_a_board_goes_over_gloo() -> None:
    on_board, by_gloo = [0, 0, 0, 0, 2, 2, 0], [1, 1, 2, 2, 2, 2, 1]
    for found in starting.values(starting.run(told_all_ways, 2)):
        assert found == [(True, parts) for parts in on_board + by_gloo]


@pytest.mark.parametrize("of", ["the message", "what is sent"])
@pytest.mark.parametrize("more", [-1, 0, 1])
def test_a_message_comes_in_two_parts_where_it_does_not_fit_in_one(of: str, more: int) -> None:
    length = FIRST + more - (LENGTH if of == "what is sent" else 0)
    message = (torch.arange(length) % 251).to(torch.uint8)
    parts = circles._parts(message)
    coming = iter(parts)
    found = circles._received(lambda into: into.copy_(next(coming)))
    assert torch.equal(found, message) and next(coming, None) is None
    assert len(parts) == 1 + (length + LENGTH > FIRST)
    assert [*map(len, parts)] == [FIRST, length + LENGTH - FIRST][: len(parts)]


def test_nobody_waits_long_for_who_is_to_be_told_the_end(monkeypatch: Any) -> None:
    """A follower that is gone, and leaders of other teams: 5 s each, and not their timeout."""
    waited: list[timedelta] = []

    class Work:
        def wait(self, most: timedelta) -> None:
            waited.append(most)

    monkeypatch.setattr(dist, "broadcast", lambda *args, **named: Work())
    monkeypatch.setattr(dist, "isend", lambda *args, **named: Work())
    ranks = Ranks(Circle(object(), 0, (0, 1)), Circle(object(), 0, (0, 2)), meet=True)
    with pytest.raises(ValueError, match="no such luck"), leading(ranks):
        raise ValueError("no such luck")
    assert waited == [timedelta(seconds=5)] * 2


def test_nor_for_who_does_not_hear_it_on_a_board() -> None:
    """What was told before lies there, and is waited for as long."""
    waited: list[float] = []

    class Full:
        def tell(self, message: torch.Tensor, within_s: float) -> bool:
            waited.append(within_s)
            return True

    board: Any = Full()
    ranks = Ranks(Circle(object(), 0, (0, 1), board, 60.0))
    with pytest.raises(ValueError, match="no such luck"), leading(ranks):
        raise ValueError("no such luck")
    assert waited == [5]
