"""Three clocks of a step, apart; and its kernels.

host us     the call alone, without a wait: bursts of four after a wait, the first left out
device ms   between two events around a burst, behind a kernel that holds the device until all of
            the burst is launched, so that the device never waits for the host. `ahead` is the
            share of bursts that were: of a way with more launches than a queue holds, none. Work
            that is not on torch's stream, and that of a CPU: wall time of the burst
wall ms     a token, where each step takes the tokens of the one before, over a round of steps with
            one wait at its end

Ways take turns, a round each, so that a clock or a neighbour that changes meanwhile changes all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

import torch
from torch.autograd import DeviceType

from benchmarks.decode.bench import Made
from benchmarks.device import copy_bandwidth, device_us

BURST = 4  # steps that fngraph's ring has slots for: a fifth would wait for the first
ROUND = 20  # steps of one way, each clock
CYCLES = 2e9  # a second, no fewer: of the kernel that holds the device
Call = Callable[[], Any]


class Times(NamedTuple):
    """What one way's rounds have given."""

    host_us: list[float]
    device_ms: list[float]
    wall_ms: list[float]
    ahead: list[bool]

    def row(self) -> dict[str, Any]:
        """Medians."""
        return {
            "device ms": median(self.device_ms), "wall ms": median(self.wall_ms),
            "host us": median(self.host_us), "ahead": sum(self.ahead) / len(self.ahead),
        }  # fmt: skip


def wall_ms(made: Made, ids: Any, steps: int) -> float:
    """Of one token, fed back `steps` times."""
    made.wait()
    began = time.perf_counter()
    for _ in range(steps):
        ids = made.step(ids)
    made.wait()
    return (time.perf_counter() - began) / steps * 1e3


def host_us(made: Made, ids: Any, calls: int = BURST) -> list[float]:
    """Of the later calls of a burst; of one call, of that."""
    made.wait()
    times = []
    for _ in range(calls):
        began = time.perf_counter_ns()
        ids = made.step(ids)
        times.append((time.perf_counter_ns() - began) / 1e3)
    made.wait()
    return times[1:] or times


def device_ms(made: Made, ids: Any, steps: int, hold_s: float) -> tuple[float, bool]:
    """Of one step of a burst; and whether all were launched before the first began."""
    if not (made.on_stream and torch.cuda.is_available()):
        return wall_ms(made, ids, steps), False
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    made.wait()
    torch.cuda._sleep(int(hold_s * CYCLES))
    begin.record()
    for _ in range(steps):
        ids = made.step(ids)
    end.record()
    ahead = not begin.query()
    made.wait()
    return begin.elapsed_time(end) / steps, ahead


def burst_of(made: Made, ids: Any) -> tuple[int, float]:
    """Of how many steps a burst is that is launched ahead, and for how long to hold the device."""
    each = median(host_us(made, ids)) / 1e6
    for steps in (BURST, BURST // 2, 1):
        hold_s = 1.5 * steps * each + 5e-4
        if device_ms(made, ids, steps, hold_s)[1]:
            return steps, hold_s
    return 1, hold_s  # no queue is as long


def in_turns(ways: Mapping[str, Made], ids: Any, repeats: int) -> dict[str, dict[str, Any]]:
    """A row of each way, medians over as many steps. The way named first is measured again as the
    last of each round, as `..., again`: how far two rows of the same differ."""
    first = next(iter(ways))
    ways = {**ways, f"{first}, again": ways[first]}
    times = {name: Times([], [], [], []) for name in ways}
    bursts: dict[str, tuple[int, float]] = {}
    fed: dict[str, Any] = {}  # tokens where each way has left them
    for name, made in ways.items():
        fed[name] = made.step(made.step(made.step(ids)))
        bursts[name] = burst_of(made, fed[name])
    for at in range(0, repeats, ROUND):
        steps = min(ROUND, repeats - at)
        for name, made in ways.items():
            found, ids, (burst, hold_s) = times[name], fed[name], bursts[name]
            found.wall_ms.append(wall_ms(made, ids, steps))
            for _ in range(-(-steps // BURST)):
                found.host_us.extend(host_us(made, ids))
            for _ in range(-(-steps // burst)):
                ms, ahead = device_ms(made, ids, burst, hold_s)
                found.device_ms.append(ms)
                found.ahead.append(ahead)
    return {name: found.row() for name, found in times.items()}


def kernels(made: Made, ids: Any) -> dict[str, Any]:
    """The sum of the times of a step's kernels and copies, and how many they are; `idle`, the share
    of the time from the first one's start to the last one's end in which there was none. On a CPU,
    ops."""
    on_cuda = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity
    made.step(ids)
    made.wait()
    with torch.profiler.profile(
        activities=[activity.CUDA if on_cuda else activity.CPU], acc_events=True
    ) as profile:
        made.step(ids)
        made.wait()
    kind = DeviceType.CUDA if on_cuda else DeviceType.CPU
    found = [
        (event.time_range.start, event.time_range.end) for event in profile.events()
        if event.device_type == kind and not event.is_user_annotation and not event.cpu_children
    ]  # fmt: skip
    if not found:
        return {}  # no leave to look
    us = sum(end - start for start, end in found)
    return {"kernels us": us, "kernels": len(found), "idle": idle(found)}


def idle(spans: Iterable[tuple[float, float]]) -> float:
    """The share of the time from the first start to the last end that no span covers."""
    spans = sorted(spans)
    first, covered, until = spans[0][0], 0.0, spans[0][0]
    for start, end in spans:
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return 1 - covered / (until - first) if until > first else 0.0


def copy_tbs(device: str) -> float:
    """TB/s of a device copy, bytes read and written."""
    if device.startswith("cuda"):
        return copy_bandwidth()
    x = torch.ones(1 << 22)
    y = torch.empty_like(x)
    return 2 * x.nbytes / typical_us(lambda: y.copy_(x), device) / 1e6


def typical_us(call: Call, device: str) -> float:
    """Of a call that the device can repeat in a graph; on a CPU, wall time."""
    if device.startswith("cuda"):
        return device_us(call)
    times = []
    for _ in range(5):
        began = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - began) / 1e3)
    return median(times)
