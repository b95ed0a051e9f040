"""Warm-ups that fail in one of two processes alone, before anything is captured."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rank_differs import ARMED, batch, made, told

import fngraph as fg
from fngraph.errors import CaptureError
from fngraph.step import capture

FAILING = 1


def _at(call: int) -> Callable[[], None]:
    """What raises when it is called so often."""
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1
        if calls == call:
            raise ValueError("no such luck")

    return count


@contextlib.contextmanager
def _no_memory(written: Any) -> Any:
    raise CaptureError("no memory for the copies")
    yield


def _cannot(keys: Any, key: Any) -> None:
    raise ValueError("no such luck")


PATCHES: dict[str, tuple[str, Any]] = {
    "a key": ("_run_padding", _cannot),
    "copies": ("preserved", _no_memory),
}


def fails(rank: int) -> Any:
    """By name: what each is told of a capture, and of a step behind it."""
    warnings.simplefilter("ignore")
    capture.compiles_kernels = lambda device: True  # as on CUDA: batches without graphs are run
    tp = fg.make_mesh("cpu", timeout=10, tp=2)["tp"]
    return {f"{what}, {how}": _one(tp, rank, what, how) for what in (*PATCHES, "a batch")
            for how in ("raise", "eager")}  # fmt: skip


def _one(tp: fg.Axis, rank: int, what: str, how: str) -> Any:
    step, state = made(tp, late=True, capture={"lazy": True, "on_failure": how})
    one, patch = batch(0, 3, 2), pytest.MonkeyPatch()
    if rank == FAILING and what in PATCHES:
        patch.setattr(capture, *PATCHES[what])
    elif rank == FAILING:
        ARMED["now"] = _at(2)
    error = told(step.capture_all)
    ARMED.clear()
    patch.undo()
    state["rows"].zero_()
    after = told(lambda: step(state, one))
    return error, after, torch.equal(state["rows"][one.slot], 2 * torch.relu(one.x)), len(step)
