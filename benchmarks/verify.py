"""What verified steps cost: python -m benchmarks verify

Decode steps of a Llama of random weights, each request with `--context` tokens in the cache: with
no step verified and with a share of them, in turns of as many steps, so that clocks and neighbours
are the same for both. `verified ms` is one verified step alone, as its caller has it: until the
call is back and the device has done the step, with its copies; `compared ms` is until bare
`forward` has run beside and is compared. `cost %` is measured over all steps; `told %` is what the
caller's copies alone would come to, `told % at most` if all of the comparison kept steps waiting.
`copied MB` is what a verified step copies of the cache, three times.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.device import wait
from benchmarks.harness import (
    BACKEND,
    DEVICE,
    Benchmark,
    count,
    factor,
    kept,
    over,
    show,
    some_of,
)  # fmt: skip
from benchmarks.steps import median_ms
from benchmarks.workload import (
    BF16,
    BLOCK_SIZE,
    SHAPES,
    batch_of,
    random_params,
    to_device,
)
from fngraph.models.families import llama


@Benchmark(
    DEVICE
    | BACKEND
    | {
        "--models": some_of(tuple(SHAPES), ["1B", "8B"]),
        "--batch": count([1, 32, 64], "requests of a step"),
        "--context": count(512, "tokens of each request", multiple_of=BLOCK_SIZE),
        "--share": factor(1e-3, "of the steps that are verified"),
        "--steps": count(1000, "of each turn: one of them is verified"),
        "--turns": count(15, "of each of the two, of which the median counts"),
        "--most": factor(1.0, "percent of throughput that it may cost"),
    },
    quick={"models": ["tiny"], "batch": [4], "context": 32, "share": 1e-2, "steps": 200,
           "turns": 1, "most": 1000.0},
    missed=lambda rows, flags: over(rows, "cost %", "at most %"),
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a model and batch."""
    rows = kept(flags, rows_of(flags))
    show(rows)
    return rows


def rows_of(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each model and batch."""
    for model in flags.models:
        dtype = BF16 if flags.device.startswith("cuda") else torch.float32
        params = random_params(SHAPES[model], flags.device, dtype, even=True)
        for reqs in flags.batch:
            yield _row(flags, model, params, reqs, dtype)
        del params


def _row(
    flags: argparse.Namespace, model: str, params: Any, reqs: int, dtype: torch.dtype
) -> dict[str, Any]:
    blocks = flags.context // BLOCK_SIZE
    cache = llama.init_cache(
        params.config, reqs * blocks, block_size=BLOCK_SIZE, device=flags.device, dtype=dtype
    )
    for k, v in cache:
        k.normal_(), v.normal_()
    batch = to_device(batch_of(reqs, 1, flags.context), flags.device)
    limits = fg.Limits(max_tokens=reqs, max_reqs=reqs, B=blocks)
    backends = None if flags.backend is None else {"attention": flags.backend}
    fast = fg.graphify(
        llama.forward, donate="cache", stage="batch", modes="FULL", sizes=(reqs,),
        backends=backends, outputs="borrow",
    )  # fmt: skip
    stage = fast.trace(params, cache, limits=limits).split().lower().compile()
    steps = {name: stage.capture(params, cache, verify=share)
             for name, share in (("plain", 0.0), ("some", flags.share), ("all", 1.0))}  # fmt: skip
    plain_ms = median_ms(lambda: steps["plain"](cache, batch), 20, warm_up=5)
    verified_ms, compared_ms = _verified_ms(steps["all"], cache, batch, flags)
    took: dict[str, list[float]] = {"plain": [], "some": []}
    for _ in range(flags.turns):
        for name, found in took.items():
            found.append(_turn(steps[name], cache, batch, flags))
    plain, some = (median(took[name]) for name in ("plain", "some"))
    stats = steps["some"].stats + steps["all"].stats
    nbytes = sum(x.numel() * x.itemsize for kv in cache for x in kv)  # all blocks are the batch's
    return {
        "model": model, "batch": reqs, "context": flags.context, "share": flags.share,
        "plain ms": plain * 1e3, "with verify ms": some * 1e3, "verified ms": verified_ms,
        "compared ms": compared_ms,
        "cost %": max((some / plain - 1) * 100, 0.0),
        "told %": flags.share * (verified_ms - plain_ms) / plain_ms * 100,
        "told % at most": flags.share * (compared_ms - plain_ms) / plain_ms * 100,
        "at most %": flags.most, "verified": stats.verified, "differences": stats.differences,
        "copied MB": nbytes / 1e6,
    }  # fmt: skip


def _verified_ms(
    step: Any, cache: Any, batch: Any, flags: argparse.Namespace
) -> tuple[float, float]:
    """Of a step that is verified: until its caller has it, and until it is compared."""
    here = torch.cuda.current_stream() if flags.device.startswith("cuda") else None
    times = []
    for _ in range(25):
        wait(flags.device)
        began = time.perf_counter()
        step(cache, batch)
        if here is not None:
            here.synchronize()
        back = time.perf_counter()
        assert step.stats.verified  # waits
        times.append((back - began, time.perf_counter() - began))
    back_s, compared_s = zip(*times[5:])
    return median(back_s) * 1e3, median(compared_s) * 1e3


def _turn(step: Any, cache: Any, batch: Any, flags: argparse.Namespace) -> float:
    """Seconds a step, over many of them, the last one's device work and all comparisons done."""
    began = time.perf_counter()
    for _ in range(flags.steps):
        step(cache, batch)
    assert step.stats.steps  # waits
    wait(flags.device)
    return (time.perf_counter() - began) / flags.steps
