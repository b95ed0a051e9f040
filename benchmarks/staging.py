"""Ways of bringing a batch to the device, in device time a step: python -m benchmarks staging

    slot        the graph's first node reads the batch out of a pinned slot, over the bus
    copied      a captured copy of the pinned slot to the device, then the node reads it there
    ahead       the same copy outside of the graph, on a side stream while the step before runs;
                in the graph the node alone, and the host pays for a copy and two events
    on device   the batch is on the device already

The Llama batch, decode, 512 blocks a request. Host time is that of launching, hot; the copy of
`ahead` included.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.device import in_graph, once_ms
from benchmarks.harness import Benchmark, kept, show
from benchmarks.workload import COUNTS
from fngraph.models.families import llama

BLOCKS, REPEATS = 512, 50


def captured(fn: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """`fn` in a graph, warm."""
    fn()
    torch.cuda.synchronize()
    return in_graph(fn)


def timed(launch: Callable[[], Any]) -> tuple[float, float]:
    """Device and host us of one launch: medians over runs of REPEATS in a row."""
    device, host = [], []

    def launches() -> None:
        began = time.perf_counter_ns()
        for _ in range(REPEATS):
            launch()
        host.append((time.perf_counter_ns() - began) / REPEATS / 1e3)

    for _ in range(7):
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # the host gets ahead
        device.append(once_ms(launches) / REPEATS * 1e3)
    return median(device), median(host)


def forward(x: torch.Tensor, batch: llama.Batch) -> torch.Tensor:
    """Next to nothing, over the staged leaves."""
    return x[batch.logits_indices]


def ways(num_reqs: int) -> list[dict[str, Any]]:
    """A row for each way, for a decode batch of so many requests."""
    x, spec = torch.zeros(512, device="cuda"), fg.BatchSpec(num_reqs, num_reqs, query_len=1)
    fast = fg.graphify(forward, modes="FULL", stage="batch", sizes=(num_reqs,))
    limits = fg.Limits(max_tokens=num_reqs, max_reqs=num_reqs, B=BLOCKS)
    step = fast.bind(x).capture(limits, progress=False)
    step(step.host_batch(spec))
    keys = step.main
    words, ring = keys.prepared[spec[COUNTS]].words, keys.ring
    node = next(iter(keys.replays.values())).unpack
    there = [torch.zeros_like(x) for x in keys.static.tensors]
    nbytes = sum(x.nbytes for x in there)
    pinned = torch.zeros(nbytes, dtype=torch.uint8).pin_memory()
    arena, side = torch.zeros(nbytes, dtype=torch.uint8, device="cuda"), torch.cuda.Stream()
    done, read = torch.cuda.Event(), torch.cuda.Event()

    def fill(leaves: list[torch.Tensor]) -> None:
        for _ in range(len(ring.words)):  # every slot, so that any replay finds it
            ring.put(words, leaves)
            node()
        torch.cuda.synchronize()

    def both() -> None:
        arena.copy_(pinned, non_blocking=True)
        node()

    def ahead() -> None:
        with torch.cuda.stream(side):
            side.wait_event(read)
            arena.copy_(pinned, non_blocking=True)
            done.record()
        done.wait()
        alone.replay()
        read.record()

    fill([x.cpu() for x in there])
    alone, copied = captured(node), captured(both)
    rows = {"slot": timed(alone.replay)}
    fill(there)
    rows |= {
        "copied": timed(copied.replay),
        "ahead": timed(ahead),
        "on device": timed(alone.replay),
    }
    return [
        {"requests": num_reqs, "bytes": nbytes, "way": way, "device us": d, "host us": h}
        for way, (d, h) in rows.items()
    ]


@Benchmark(needs_cuda=True)
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of small and large batches."""
    sizes = (1,) if flags.quick else (1, 64, 256)
    rows = kept(flags, (row for num_reqs in sizes for row in ways(num_reqs)))
    show(rows)
    return rows
