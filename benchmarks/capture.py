"""What capturing costs as keys grow in number, in time and memory: python -m benchmarks capture

A 1B Llama of random weights (--layers and --dim make it smaller), for 10, 51 (the default) and 102
capture sizes and each mode. `first` is a capture as it comes, `second` the same after all keys were
released, pool and all: its kernels are warm. Memory is the difference of `mem_get_info`, static
buffers and outputs apart; on the tape it is the arena and what graphs of as many nodes would take.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import BACKEND, DEVICE, Benchmark, Mistake, count, kept, show, some_of
from benchmarks.workload import BF16, BLOCKS, QUICK, SHAPE, attention_of, new_cache, shape
from fngraph.models.families import llama

GRAPHS = ["FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY"]
AT_MOST = {("FULL", 51): (1.5, 300), ("FULL_AND_PIECEWISE", 51): (2.5, 600)}  # seconds, MB
MB = 1e6


def ladder(most: int, top: int) -> tuple[int, ...]:
    """That many sizes up to `top`: the default ones, some of them, or more between them."""
    default = fg.core.default_sizes(fg.Limits(max_tokens=top, max_reqs=top), top=top)
    if most <= len(default):
        picked = (round(i * (len(default) - 1) / (most - 1)) for i in range(most))
        return tuple(default[i] for i in picked)
    more = [n for n in range(1, top) if n not in default]
    step = len(more) / (most - len(default))
    added = [more[int(i * step)] for i in range(most - len(default))]
    return tuple(sorted((*default, *added)))


def free() -> int:
    """Bytes that the device has left; 0 on the tape."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def captured(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each mode, number of sizes and pass."""
    config, top = shape(flags), flags.top
    params = llama.init_params(config, device=flags.device, dtype=BF16)
    cache = new_cache(config, flags.device)
    limits = fg.Limits(max_tokens=top, max_reqs=top, B=BLOCKS)
    for mode in flags.modes:
        for sizes in flags.sizes:
            fast = fg.graphify(
                llama.forward, modes=mode, donate="cache", stage="batch", sizes=ladder(sizes, top),
                backends={"attention": flags.backend},
            )  # fmt: skip
            step = fast.bind(params).capture(cache, limits, lazy=True, progress=False)
            for which in ("first", "second"):
                row = {"attention": attention_of(step), "mode": mode, "sizes": sizes, "pass": which}
                found = row | cost(step)
                print(f"{mode}, {sizes} sizes, {which}: {found['s']:.2f} s", flush=True)
                yield found
                step.release()
            step.sleep()
            del step


def cost(step: Any) -> dict[str, Any]:
    """Time and memory of all keys."""
    before = free()
    began = time.perf_counter()
    step.capture_all()
    if before:
        torch.cuda.synchronize()
    took = time.perf_counter() - began
    taken = before - free() if before else sum(step.recorder.usage())
    table, estimated = step.memory, [row.estimated for row in step.memory.rows]
    return {
        "keys": len(step),
        "graphs": sum(len(replay.graphs) for replay in step.replays.values()),
        "nodes": sum(replay.counts.nodes for replay in step.replays.values()),
        "s": took,
        "MB": taken / MB,
        "pool MB": table.pool / MB,
        "graph MB": (table.total - table.pool) / MB,
        "estimated pool MB": max(item.pool for item in estimated) / MB,
        "estimated graph MB": sum(item.graph for item in estimated) / MB,
        "estimated MB": table.estimated / MB,
    }


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """A second pass of the full shape within seconds and MB."""
    over = []
    for row in rows if shape(flags) == shape() else ():
        seconds, megabytes = AT_MOST.get((row["mode"], row["sizes"]), (float("inf"),) * 2)
        if row["pass"] == "second" and (row["s"] > seconds or row["MB"] > megabytes):
            over.append(f"{row['mode']}, {row['sizes']} sizes: at most {seconds} s, {megabytes} MB")
    return over


FLAGS = {
    "--top": count(512, "the largest size", least=2),
    "--sizes": count([10, 51, 102], "how many", least=2),
    "--modes": some_of(GRAPHS),
}


@Benchmark(
    DEVICE | BACKEND | SHAPE | FLAGS, missed=missed,
    quick={**QUICK, "top": 16, "sizes": [3], "modes": GRAPHS[:2]},
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of `captured`."""
    if max(flags.sizes) > flags.top:
        raise Mistake(f"--sizes {max(flags.sizes)}: there are no more than --top {flags.top}")
    rows = kept(flags, captured(flags))
    show(rows)
    return rows
