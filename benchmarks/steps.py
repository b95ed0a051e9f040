"""A step of the byte-level model in every mode, beside bare `forward`: python -m benchmarks steps

Wall time of one call with its device work finished. Logits are compared in the same run.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import DEVICE, MODES, Benchmark, count, kept, show, some_of
from benchmarks.workload import BLOCK_SIZE, BLOCKS, attention_of, batch_of, to_device
from fngraph.models.families import llama
from fngraph.models.weights.checkpoint import load_checkpoint


def median_ms(fn: Callable[[], Any], repeats: int, *, warm_up: int = 5) -> float:
    """Median wall time of `fn` with everything that it launched finished, in ms."""
    times = []
    for i in range(warm_up + repeats):
        began = time.perf_counter()
        fn()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= warm_up:
            times.append(time.perf_counter() - began)
    return median(times) * 1e3


@Benchmark(
    DEVICE | {"--repeats": count(200), "--modes": some_of(MODES)},
    quick={"repeats": 2, "modes": ["NONE", "FULL"]},
)
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """One row a mode and batch: what it ran as, ms, ms of bare forward, largest difference."""
    rows = kept(flags, rows_of(flags))
    show(rows)
    return rows


def rows_of(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Of each mode and batch."""
    device, repeats = flags.device, flags.repeats
    _, params = load_checkpoint(device=device)
    limits = fg.Limits(max_tokens=128, max_reqs=8, B=BLOCKS)
    for modes in flags.modes:
        cache = llama.init_cache(params.config, 64, block_size=BLOCK_SIZE, device=device)
        fast = fg.graphify(
            llama.forward, modes=modes, donate="cache", stage="batch", sizes=(1, 2, 4, 8, 64, 128)
        )
        began = time.perf_counter()
        step = fast.bind(params).capture(cache, limits, progress=False)
        capture_s = time.perf_counter() - began
        for num_reqs, new in ((1, 1), (8, 1), (7, 1), (8, 16)):
            batch = to_device(batch_of(num_reqs, new), device)
            got, _ = step(cache, batch)
            plain = tuple((k.clone(), v.clone()) for k, v in cache)
            want, _ = llama.forward(params, plain, batch)
            yield {
                "modes": modes, "attention": attention_of(step), "batch": f"{num_reqs} x {new}",
                "ran as": str(step.dispatch(batch.spec).mode),
                "ms": median_ms(lambda: step(cache, batch), repeats),  # noqa: B023
                "bare forward ms": median_ms(
                    lambda: llama.forward(params, plain, batch), repeats  # noqa: B023
                ),
                "largest difference": float((got - want).abs().max()),
                "keys": len(step), "trace and capture s": capture_s,
            }  # fmt: skip
