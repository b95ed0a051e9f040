"""What `decode` and `prefill` both do: a row a way of each point, kept as they come.

A point is a model at a batch and context, or at a chunk. Its ways are made and judged, and those
that are right take turns.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.decode import clocks
from benchmarks.decode.bench import Bench, Made, Right
from benchmarks.decode.judging import Row, made_ready
from benchmarks.harness import Flags, count, show, write

ENDS: Flags = {"--seconds": count(0, "after which no way is begun; 0: no limit", least=0)}
Point = tuple[str, Iterator[Row]]


def ends_of(flags: argparse.Namespace) -> float:
    """The time, in seconds of `time.monotonic`, after which no way is begun."""
    return time.monotonic() + flags.seconds if flags.seconds else float("inf")


def all_rows(flags: argparse.Namespace, points: Iterable[Point]) -> list[Row]:
    """The rows of all points, shown and written point by point. What a point needs is let go of
    before the next one is asked for."""
    rows: list[Row] = []
    for where, found in points:
        print(where, flush=True)
        new = list(found)
        del found
        show(new, where)
        rows += new
        write(flags, rows)
    return rows


def in_turns(
    flags: argparse.Namespace,
    make: Callable[[str], Made],
    bench: Bench,
    right: Right,
    ends: float,
    rates: Callable[[Row], Row],
) -> Iterator[Row]:
    """A row a way of one point: its times, what follows from them, its kernels, how far it is off.

    Args:
        rates: what follows from the times of a way.
    """
    ready, judged = made_ready(flags.ways, make, bench, right, ends)
    timed = clocks.in_turns(ready, right.ids, flags.repeats) if ready else {}
    for way in dict.fromkeys([*flags.ways, *timed]):
        name = way.removesuffix(", again")
        row = {"way": way, **timed.get(way, {})}
        if way in timed:
            row |= rates(row) | clocks.kernels(ready[name], right.ids) | {**ready[name].more}
        yield row | judged[name]


def start_anew() -> None:
    """Forget what was compiled for another point, and the limits on how often; let go of memory."""
    torch.compiler.reset()
    gc.collect()
