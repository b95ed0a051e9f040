"""What is refused leaves nothing behind: no tensor, no model, no frame of the caller's.

Each refusal's error is raised, said and dropped, as by somebody who ports a model line by line.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import steps
import torch
import toys

import fngraph as fg
from fngraph.errors import CaptureError, FnGraphError

TIMES = 200
WEIGHT = torch.ones(toys.E)


def rows(p: Any, b: Any) -> Any:
    return p["w"][b.token_ids]


REFUSED: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rows": lambda p, s, b: (rows(p, b).mean(0), s),
    "a value on the host": lambda p, s, b: (rows(p, b) * s["total"].sum().item(), s),
    "a shape by values": lambda p, s, b: (b.token_ids.nonzero(), s),
    "a closed-over tensor": lambda p, s, b: (rows(p, b) * WEIGHT, s),
    "a branch": lambda p, s, b: (rows(p, b) if len(b.token_ids) > 3 else 0, s),
    "a write": lambda p, s, b: (p["w"].add_(1), s),
    "random numbers": lambda p, s, b: (torch.rand(3), s),
    "a host field": lambda p, s, b: (p["w"][: b.spec.num_tokens], s),
    "no tensor": lambda p, s, b: (3, s),
    "state that does not come back": lambda p, s, b: (rows(p, b), {"seen": s["seen"]}),
    "state of another shape": lambda p, s, b: (rows(p, b), {**s, "total": s["total"][1:]}),
    "an error of torch's": lambda p, s, b: (rows(p, b) @ rows(p, b), s),
    "an error of forward's own": lambda p, s, b: p["no such weight"],
}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps what is logged, and what torch logs of an error keeps its frames."""
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)


class Local:
    """Something that the caller has in a local variable."""


class Remains:
    """What is alive of what was refused."""

    def __init__(self) -> None:
        self.refs: list[weakref.ref[Any]] = []
        self.before = self.count()

    @staticmethod
    def count() -> tuple[int, int, int]:
        """Tensors, frames, and bytes of the device."""
        gc.collect()
        alive = gc.get_objects()
        tensors = sum(issubclass(type(x), torch.Tensor) for x in alive)
        frames = sum(type(x) is types.FrameType for x in alive)
        return tensors, frames, torch.cuda.memory_allocated() if torch.cuda.is_available() else 0

    def watch(self, *things: Any) -> None:
        """These are to go."""
        self.refs += map(weakref.ref, things)

    def check_none(self) -> None:
        """Assert that nothing was left."""
        assert self.count() == self.before
        assert not [ref() for ref in self.refs if ref() is not None]


def refused_trace(fn: Any, recorder: str, device: Any, remains: Remains) -> None:
    p = {name: x.to(device).clone() for name, x in toys.tally_params().items()}
    s = {name: x.to(device).clone() for name, x in toys.tally_state().items()}
    local = Local()
    remains.watch(p["w"], s["total"], local)
    fast = fg.graphify(fn, donate="s", stage="b", limits=toys.LIMITS, recorder=recorder)
    with pytest.raises((FnGraphError, KeyError)):
        fast(p, s, toys.batch(2))


@pytest.mark.sampled(0)
def test_refused_traces(recorder_name, device):
    functions = itertools.cycle(REFUSED.values())
    refused_trace(next(functions), recorder_name, device, Remains())
    remains = Remains()
    for _ in range(TIMES):
        refused_trace(next(functions), recorder_name, device, remains)
    remains.check_none()


def test_a_refused_trace_lets_go_without_the_collector(recorder_name, device):
    """A model may be most of the device: the next one must fit before the collector next looks."""
    remains = Remains()
    gc.disable()
    try:
        for what, fn in REFUSED.items():
            refused_trace(fn, recorder_name, device, remains)
            assert not [ref() for ref in remains.refs if ref() is not None], what
    finally:
        gc.enable()


CALLS: dict[str, Callable[[Any, Any], tuple[Any, ...]]] = {
    "a batch beyond the limits": lambda state, device: (state, toys.batch(17)),
    "another state": lambda state, device: (toys.clone(state), toys.batch(2)),
    "a state of another structure": lambda state, device: ({"seen": torch.ones(1)}, toys.batch(2)),
    "too few arguments": lambda state, device: (state,),
    "no spec": lambda state, device: (state, torch.ones(3)),
    "leaves that the spec denies": lambda state, device: (
        state, dataclasses.replace(toys.batch(3), spec=fg.BatchSpec(2, 1))),
    "another dtype": lambda state, device: (
        state, dataclasses.replace(toys.batch(3), token_ids=torch.ones(3))),
}  # fmt: skip


def test_refused_calls(recorder_name, device):
    made = steps.make(recorder_name, device)
    made.check(toys.batch(2))

    def refused(call: Any, remains: Remains) -> None:
        local, args = Local(), call(made.state, device)
        remains.watch(local, *[x for x in toys.leaves(args[1:]) if isinstance(x, torch.Tensor)])
        with pytest.raises(FnGraphError):
            made.step(*args)

    calls = itertools.cycle(CALLS.values())
    for _ in CALLS:  # what a batch's counts decide is kept
        refused(next(calls), Remains())
    remains = Remains()
    for _ in range(TIMES):
        refused(next(calls), remains)
    remains.check_none()
    made.check(toys.batch(3, 2))


def boom() -> None:
    raise ValueError("boom")


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_failed_captures(recorder_name, device, on_failure):
    made = steps.make(recorder_name, device, on_failure=on_failure)
    batch = toys.on(toys.batch(3, 2), device)
    made.fault.arm("piece", 2, boom, times=10**6)

    def fails(remains: Remains) -> None:
        local = Local()
        remains.watch(local)
        if on_failure == "raise":
            with pytest.raises(CaptureError, match="boom"):
                made.step(made.state, batch)
        else:
            made.step.recapture(fg.BatchDescriptor(8))
            assert len(made.step.failed) == 1

    fails(Remains())
    remains = Remains()
    for _ in range(TIMES):
        fails(remains)
    remains.check_none()
    made.fault.times = 0
    made.step.recapture(fg.BatchDescriptor(8))
    made.check(toys.batch(3, 2))
