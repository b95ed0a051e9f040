"""Processes of which one fails, is killed or stalls, in a capture or in the middle of its steps."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from rank_differs import ARMED, batch, made, told
from starting import die, freeze

import fngraph as fg
from fngraph.ranks.faults import ROLL_CALL_S
from fngraph.step import step as steps

TIMEOUT_S = 2.0
STEPS = 1000
FAILING = 1


def _raise() -> None:
    raise ValueError("no such luck")


def _stall() -> None:
    time.sleep(TIMEOUT_S * 1.5)


def _is_frozen() -> None:
    """For longer than anybody waits for its word."""
    freeze(TIMEOUT_S + ROLL_CALL_S + 1)


KINDS = {"raises": _raise, "is killed": die, "stalls": _stall, "is frozen": _is_frozen}


def within_collective(act: Callable[[], None]) -> None:
    """What this process does in its next collective of a step, in which the others are by then."""
    real = dist.all_reduce

    def collective(*args: Any, **kwargs: Any) -> Any:
        dist.all_reduce = real
        time.sleep(0.2)
        act()
        return real(*args, **kwargs)

    dist.all_reduce = collective


def behind_agreement(act: Callable[[], None]) -> None:
    """What this process does in its next step when all have agreed on it, and launched it."""
    real = steps.before_step

    def agreed(*args: Any) -> None:
        steps.before_step = real  # type: ignore[attr-defined]
        real(*args)
        time.sleep(0.2)
        act()

    steps.before_step = agreed  # type: ignore[attr-defined]


def fails(rank: int, kind: str, where: str, ranks: int = 2) -> Any:
    """What rank 1 does in a capture or in a step, and what the others raise, after how long."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=ranks)["tp"]
    mode = "NONE" if where == "op" else "FULL"
    step, state = made(tp, modes=mode, capture={"lazy": True})
    one = batch(0, 3, 2)
    if where != "capture":
        agreed = step.dispatch(one.spec)
        step(state, one)
        for _ in range(STEPS):
            step(state, one, allowed=agreed)
    if rank == FAILING and where == "collective":
        within_collective(KINDS[kind])
    elif rank == FAILING:
        ARMED["now"] = KINDS[kind]
    if where == "steps" and rank == FAILING:  # between two of them
        KINDS[kind]()
    began = time.monotonic()
    error = told(lambda: step(state, one))
    return error, time.monotonic() - began


def in_a_trace(rank: int) -> Any:
    """One process cannot trace what the others are to capture, and lives on."""
    tp = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=2)["tp"]

    def act(x: torch.Tensor) -> torch.Tensor:
        if rank == FAILING:
            _raise()
        return torch.relu(x)

    began = time.monotonic()
    error = told(lambda: made(tp, act=act))
    if rank == FAILING:
        time.sleep(TIMEOUT_S + 2)
    return error, time.monotonic() - began


def fails_on_device(rank: int, kind: str) -> Any:
    """What rank 1 does when both have agreed on a step, of which the other one has then launched
    its own; and what that one raises at the step behind it, after how long."""
    warnings.simplefilter("ignore")
    threading.Timer(60, os._exit, (0,)).start()  # a device that waits keeps its process
    tp = fg.make_mesh("cuda", timeout=TIMEOUT_S, tp=2)["tp"]
    step, state = made(tp, device=f"cuda:{rank}")
    one = batch(0, 3, 2, f"cuda:{rank}")
    agreed = step.dispatch(one.spec)
    for _ in range(STEPS):
        step(state, one, allowed=agreed)
    torch.cuda.synchronize()
    if rank == FAILING:
        behind_agreement(KINDS[kind])
    began = time.monotonic()
    first = told(lambda: step(state, one))
    return first, told(lambda: step(state, one)), time.monotonic() - began


def survived(rank: int) -> Any:
    """A step that raises in both, then one that does not; then one of them is killed."""
    warnings.simplefilter("ignore")
    step, state = made(fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=2)["tp"], modes="NONE")
    one = batch(0, 3, 2)
    step(state, one)
    ARMED["now"] = _raise
    first = told(lambda: step(state, one))
    ARMED.clear()
    step(state, one)
    if rank == FAILING:
        die()
    return first, told(lambda: step(state, one))


def survived_capture(rank: int) -> Any:
    """A capture that raises in one, then a step that does not; then that one is killed."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=2)["tp"]
    step, state = made(tp, late=True, capture={"lazy": True})
    one = batch(0, 3, 2)
    if rank == FAILING:
        ARMED["now"] = _raise
    first = told(step.capture_all)
    ARMED.clear()
    step(state, one)
    if rank == FAILING:
        die()
    return first, told(lambda: step(state, one))


def survived_elsewhere(rank: int) -> Any:
    """A capture that raises in one, then another function's, in which that one is killed."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=2)["tp"]
    step, other = (made(tp, late=True, capture={"lazy": True})[0] for _ in range(2))
    if rank == FAILING:
        ARMED["now"] = _raise
    first = told(step.capture_all)
    if rank == FAILING:
        ARMED["now"] = die
    return first, told(other.capture_all)


def in_a_grid(rank: int) -> Any:
    """Two by two, of which the last is killed: one shares no axis with it."""
    warnings.simplefilter("ignore")
    mesh = fg.make_mesh("cpu", timeout=TIMEOUT_S, dp=2, tp=2)
    step, state = made(mesh["tp"], dp=mesh["dp"])
    one = batch(0, 3, 2)
    step(state, one)
    if rank == 3:
        die()
    began = time.monotonic()
    return told(lambda: step(state, one)), time.monotonic() - began


def goes_on(rank: int, where: str) -> Any:
    """Three processes, of which one is killed, between two steps or in a collective; the other two
    go on with the same weights, state and processes, as a group of two."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=20, tp=3)["tp"]
    step, state = made(tp)
    one = batch(0, 3, 2)
    step(state, one)
    kept = state["rows"].clone()
    if rank == 2 and where == "steps":
        die()
    if rank == 2:
        within_collective(die)
    error = told(lambda: step(state, one))
    unchanged = torch.equal(state["rows"], kept)
    step.sleep()
    dist.destroy_process_group()
    gone = told(step.wake)
    os.environ["WORLD_SIZE"] = "2"
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank,
                            world_size=2)  # fmt: skip
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    step, new = made(tp)
    new["rows"].copy_(state["rows"])
    step(new, one)
    want = 2 * torch.relu(one.x)
    return error, unchanged, gone, torch.equal(new["rows"][one.slot], want)


def elsewhere(rank: int) -> Any:
    """One comes to a collective of the model's by itself, which looks like an agreement."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=TIMEOUT_S, tp=2)["tp"]
    step, state = made(tp)
    one = batch(0, 3, 2)
    step(state, one)
    kept = state["rows"].clone()
    began = time.monotonic()
    if rank == FAILING:
        error = told(lambda: fg.all_gather(torch.zeros(3, dtype=torch.int64), tp))
    else:
        error = told(lambda: step(state, one))
    return error, time.monotonic() - began, torch.equal(state["rows"], kept)


def same_again(rank: int) -> Any:
    """A group that is destroyed and made again has the same names: what slept wakes over it."""
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    step, state = made(tp)
    one = batch(0, 3, 2)
    step(state, one)
    want = state["rows"].clone()
    step.sleep()
    dist.destroy_process_group()
    missing = told(lambda: fg.all_reduce(one.x, tp))
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore("second", store), rank=rank,
                            world_size=2)  # fmt: skip
    again = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    step.wake()
    state["rows"].zero_()
    step(state, one)
    return missing, again == tp, torch.equal(state["rows"], want)
