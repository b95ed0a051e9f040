"""What a step costs the host, part by part, beside bare `replay()`: python -m benchmarks host

Wall time of the Python call alone, the GPU idle or busy with other work, of the 1B Llama shape with
random weights (--layers and --dim make it smaller). Medians; checks are on.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch

import fngraph as fg
from benchmarks.record import write
from benchmarks.steps import BLOCK_SIZE, CONTEXT, batch_of
from models import llama


def shape(layers: int, dim: int) -> llama.Config:
    """Llama-3.2-1B's, or a smaller one of its kind."""
    return llama.Config(
        vocab_size=128256, num_layers=layers, num_heads=dim // 64, num_kv_heads=dim // 256,
        head_dim=64, dim=dim, mlp_dim=4 * dim, tied=True,
    )  # fmt: skip


def times_us(fn: Callable[[], Any], repeats: int, busy: bool) -> tuple[float, float]:
    """Median and 90th percentile of the call alone, in us."""
    found = []
    for _ in range(repeats + 20):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            if busy:
                torch.cuda._sleep(2_000_000)  # about 1 ms
        began = time.perf_counter_ns()
        fn()
        found.append(time.perf_counter_ns() - began)
    found = found[20:]
    return median(found) / 1e3, quantiles(found, n=10)[-1] / 1e3


def measure(device: str, layers: int, dim: int, repeats: int) -> list[dict[str, Any]]:
    """A row a way of calling, batch and state of the GPU."""
    config = shape(layers, dim)
    params = llama.init_params(config, device=device, dtype=torch.bfloat16)
    rows = []
    for num_reqs in (1, 64):
        for name, (call, ring) in ways(config, params, num_reqs, device).items():
            for busy in (False, True):
                mid, high = times_us(call, repeats, busy)
                ring.resume()  # a bare replay is no step, and a part of a step none either
                rows.append({"batch": num_reqs, "GPU": "busy" if busy else "idle",
                             "call": name, "median us": mid, "p90 us": high})  # fmt: skip
    return rows


def ways(
    config: llama.Config, params: llama.Params, num_reqs: int, device: str
) -> dict[str, tuple[Callable[[], Any], Any]]:
    """What is timed for a batch, by name, each with the ring that it takes from."""
    cache = llama.init_cache(
        config, 64 * CONTEXT // BLOCK_SIZE, block_size=BLOCK_SIZE, device=device,
        dtype=torch.bfloat16,
    )  # fmt: skip
    limits = fg.Limits(max_tokens=64, max_reqs=64, B=CONTEXT // BLOCK_SIZE)
    fast = fg.graphify(llama.forward, modes="FULL", donate="cache", stage="batch", sizes=(1, 64))
    borrow = fast.bind(params).capture(cache, limits, outputs="borrow", progress=False)
    own = fast.bind(params).capture(cache, limits, outputs="own", progress=False)
    host = batch_of(num_reqs, 1, "cpu")
    spec, names = host.spec, list(fg.core.buffers_of(llama.Batch))
    batch = dataclasses.replace(host, **{name: getattr(host, name).to(device) for name in names})
    pinned = borrow.host_batch(spec)
    for name in names:
        getattr(pinned, name).copy_(getattr(host, name))
    want = own(cache, batch)[0]
    for name, like in (("pinned", pinned), ("host", host)):
        assert torch.equal(borrow(cache, like)[0], want), name
    replay, logits = borrow[fg.dispatch(borrow.table, spec).descriptor], borrow.outputs[0]
    ready, leaves = borrow.ready[spec[:7]], borrow.entry.leaves(batch)
    calls: dict[str, Callable[[], Any]] = {
        "bare replay and a view": lambda: (replay.calls[0].replay(), logits[:num_reqs]),
        "step, pinned slot, borrowed": lambda: borrow(cache, borrow.host_batch(spec)),
        "step, device batch, borrowed": lambda: borrow(cache, batch),
        "step, device batch, owned": lambda: own(cache, batch),
        "step, host batch, borrowed": lambda: borrow(cache, host),
        "part: host_batch": lambda: borrow.host_batch(spec),
        "part: ambient": borrow.under_ambient,
        "part: addresses": borrow.binding.check,
        "part: dispatch": lambda: fg.dispatch(borrow.table, spec),
        "part: leaves": lambda: [x.shape for x in leaves] == ready.shapes,
        "part: own": lambda: logits[:num_reqs].clone(),
    }
    return {name: (call, own.ring if "owned" in name else borrow.ring)
            for name, call in calls.items()}  # fmt: skip


def main(argv: list[str]) -> int:
    """Print the rows; `--json` keeps them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    with torch.no_grad():
        rows = measure(args.device, args.layers, args.dim, args.repeats)
    cells = [
        [r["batch"], r["GPU"], r["call"], f"{r['median us']:.1f}", f"{r['p90 us']:.1f}"]
        for r in rows
    ]
    print(fg.core.text.table(["batch", "GPU", "call", "median us", "p90 us"], cells))
    if args.json:
        write(args.json, rows)
    return 0
