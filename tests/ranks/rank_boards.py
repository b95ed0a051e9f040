"""What processes do at a board that they share, and without one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rank_differs import batch, made, told
from starting import die

import fngraph as fg
from fngraph.ranks import board as boards
from fngraph.ranks.board import Board, make_board
from fngraph.ranks.mesh import agreeing
from fngraph.torch_facts.names import resolve_group

TIMEOUT_S = 1.0
MANY = 3000


def _board(timeout_s: float = TIMEOUT_S, room: int = 0) -> Board:
    made = make_board(dist.group.WORLD, timeout_s, room)
    assert made is not None
    return made


def exchanges(rank: int) -> Any:
    """Numbers of all sizes, many times; whether any was another one's, or another time's."""
    dist.init_process_group("gloo")
    board, size = _board(20), dist.get_world_size()
    wrong = 0
    for turn in range(MANY):
        want = [[turn, other, (1 << 63) - 1 - turn * other] for other in range(size)]
        wrong += board.exchange(want[rank]) != want
    board.put([rank, 5])  # what is begun may be heard later
    time.sleep(0.01 * rank)
    return wrong, board.take(2)


ROOM = 4001
LENGTHS = (0, 1, 2, 3, 4, 5, 1000, ROOM - 1, ROOM, ROOM + 1, 10 * ROOM, 7)


def tells(rank: int) -> Any:
    """Messages of all lengths, many times, some of which have no room, with numbers between them;
    how many were not as they were told, and which had no room."""
    dist.init_process_group("gloo")
    board, size = _board(20, ROOM), dist.get_world_size()
    wrong, without = 0, set()
    for turn in range(MANY // 10):
        for length in LENGTHS:
            g = torch.Generator().manual_seed(turn * 100 + length % 97)
            want = torch.randint(256, (length,), generator=g, dtype=torch.uint8)
            if rank == 0:
                fits = board.tell(want)
            else:
                found = board.hear()
                fits = found is not None
                wrong += found is not None and not torch.equal(found, want)
            if not fits:
                without.add(length)
            if turn % 2 and rank == 0:  # else the next one is told when all have this one
                board.all_have_it()
            if turn % 3 == 1:
                if rank == 0 and not turn % 2:
                    board.all_have_it()
                told = board.exchange([rank, turn])
                wrong += told != [[other, turn] for other in range(size)]
    if rank == 0 and turn % 2 == 0:
        board.all_have_it()
    return wrong, without


def not_heard(rank: int, who: int, how: str) -> Any:
    """What the other one is told, and after how long, of one that tells or hears no more."""
    dist.init_process_group("gloo")
    board, message = _board(room=ROOM), torch.ones(5, dtype=torch.uint8)
    act = [board.hear, lambda: board.tell(message)][rank == 0]
    act()
    if rank == who:
        if how == "dies":
            die()
        time.sleep(TIMEOUT_S * 1.5)
        return told(lambda: (act(), board.all_have_it()) if rank == 0 else act())
    began = time.monotonic()
    said = told(lambda: (act(), board.all_have_it()) if rank == 0 else act())
    return said, time.monotonic() - began


def ends(rank: int, how: str) -> Any:
    """What rank 0 is told, and after how long, of rank 1, which dies, stalls or gives up."""
    dist.init_process_group("gloo")
    board = _board()
    board.exchange([rank])
    if rank == 1:
        if how == "dies":
            die()
        if how == "gives up":
            board.leave()
            time.sleep(0.3)  # after which another one ends too
            return told(lambda: board.exchange([1]))
        time.sleep(TIMEOUT_S * 1.5)
        return told(lambda: board.exchange([1]))  # its word of this turn is there
    began = time.monotonic()
    said = told(lambda: board.exchange([0]))
    took = time.monotonic() - began
    return said, took, told(lambda: board.exchange([0]))


def apart(rank: int, who: int) -> Any:
    """One has no memory that others can map, as on another host: none has a board."""
    if rank == who == 0:
        boards.SHARED = Path("/nowhere")
    elif rank == who:
        boards._opened = lambda *_: None
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    step, state = made(tp)
    one, large = batch(0, 3, 2), batch(1, 7, 2)
    error = told(lambda: step(state, one))
    by = agreeing(resolve_group(tp.group))
    return by.board is None, error, told(lambda: step(state, large if rank else one))


def left_by_destroying(rank: int) -> Any:
    """One destroys its groups and goes on without: the other is told at once."""
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    step, state = made(tp)
    one = batch(0, 3, 2)
    step(state, one)
    if rank == 1:
        dist.destroy_process_group()
        time.sleep(6)
        return None
    began = time.monotonic()
    return told(lambda: step(state, one)), time.monotonic() - began
