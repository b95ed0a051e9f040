"""A step's keys, looked at while they run: device time per piece, named ranges for profilers."""

from __future__ import annotations

import dataclasses
import statistics
import time
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from fngraph.core import BatchDescriptor, HostBounds
from fngraph.core.text import table
from fngraph.graphs.inside import key_name
from fngraph.graphs.memory import kept, preserved
from fngraph.graphs.replay import EagerCall, Replay, launch
from fngraph.graphs.staging.buffers import Sizes
from fngraph.step.backend_plans import plan_padding
from fngraph.step.obtain import as_captured
from fngraph.step.prepared import forget
from fngraph.step.warm import bounds_of, sizes_of, written
from fngraph.torch_facts.names import keep_busy

if TYPE_CHECKING:
    from fngraph.step.captured import Captured

Us = list[float]  # microseconds of each call of a key


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """How long each graph and eager call of a key takes.

    Attributes:
        key: `fngraph FULL 8x8 q1`.
        rows: (name, us), median over the repeats, in the order of replay.
        total: us of the whole key, median. Its parts' medians need not add up to it.
    """

    key: str
    rows: tuple[tuple[str, float], ...]
    total: float

    def as_text(self) -> str:
        """A table."""
        rows = [*self.rows, ("all", self.total)]
        return table([self.key, "us"], [(name, f"{us:.1f}") for name, us in rows])

    __repr__ = as_text


def times(step: Captured, descriptor: BatchDescriptor, repeats: int = 20) -> Times:
    """Device time of each graph and eager call of a captured key; CPU time on the tape.

    It replays a batch that is all padding, so donated state and generators are as before; what
    is written other than through null slots is saved first. Attention sees no keys there, so
    its time is a lower bound. Borrowed outputs are overwritten, as by a step.

    Raises:
        KeyError: a key that is not captured. AddressError: a bound leaf has moved.
    """
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: at least 1")
    replay = step[descriptor]
    sizes = sizes_of(step, descriptor)
    host = bounds_of((replay.mode, descriptor))
    device = step.recorder.device
    timed = _on_cuda if device.type == "cuda" else _on_cpu
    rounds, lag = [], 0.0
    with step.recorder.turn.taken(), as_captured(step):
        step.binding.check()
        step.recorder.loans.expire(step.outputs, "times()")
        with preserved(written(step)), kept(step.static.views(sizes)):
            try:
                for _ in range(repeats + 1):
                    step.ring.put_padding(step.static.buffer_plan, descriptor.query_len or 0)
                    plan_padding(step, replay.mode, descriptor, sizes)
                    us, lag = timed(replay, sizes, host, lag)
                    rounds.append(us)
            except BaseException:
                step.ring.resume()
                raise
    del rounds[0]  # it warms up, and tells how far the device is ahead of the host
    names = [
        call.name if isinstance(call, EagerCall) else f"graph {i}"
        for i, call in enumerate(replay.calls)
    ]
    medians = [statistics.median(column) for column in zip(*rounds)]
    total = statistics.median(map(sum, rounds))
    return Times(key_name(replay.mode, descriptor), tuple(zip(names, medians)), total)


def show_ranges(step: Captured, on: bool = True) -> None:
    """From now on, replays of the keys that are captured show in profiles, or no longer do.

    Each is in a range that is named after its key, as `fngraph FULL 8x8 q1`: of torch.profiler,
    and an NVTX one where there is CUDA. Keys captured later have none until this is called
    again. A step that never was asked for them has no code for them.
    """
    with step.recorder.turn.taken():
        for key, replay in step.replays.items():
            step.replays[key] = replay.with_ranges() if on else replay.without_ranges()
        forget(step)


def _on_cpu(replay: Replay, sizes: Sizes, host: HostBounds, lag: float) -> tuple[Us, float]:
    marks = [time.perf_counter()]
    for bound in replay.bind(sizes):
        launch([bound], host)
        marks.append(time.perf_counter())
    return [(b - a) * 1e6 for a, b in pairwise(marks)], 0.0


def _on_cuda(replay: Replay, sizes: Sizes, host: HostBounds, lag: float) -> tuple[Us, float]:
    """By events. The device is kept busy until the host has launched everything, which takes it
    `lag` s: a device that waits for the host would show the host's time."""
    calls = replay.bind(sizes)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(calls) + 1)]
    torch.cuda.synchronize()
    keep_busy(int(min(2 * lag, 0.1) * 2e9))  # cycles, at about 2 GHz
    began = time.perf_counter()
    marks[0].record()
    for bound, mark in zip(calls, marks[1:]):
        launch([bound], host)
        mark.record()
    lag = time.perf_counter() - began
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)], lag
