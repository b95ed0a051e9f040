"""A decode step in every way that there is, three clocks apart: python -m benchmarks decode

Random weights and a cache that is full up to --context. Each way takes tokens and gives the
likeliest next ones; its logits, and the k and v that it keeps, are held to float64's before it is
timed. All ways of a point take turns. docs/performance.md has what each figure is.

FULL-none ...     fngraph: FULL, PIECEWISE, NONE, each at level none, fused (none with all passes),
                  pieces; and bare `forward`
eager ...         a step by hand of torch's ops, as it is, captured by hand, under `torch.compile`
gpt-fast          its way of a step
jax, transformers where they are installed; vllm, sglang, nano-vllm
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.decode import clocks, elsewhere, ours, peers, plain
from benchmarks.decode.asked import short_of
from benchmarks.decode.bench import Bench, Made, make_bench
from benchmarks.decode.judging import Left, told
from benchmarks.decode.measuring import Point, all_rows, in_turns, start_anew
from benchmarks.decode.models import MODELS, bytes_read
from benchmarks.decode.picture import draw
from benchmarks.device import release
from benchmarks.harness import BACKEND, DEVICE, ENDS, Benchmark, count, ends_of, some_of
from benchmarks.workload import BLOCK_SIZE

OURS, PEERS = {**ours.WAYS}, {**peers.WAYS, **elsewhere.WAYS}
WAYS = OURS | PEERS
At = Callable[[int], Made]


def prepared(bench: Bench, opened: dict[str, At | str], way: str, num_reqs: int) -> Made:
    """A way for so many requests; what it needs once for all is made by the first.

    Raises:
        Left: what it needs once has failed.
        Exception: what the way raises.
    """
    if way not in opened:
        try:
            opened[way] = WAYS[way](bench)
        except Exception as error:
            opened[way] = told(error)
    at = opened[way]
    if isinstance(at, str):
        raise Left(at)
    return at(num_reqs)


def point(
    flags: argparse.Namespace, bench: Bench, opened: dict[str, At | str], num_reqs: int,
    ends: float, copy: float,
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row a way, at one batch."""
    start_anew()
    right = bench.right(num_reqs)
    read = bytes_read(bench.config, plain.weights_of(bench.params), num_reqs, bench.context)
    make = lambda way: prepared(bench, opened, way, num_reqs)  # noqa: E731
    rates = lambda row: {"share": read / row["device ms"] / 1e9 / copy}  # noqa: E731
    here = {"batch": num_reqs, "context": bench.context}
    note = {"shape": bench.model.note} if bench.model.note else {}
    for row in in_turns(flags, make, bench, right, ends, rates):
        yield {"way": row["way"], **here, **row, "GB": read / 1e9, **note, "copy TB/s": copy}


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """See asked.py."""
    return short_of(rows, PEERS, flags.device.startswith("cuda"))


@Benchmark(
    {
        **DEVICE, **BACKEND, "--models": some_of(list(MODELS), list(MODELS)[:4]),
        "--batch": count([1, 2, 4, 8, 16, 32, 64]),
        "--context": count([512, 4096], "tokens of each request", multiple_of=BLOCK_SIZE),
        "--ways": some_of(list(WAYS)), "--repeats": count(200, "steps of each clock"),
        **ENDS,
    },
    quick={
        "models": ["tiny"], "batch": [1, 2], "context": [32], "repeats": 2,
        "ways": ["FULL-none", "NONE-fused", "bare", "eager", "captured"],
    },
    missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a model, context, batch and way, kept as they come."""
    rows = all_rows(flags, points(flags))
    draw(rows, OURS, flags.json)
    return rows


def points(flags: argparse.Namespace) -> Iterator[Point]:
    """Each model, context and batch, with its rows."""
    ends, copy = ends_of(flags), clocks.copy_tbs(flags.device)
    for model, context in itertools.product(flags.models, flags.context):
        bench = make_bench(model, context, flags.batch, flags.device, flags.backend)
        opened: dict[str, At | str] = {}
        for num_reqs in flags.batch:
            rows = point(flags, bench, opened, num_reqs, ends, copy)
            where = f"{model}, batch {num_reqs}, context {context}"
            yield where, ({"model": model, **row} for row in rows)
        del bench, opened, rows
        release(flags.device)
