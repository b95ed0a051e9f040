"""Numbers that processes of a host tell each other over memory: right each time, and whoever waits
for one that is gone is told."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import rank_boards
import starting
import torch.distributed as dist

from fngraph.errors import AbsentError, RankError
from fngraph.ranks import board as boards
from fngraph.ranks.board import ROW, TURNS, Board, Turn, make_board
from fngraph.ranks.faults import ROLL_CALL_S


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_have_the_numbers_of_all(ranks: int) -> None:
    for wrong, later in starting.values(starting.run(rank_boards.exchanges, ranks)):
        assert wrong == 0
        assert later == [[rank, 5] for rank in range(ranks)]


@pytest.mark.parametrize(
    ("how", "why", "within"),
    [
        ("dies", "process 1 of 2 has ended", 0.8),
        ("stalls", "process 1 of 2 has not come for 1 s", 1.3),
        ("gives up", "process 1 of 2 has given up", 0.8),
    ],
)
def test_who_waits_is_told(how: str, why: str, within: float) -> None:
    """And does so once; who comes late is told as well, though it finds a word of its turn."""
    ours, theirs = starting.run(rank_boards.ends, 2, how)
    assert not ours.error, ours.error
    said, took, again = ours.value
    assert said.startswith(f"AbsentError: {why}") and took < within
    assert again.startswith("AbsentError: process ")
    assert theirs.code == -9 if how == "dies" else "has given up" in theirs.value


@pytest.mark.parametrize("ranks", [2, 3])
def test_all_hear_what_the_first_one_tells(ranks: int) -> None:
    """What has no room is told to have none."""
    too_long = {length for length in rank_boards.LENGTHS if length > rank_boards.ROOM}
    for wrong, without in starting.values(starting.run(rank_boards.tells, ranks)):
        assert wrong == 0 and without == too_long


@pytest.mark.parametrize(
    ("how", "why", "within"),
    [("dies", "process {} of 2 has ended", 0.8), ("stalls", "process {} of 2 has not come", 1.3)],
)
@pytest.mark.parametrize("who", [0, 1])
def test_who_tells_or_hears_alone_is_told(who: int, how: str, why: str, within: float) -> None:
    """And so is one that comes late, whichever it is."""
    ended = starting.run(rank_boards.not_heard, 2, who, how)
    assert not ended[1 - who].error, ended[1 - who].error
    said, took = ended[1 - who].value
    assert said.startswith(f"AbsentError: {why.format(who)}") and took < within
    late = ended[who]
    assert late.code == -9 if how == "dies" else "has given up" in late.value, late


@pytest.mark.parametrize("who", [0, 1])
def test_where_one_has_no_such_memory_none_uses_it(who: int) -> None:
    """And steps agree as ever."""
    for none, error, differs in starting.values(starting.run(rank_boards.apart, 2, who)):
        assert none and error == ""
        assert differs.startswith("RankError: ") and "differ in the key that runs" in differs


def test_who_destroys_its_groups_has_left() -> None:
    (said, took), _ = starting.values(starting.run(rank_boards.left_by_destroying, 2))
    assert said.startswith("RankError: the agreement to run a step") and "has ended, or" in said
    assert took < ROLL_CALL_S + 1


GROUP = dist.ProcessGroup(0, 1)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ((2, 1.0), "group=2 is an int. Pass torch's"),
        ((None, 1.0), "group=None is a NoneType. Pass torch's"),
        *(
            ((GROUP, time), "a number of seconds above 0")
            for time in ("1", -1.0, 0, True, math.nan)
        ),
        *(((GROUP, 1.0, room), "a whole number of bytes") for room in (-1, "1", 1.5, True)),
    ],
)
def test_what_is_no_board(given: Any, text: str) -> None:
    with pytest.raises(RankError, match=text):
        make_board(*given)


def test_a_board_prints_what_it_is(tmp_path: Path) -> None:
    path = tmp_path / "board"
    path.write_bytes(bytes(8 * (2 * ROW + 25)))
    board = Board(os.open(path, os.O_RDWR), 0, 2, 1.5)
    assert repr(board) == "Board(process 0 of 2, waits 1.5 s)"
    board = Board(os.open(path, os.O_RDWR), 1, 2, 60, 100)
    assert repr(board) == "Board(process 1 of 2, waits 60 s, with room for 100 bytes)"


def test_threads_come_one_after_the_other(tmp_path: Path) -> None:
    """Two steps of one process may be called at once; each has its own exchange."""
    path, before = tmp_path / "board", sys.getswitchinterval()
    path.write_bytes(bytes(8 * ROW))
    board = Board(os.open(path, os.O_RDWR), 0, 1, 1.0)

    def wrong(own: int) -> int:
        return sum(board.exchange([own, i]) != [[own, i]] for i in range(20000))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(2) as pool:
            assert list(pool.map(wrong, (1, 2))) == [0, 0]
    finally:
        sys.setswitchinterval(before)


def both(tmp_path: Path) -> tuple[Board, Board]:
    """Two places at one, both of this process, which wait for less time than it takes to look
    whether the other one's process has ended."""
    path = tmp_path / "board"
    path.write_bytes(bytes(8 * 2 * ROW))
    one, other = (Board(os.open(path, os.O_RDWR), rank, 2, 0.005) for rank in range(2))
    return one, other


def gave_up(act: Any) -> bool:
    """Whether the other one is known to take no part, else it has not come."""
    with pytest.raises(AbsentError) as told:
        act()
    return told.value.gave_up


def test_who_gives_up_an_exchange_takes_part_in_no_message(tmp_path: Path) -> None:
    one, other = both(tmp_path)
    assert not gave_up(lambda: one.exchange([1]))
    assert gave_up(other.hear) and other.absent() == [0]


def test_who_gives_up_a_message_takes_part_in_no_exchange(tmp_path: Path) -> None:
    one, other = both(tmp_path)
    assert not gave_up(other.hear)
    assert gave_up(lambda: one.exchange([1])) and one.absent() == [1]


@pytest.mark.parametrize("turn", [1, TURNS - 2, TURNS - 1, TURNS, TURNS + 1])
def test_counts_that_begin_again_are_known_from_those_before(tmp_path: Path, turn: int) -> None:
    """Who leaves after an exchange was in that one, and is in no later one."""
    for later in (1, 2, 3):
        one, other = both(tmp_path)
        for board in (one, other):
            board._turn = Turn.exchange(turn - 1)
        other.put([7])
        other.leave()
        assert one.exchange([5]) == [[5], [7]]
        one._turn = Turn.exchange(turn + later - 1)
        assert gave_up(lambda: one.exchange([5]))  # noqa: B023


def times_open(path: Path) -> int:
    """How many descriptors this process has of a file."""
    gc.collect()
    found, own = 0, path.stat()
    for one in list(Path("/dev/fd").iterdir()):
        with contextlib.suppress(OSError):  # that of the list itself
            found += os.path.samestat(os.fstat(int(one.name)), own)
    return found


def test_a_board_that_is_gone_keeps_no_file_open(tmp_path: Path) -> None:
    made = both(tmp_path)
    assert times_open(tmp_path / "board") >= 2
    del made
    assert times_open(tmp_path / "board") == 0


def test_a_file_of_the_same_name_is_no_board(tmp_path: Path) -> None:
    """As on another host: it is known by its token."""
    path, own, another = tmp_path / "board", bytes(range(16)), bytes(16)
    path.write_bytes(bytes(8 * ROW) + own)
    assert boards._opened(str(path), another, 0, 1, 1.0, 0) is None
    assert boards._opened(str(tmp_path / "none"), own, 0, 1, 1.0, 0) is None
    assert times_open(path) == 0
    board = boards._opened(str(path), own, 0, 1, 1.0, 0)
    assert board is not None and board.exchange([3]) == [[3]]


@pytest.mark.parametrize("opens", [True, False])
def test_no_file_is_left_where_boards_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    """Those who have it keep it: its memory goes with the last of them, however they end."""
    seen = []

    def gathered(own: Any, group: Any) -> list[Any]:
        seen.append(len(list(tmp_path.iterdir())))
        return [own]

    monkeypatch.setattr(boards, "SHARED", tmp_path)
    monkeypatch.setattr(boards, "gather_objects", gathered)
    monkeypatch.setattr(dist, "get_rank", lambda group: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda group: 1)
    if not opens:
        monkeypatch.setattr(boards, "_opened", lambda *args: None)
    board = make_board(GROUP, 1.0)
    assert seen == [1, 1] and not list(tmp_path.iterdir())
    assert (board is not None) == opens
    assert board is None or board.exchange([3]) == [[3]]
