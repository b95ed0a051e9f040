"""What four processes, two by two, are told where one of them differs, and one shares no axis with
it; and four of one axis."""

from __future__ import annotations

import warnings
from typing import Any

from rank_differs import ARMED, batch, fail, made, told

import fngraph as fg
from fngraph.ranks.agreement import RAISED, Peers, meet, tell_all

RANKS = 4
TIMEOUT_S = 5.0


def found(rank: int) -> dict[str, Any]:
    """All of it, on the same meshes, which stay whole."""
    warnings.simplefilter("ignore")
    grid = fg.make_mesh("cpu", timeout=TIMEOUT_S, dp=2, tp=2)
    row = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=RANKS)
    return {**differ(rank, grid), **in_a_row(rank, row), **swapped(rank, grid), **keys(rank, grid)}


def _peers(mesh: fg.Mesh) -> Peers:
    return Peers(tuple((axis.name, axis.group) for axis in mesh.axes), {}, {}, False, ())


def differ(rank: int, grid: fg.Mesh) -> dict[str, Any]:
    """Each in turn says something else, refuses, or has another flag."""
    found: dict[str, Any] = {}
    peers = _peers(grid)
    for who in range(RANKS):
        one = rank == who
        word = {RAISED: "ValueError: no"} if one else {}
        found["differs", who] = told(
            lambda: meet(peers, "go on", 7 + one, 0, lambda: {"number": str(7 + one)})  # noqa: B023
        )
        found["refuses", who] = told(
            lambda: meet(peers, "go on", 7, 0, lambda: word, trouble=one)  # noqa: B023
        )
        found["flags", who] = meet(peers, "go on", 7, 2 * one, dict)
    found["own flags"] = meet(peers, "go on", 7, rank, dict)
    return found


def in_a_row(rank: int, row: fg.Mesh) -> dict[str, Any]:
    """Each in turn says something else, to more than one neighbour."""
    peers = _peers(row)
    found: dict[str, Any] = {"all": tell_all(peers, "go on", {"rank": str(rank)})}
    for who in range(RANKS):
        number = 7 + (rank == who)
        found["in a row", who] = told(
            lambda: meet(peers, "go on", number, 0, lambda: {"number": str(number)})  # noqa: B023
        )
    return found


def swapped(rank: int, grid: fg.Mesh) -> dict[str, Any]:
    """Axes of one size, in the other order on one."""
    tp, dp = (grid["dp"], grid["tp"]) if rank == RANKS - 1 else (grid["tp"], grid["dp"])
    return {"swapped": told(lambda: made(tp, dp=dp))}


def keys(rank: int, grid: fg.Mesh) -> dict[str, Any]:
    """One lacks a key of a step, which all capture then; and one has failed to, so that none
    does."""
    one, found = batch(0, 3, 2), dict[str, Any]()
    step, state = made(grid["tp"], dp=grid["dp"])
    key = step.dispatch(one.spec).descriptor
    for who in range(RANKS):
        captured = []
        if rank == who:
            step.release(key)
        ARMED["now"] = lambda: captured.append(1)  # noqa: B023
        error = told(lambda: step(state, one))
        ARMED.clear()
        found["lacks", who] = error, len(step), len(captured)
    step, state = made(grid["tp"], dp=grid["dp"], capture={"lazy": True, "on_failure": "eager"})
    if rank == RANKS - 1:
        ARMED["now"] = fail
    found["fails"] = told(step.capture_all), len(step), [*step.failed.values()]
    ARMED.clear()
    if rank == RANKS - 1:  # and would try again
        step.release(key)
    found["would try again"] = told(lambda: step(state, one)), str(step.runs_as(one.spec).mode)
    return found
