"""What tracing a Llama costs, on a laptop, as it grows deeper: python -m benchmarks trace

As written, and with its layer marked `fg.block`. A row is the median over several traces in one
warm process; `trace` ends with the donation settled, `split` with the pieces shared. Tensors are
abstract, so widths do not matter. `user s` is this process's own time on a core, for machines that
others load too. Marked and unmarked graphs are compared, node for node, in the same run.
"""

from __future__ import annotations

import argparse
import gc
import resource
import time
from collections.abc import Iterator
from statistics import median
from typing import Any
from unittest import mock

from torch import fx

import fngraph as fg
from benchmarks.harness import Benchmark, count, kept, over, show
from fngraph.models.families import decoder, llama

AT_MOST = {("as written", 24): 5, ("as written", 80): 16, ("marked", 24): 2.5, ("marked", 80): 5}
LIMITS = fg.Limits(max_tokens=8192, max_reqs=256, B=16)


def abstract(layers: int) -> tuple[Any, Any]:
    """Weights and cache of a narrow Llama, as shapes and dtypes."""
    config = llama.Config(
        vocab_size=256, num_layers=layers, num_heads=4, num_kv_heads=2, head_dim=16, dim=64,
        mlp_dim=128,
    )  # fmt: skip
    return fg.like(llama.init_params(config)), fg.like(llama.init_cache(config, num_blocks=4))


def seconds() -> tuple[float, float]:
    """By the clock, and of this process's own."""
    return time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_utime


def traced(layers: int, repeats: int) -> tuple[dict[str, Any], list[Any]]:
    """Medians over `repeats` traces after a first one; and the graph, a tuple a node."""
    params, cache = abstract(layers)
    fast = fg.graphify(llama.forward, donate="cache", stage="batch")
    times = []
    for _ in range(1 + repeats):
        gc.collect()
        began, began_user = seconds()
        trace = fast.trace(params, cache, limits=LIMITS)
        between, _ = seconds()
        split = trace.split()
        ended, ended_user = seconds()
        times.append((ended - began, between - began, ended - between, ended_user - began_user))
    total, tracing, splitting, user = map(median, zip(*times[1:]))
    nodes = {node: i for i, node in enumerate(trace.graph.gm.graph.nodes)}
    row = {
        "layers": layers, "s": total, "trace s": tracing, "split s": splitting, "user s": user,
        "nodes": len(nodes), "pieces": len(split.program.instructions),
        "distinct pieces": split.program.kinds, "assumptions": len(trace.graph.assumptions),
    }  # fmt: skip
    return row, [(n.op, n.target, fx.map_arg((n.args, n.kwargs), nodes.get)) for n in nodes]


def both_ways(depths: list[int], repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each depth as written, then for each marked; and what a further layer took."""
    marked: Any = decoder.decoder_layer
    ways = {"as written": marked.__wrapped__, "marked": marked}
    graphs: dict[int, list[Any]] = {}
    for layer, function in ways.items():
        last: dict[str, Any] | None = None
        for layers in depths:
            with mock.patch.object(decoder, "decoder_layer", function):
                row, graph = traced(layers, repeats)
            if graph != graphs.setdefault(layers, graph):
                raise SystemExit(f"{layers} layers: the marked graph is not the one as written")
            grown = (row["s"] - last["s"]) / (layers - last["layers"]) if last else None
            most = AT_MOST.get((layer, layers))
            yield {"layer": layer, **row, "s a further layer": grown, "at most": most}
            last = row


def growth(rows: list[dict[str, Any]], layer: str) -> str:
    """How the time of a layer changes with depth."""
    _, *grown = (r["s a further layer"] for r in rows if r["layer"] == layer)
    first, last = grown[0], grown[-1]
    return f"{layer}: {last * 1e3:.0f} ms a layer at the end, {last / first:.2f} of the beginning's"


@Benchmark(
    {"--repeats": count(5), "--layers": count([1, 8, 24, 80])},
    quick={"repeats": 1, "layers": [1, 2, 4]}, missed=lambda rows, _: over(rows, "s", "at most"),
)  # fmt: skip
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each depth as written, then marked."""
    if not flags.quick:
        traced(2, 1)  # torch's imports and caches
    rows = kept(flags, both_ways(flags.layers, flags.repeats))
    show(rows, f"medians of {flags.repeats}")
    if len(flags.layers) > 1:
        print("", *(growth(rows, layer) for layer in ("as written", "marked")), sep="\n")
    return rows
