"""How long a captured key takes, part by part, on the device."""

from __future__ import annotations

import dataclasses
import statistics
import time
from itertools import pairwise

import torch

from fngraph.core import HostBounds
from fngraph.core.text import html, table
from fngraph.graphs.inside import key_name
from fngraph.graphs.memory import kept, preserved
from fngraph.graphs.replay import EagerCall, Replay, launch
from fngraph.graphs.staging.buffers import Sizes
from fngraph.step.capture import as_captured, bounds_of, overwritten, plan_padding
from fngraph.step.keys import Keys
from fngraph.torch_facts.names import keep_busy

Us = list[float]  # microseconds of each call of a key


@dataclasses.dataclass(frozen=True, slots=True)
class Times:
    """How long each graph and eager call of a key takes.

    Attributes:
        key: `fngraph FULL 8x8 q1`.
        rows: (name, us), median over the repeats, in the order of replay.
        total: us of the whole key, median. Its parts' medians need not add up to it.
        paced: us of each part as the host launches it, median: what that is longer by is a gap, in
            which the device waits. On the tape there is none.
    """

    key: str
    rows: tuple[tuple[str, float], ...]
    total: float
    paced: tuple[float, ...] = ()

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """A table."""
        rows = [*self.rows, ("all", self.total)]
        return table([self.key, "us"], [(name, f"{us:.1f}") for name, us in rows])

    __repr__ = as_text


def measure(keys: Keys, replay: Replay, repeats: int) -> Times:
    """See `Step.times`."""
    key = replay.mode, replay.descriptor
    sizes, host = keys.executable.sizes(replay.descriptor), bounds_of(key)
    shared, ring = keys.shared, keys.ring
    timed = _on_cuda if shared.recorder.device.type == "cuda" else _on_cpu
    rounds, paced, lag = [], [], 0.0
    with as_captured(keys):
        shared.binding.check()
        shared.recorder.loans.expire(keys.outputs, "times()")
        with preserved(overwritten(keys)), kept(keys.static.views(sizes)):
            try:
                for _ in range(repeats + 1):
                    ring.put_padding(keys.executable.plan, replay.descriptor.query_len or 0)
                    plan_padding(keys, key, sizes)
                    us, lag = timed(replay, sizes, host, lag)
                    rounds.append(us)
                    if timed is _on_cuda:
                        ring.put_padding(keys.executable.plan, replay.descriptor.query_len or 0)
                        plan_padding(keys, key, sizes)
                        paced.append(timed(replay, sizes, host, 0.0)[0])
            except BaseException:
                ring.resume()
                raise
    del rounds[0]  # it warms up, and tells how far the device is ahead of the host
    names = [
        call.name if isinstance(call, EagerCall) else f"graph {i}"
        for i, call in enumerate(replay.calls)
    ]
    medians = [statistics.median(column) for column in zip(*rounds)]
    total = statistics.median(map(sum, rounds))
    gaps = [statistics.median(column) for column in zip(*paced[1:])] if paced[1:] else medians
    return Times(key_name(*key), tuple(zip(names, medians)), total, tuple(gaps))


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
    if lag:
        keep_busy(int(min(2 * lag, 0.1) * 2e9))  # cycles, at about 2 GHz
    began = time.perf_counter()
    marks[0].record()
    for bound, mark in zip(calls, marks[1:]):
        launch([bound], host)
        mark.record()
    lag = time.perf_counter() - began
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e3 for a, b in pairwise(marks)], lag
