"""Turns: what is done between steps is done alone, from whatever thread."""

from __future__ import annotations

import threading

import torch

from fngraph.graphs.turn import PoolTurn


def is_free(turn: PoolTurn) -> bool:
    """Whether another thread could begin a step now."""
    found: list[bool] = []

    def other() -> None:
        taken = turn.lock.acquire(blocking=False)
        found.append(taken)
        if taken:
            turn.lock.release()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return found[0]


def test_no_step_begins_while_another_thread_works_between_two():
    turn = PoolTurn(torch.device("cpu"))
    assert is_free(turn)
    with turn.taken():
        assert not is_free(turn)
        with turn.taken():  # a thread may take its own turn again
            assert not is_free(turn)
        assert not is_free(turn)
    assert is_free(turn)
    try:
        with turn.taken():
            raise ValueError
    except ValueError:
        assert is_free(turn)
