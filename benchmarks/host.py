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
    num_blocks = 64 * CONTEXT // BLOCK_SIZE
    rows = []
    for num_reqs in (1, 64):
        cache = llama.init_cache(
            config, num_blocks, block_size=BLOCK_SIZE, device=device, dtype=torch.bfloat16
        )
        limits = fg.Limits(max_tokens=64, max_reqs=64, B=CONTEXT // BLOCK_SIZE)
        fast = fg.graphify(
            llama.forward, modes="FULL", donate="cache", stage="batch", sizes=(1, 64)
        )
        borrow = fast.bind(params).capture(cache, limits, outputs="borrow", progress=False)
        own = fast.bind(params).capture(cache, limits, outputs="own", progress=False)
        host = batch_of(num_reqs, 1, "cpu")
        spec, names = host.spec, list(fg.core.buffers_of(llama.Batch))
        moved = {name: getattr(host, name).to(device) for name in names}
        batch = dataclasses.replace(host, **moved)
        (replay,) = (r for (_, key), r in borrow.replays.items() if key.num_tokens == num_reqs)
        logits = borrow.outputs[0]

        def pinned(step: Any = borrow, like: Any = host, spec: Any = spec) -> Any:
            filled = step.host_batch(spec)
            for name in names:  # noqa: B023
                getattr(filled, name).copy_(getattr(like, name))
            return filled

        with torch.no_grad():
            want = own(cache, batch)[0]
            for name, b in (("host", host), ("pinned", pinned())):
                got = borrow(cache, b)[0]
                assert torch.equal(got, want), name
            ready = borrow.ready[spec[:7]]
            leaves = borrow.entry.leaves(batch)
            filled = borrow.host_batch(spec)
            calls: dict[str, Callable[[], Any]] = {
                "bare replay and a view": lambda: (replay.calls[0].replay(), logits[:num_reqs]),  # noqa: B023
                "step, pinned slot, borrowed": lambda: borrow(cache, borrow.host_batch(spec)),  # noqa: B023
                "step, device batch, borrowed": lambda: borrow(cache, batch),  # noqa: B023
                "step, device batch, owned": lambda: own(cache, batch),  # noqa: B023
                "step, host batch, borrowed": lambda: borrow(cache, host),  # noqa: B023
                "part: host_batch": lambda: borrow.host_batch(spec),  # noqa: B023
                "part: ambient": borrow.under_ambient,
                "part: addresses": borrow.binding.check,
                "part: dispatch": lambda: fg.dispatch(borrow.table, spec),  # noqa: B023
                "part: leaves": lambda: [x.shape for x in leaves] == ready.shapes,  # noqa: B023
            }
            if device == "cuda":
                calls["part: own"] = lambda: logits[:num_reqs].clone()  # noqa: B023
            for name, call in calls.items():
                for busy in (False, True):
                    if name.startswith("bare"):
                        borrow.ring.put(ready.words, leaves)  # a replay that is not a step's
                        borrow.ring.resume()
                    mid, high = times_us(call, repeats, busy)
                    if device == "cuda":
                        torch.cuda.synchronize()
                    borrow.ring.resume()
                    rows.append({"batch": num_reqs, "GPU": "busy" if busy else "idle",
                                 "call": name, "median us": mid, "p90 us": high})  # fmt: skip
        del filled
    return rows


def main(argv: list[str]) -> int:
    """Print the rows; `--json` keeps them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks host", description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(argv)
    rows = measure(args.device, args.layers, args.dim, args.repeats)
    cells = [
        [r["batch"], r["GPU"], r["call"], f"{r['median us']:.1f}", f"{r['p90 us']:.1f}"]
        for r in rows
    ]
    print(fg.core.text.table(["batch", "GPU", "call", "median us", "p90 us"], cells))
    if args.json:
        write(args.json, rows)
    return 0
