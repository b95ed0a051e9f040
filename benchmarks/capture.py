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
from pathlib import Path
from typing import Any

import torch

import fngraph as fg
from benchmarks.host import shape
from benchmarks.record import write
from benchmarks.steps import BACKEND_HELP, BLOCK_SIZE, CONTEXT, attention_of
from fngraph.models.families import llama

MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "FULL_DECODE_ONLY")
AT_MOST = {("FULL", 51): (1.5, 300), ("FULL_AND_PIECEWISE", 51): (2.5, 600)}  # seconds, MB
MB = 1e6


def ladder(count: int, top: int) -> tuple[int, ...]:
    """That many sizes up to `top`: the default ones, some of them, or more between them."""
    default = fg.core.default_sizes(fg.Limits(max_tokens=top, max_reqs=top), top=top)
    if count <= len(default):
        picked = (round(i * (len(default) - 1) / (count - 1)) for i in range(count))
        return tuple(default[i] for i in picked)
    more = [n for n in range(1, top) if n not in default]
    step = len(more) / (count - len(default))
    added = [more[int(i * step)] for i in range(count - len(default))]
    return tuple(sorted((*default, *added)))


def free() -> int:
    """Bytes that the device has left; 0 on the tape."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def measure(
    device: str, backend: str | None, layers: int, dim: int, top: int, counts: list[int],
    modes: list[str],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """A row for each mode, number of sizes and pass."""
    config = shape(layers, dim)
    params = llama.init_params(config, device=device, dtype=torch.bfloat16)
    cache = llama.init_cache(
        config, 64 * CONTEXT // BLOCK_SIZE, block_size=BLOCK_SIZE, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    limits = fg.Limits(max_tokens=top, max_reqs=top, B=CONTEXT // BLOCK_SIZE)
    for mode in modes:
        for count in counts:
            fast = fg.graphify(
                llama.forward, modes=mode, donate="cache", stage="batch", sizes=ladder(count, top),
                backends={"attention": backend},
            )  # fmt: skip
            step = fast.bind(params).capture(cache, limits, lazy=True, progress=False)
            for which in ("first", "second"):
                row = {"attention": attention_of(step), "mode": mode, "sizes": count, "pass": which}
                found = row | capture(step)
                print(f"{mode}, {count} sizes, {which}: {found['s']:.2f} s", flush=True)
                yield found
                step.release()
            step.sleep()
            del step


def capture(step: Any) -> dict[str, Any]:
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


def main(argv: list[str]) -> int:
    """Print the rows; 1 where a second pass takes more than is asked for the full shape."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks capture", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help=BACKEND_HELP)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--top", type=int, default=512, help="the largest size")
    parser.add_argument("--sizes", type=int, nargs="+", default=[10, 51, 102])
    parser.add_argument("--modes", nargs="+", default=list(MODES))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    sizes = args.layers, args.dim, args.top
    with torch.no_grad():
        rows = list(measure(args.device, args.backend, *sizes, args.sizes, args.modes))
    cells = [[f"{v:.2f}" if isinstance(v, float) else v for v in row.values()] for row in rows]
    print(fg.core.text.table(list(rows[0]), cells))
    if args.json:
        write(args.json, rows)
    over = []
    for row in rows:
        seconds, megabytes = AT_MOST.get((row["mode"], row["sizes"]), (float("inf"),) * 2)
        if row["pass"] == "second" and (row["s"] > seconds or row["MB"] > megabytes):
            over.append(f"{row['mode']}, {row['sizes']} sizes: at most {seconds} s, {megabytes} MB")
    if over and (args.layers, args.dim) == (16, 2048):
        print(*over, sep="\n")
        return 1
    return 0
