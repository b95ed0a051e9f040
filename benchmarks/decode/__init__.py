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
from benchmarks.decode.bench import Bench, Made, make_bench
from benchmarks.decode.judging import Left, broken, told
from benchmarks.decode.measuring import Point, all_rows, in_turns, start_anew
from benchmarks.decode.models import MODELS, bytes_read
from benchmarks.decode.picture import draw
from benchmarks.device import release
from benchmarks.harness import BACKEND, DEVICE, ENDS, Benchmark, count, ends_of, some_of
from benchmarks.workload import BLOCK_SIZE

OURS, PEERS = {**ours.WAYS}, {**peers.WAYS, **elsewhere.WAYS}
WAYS = OURS | PEERS
AT_MOST = {"1B": 0.74, "8B": 3.9, "0.6B": 0.42}  # ms on the device, batch 1, context 512
AHEAD, OF_BOUND = 1.1, 0.92  # of the best peer, or of the copy bandwidth, at every point
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
    """What is asked of the H200: goals 1 and 2, of one request; 3, of every point beside the best
    peer. And anywhere: a way of ours that failed, and one of others that is wrong."""
    lines = [
        f"{row['model']}, batch {row['batch']}, context {row['context']}, {row['way']}: "
        f"{row['failed']}"
        for row in rows
        if broken(row, PEERS)
    ]
    if not flags.device.startswith("cuda"):
        return lines
    weakest: tuple[float, str] | None = None
    for at in dict.fromkeys((row["model"], row["batch"], row["context"]) for row in rows):
        here = [row for row in rows if (row["model"], row["batch"], row["context"]) == at]
        mine, others = (
            [row for row in here if row["way"] in ways and "wall ms" in row]
            for ways in (OURS, PEERS)
        )
        if not mine:
            continue
        model, where = at[0], f"{at[0]}, batch {at[1]}, context {at[2]}"
        best = min(mine, key=lambda row: row["wall ms"])
        least, most = min(row["device ms"] for row in mine), AT_MOST.get(model)
        if most is not None and at[1:] == (1, 512) and least > most:
            goal = 1 if model == "1B" else 2
            lines.append(f"goal {goal}: {where}: {least:.3f} ms, and at most {most} is asked")
        if others:
            peer = min(others, key=lambda row: row["wall ms"])
            ahead = peer["wall ms"] / best["wall ms"]
            line = (
                f"{where}: {best['way']} is {ahead:.2f} times as fast as {peer['way']}, and at "
                f"{best['share']:.0%} of the bound"
            )
            weakest = min(filter(None, (weakest, (ahead, line))))
            if ahead < AHEAD and best["share"] < OF_BOUND:
                lines.append(f"goal 3: {line}; {AHEAD} or {OF_BOUND:.0%} is asked")
    return [*lines, *([f"the weakest point: {weakest[1]}"] if weakest and lines else [])]


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
