"""A step's clocks, and the yardstick's mixes beside each of their rounds.

    mixes  wall, host  mixes  wall, host  ...        each round lies between two looks at the host

Another process may begin or end at any moment, and the host is twice as fast or half as fast from
then on. So rounds are short, and each has its own slowness: the mean of the looks on its two sides.
A step is predicted with each round's own, and the row that is kept is the round in the middle, by
what the prediction is off by there: a round within which the host has changed is at an end, not in
the middle. Medians of times and of slownesses by themselves would be of different moments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple

from benchmarks.decode import clocks
from benchmarks.decode.bench import Made
from benchmarks.launch.mixes import Yardstick, made_of

SLOW_US = 2e4  # of a step that is measured less often
ROUND_US, SLOW_ROUND_US = 2.5e4, 2e5
ROUNDS, SLOW_ROUNDS = 7, 3  # odd, so that there is one in the middle
LEAST = 4  # steps of a round, whose ends are else much of it


class Round(NamedTuple):
    """Microseconds of a step, and how many times as long the mix took beside it."""

    wall: float
    host: float
    slower: float


class Timed(NamedTuple):
    """A step by its clocks: rounds; device microseconds, None where it waited for the host."""

    rounds: list[Round]
    device: float | None


def timed(
    once: Callable[[], Any], device: str, repeats: int, likely_us: float, yardstick: Yardstick
) -> Timed:
    """Wall, host and device times, as `decode` has them, the first two in turns with the mix.

    Args:
        repeats: steps of a round, at most.
        likely_us: of a step; of a slow one there are fewer.
    """
    made = made_of(once, device)
    for _ in range(2):
        once()
    steps, rounds = shape_of(repeats, likely_us)
    looks, times = [yardstick.slower()], []
    for _ in range(rounds):
        times.append((clocks.wall_ms(made, None, steps) * 1e3, host_us(made, likely_us)))
        looks.append(yardstick.slower())
    beside = ((a + b) / 2 for a, b in itertools.pairwise(looks))
    found = [Round(wall, host, slower) for (wall, host), slower in zip(times, beside)]
    return Timed(found, device_us(made, median(host for _, host in times), likely_us))


def shape_of(repeats: int, likely_us: float) -> tuple[int, int]:
    """Steps of a round, and rounds."""
    if likely_us > SLOW_US:
        return max(2, min(repeats, int(SLOW_ROUND_US / likely_us))), SLOW_ROUNDS
    return min(repeats, max(LEAST, int(ROUND_US / max(likely_us, 1.0)))), ROUNDS


def host_us(made: Made, likely_us: float) -> float:
    """Of a call alone; of a slow step one call, which is long."""
    return median(clocks.host_us(made, None, 1 if likely_us > SLOW_US else clocks.BURST))


def device_us(made: Made, host_us: float, likely_us: float) -> float | None:
    """Of a step, where the device never waited for the host."""
    if likely_us > SLOW_US:
        steps, hold_s, rounds = 1, 1.5e-6 * host_us + 5e-4, 2
    else:
        (steps, hold_s), rounds = clocks.burst_of(made, None), 3
    ahead = [clocks.device_ms(made, None, steps, hold_s) for _ in range(rounds)]
    known = all(was for _, was in ahead)
    return median(ms for ms, _ in ahead) * 1e3 if known else None


def in_the_middle(offs: list[float]) -> int:
    """Which round is, by what its prediction is off by."""
    return sorted(range(len(offs)), key=offs.__getitem__)[len(offs) // 2]
