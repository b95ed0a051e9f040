"""What `decode` and `prefill` both do: a row a way of each point, kept as they come.

A point is a model at a batch and context, or at a chunk. Its ways are made and judged, and those
that are right take turns.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.decode import clocks
from benchmarks.decode.bench import Bench, Made, Right
from benchmarks.decode.judging import made_ready
from benchmarks.harness import Row, kept, show

Point = tuple[str, Iterator[Row]]


def all_rows(flags: argparse.Namespace, points: Iterable[Point]) -> list[Row]:
    """The rows of all points, shown and written point by point. What a point needs is let go of
    before the next one is asked for."""
    return kept(flags, _shown(points))


def _shown(points: Iterable[Point]) -> Iterator[Row]:
    for where, found in points:
        print(where, flush=True)
        new = list(found)
        del found
        show(new, where)
        yield from new


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
