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
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from torch import fx

import fngraph as fg
from benchmarks.record import write
from fngraph.models.families import decoder, llama

LAYERS = (1, 8, 24, 80)
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


def measure(layers: int, repeats: int) -> tuple[dict[str, Any], list[Any]]:
    """Medians over `repeats` traces after a first one; and the graph, a tuple a node."""
    params, cache = abstract(layers)
    fast = fg.graphify(llama.forward, donate="cache", stage="batch")
    times = []
    for _ in range(1 + repeats):
        gc.collect()
        began, began_user = seconds()
        traced = fast.trace(params, cache, limits=LIMITS)
        between, _ = seconds()
        split = traced.split()
        ended, ended_user = seconds()
        times.append((ended - began, between - began, ended - between, ended_user - began_user))
    total, trace, splitting, user = map(median, zip(*times[1:]))
    nodes = {node: i for i, node in enumerate(traced.graph.gm.graph.nodes)}
    row = {
        "layers": layers, "s": total, "trace s": trace, "split s": splitting, "user s": user,
        "nodes": len(nodes), "pieces": len(split.program.steps),
        "distinct pieces": split.program.kinds, "guards": len(traced.graph.guards),
    }  # fmt: skip
    return row, [(n.op, n.target, fx.map_arg((n.args, n.kwargs), nodes.get)) for n in nodes]


def both_ways(repeats: int) -> Iterator[dict[str, Any]]:
    """A row for each depth as written, then for each marked."""
    layer: Any = decoder.decoder_layer
    bare = mock.patch.object(decoder, "decoder_layer", layer.__wrapped__)
    graphs = {}
    for layers in LAYERS:
        with bare:
            row, graphs[layers] = measure(layers, repeats)
        yield {"layer": "as written"} | row
    for layers in LAYERS:
        row, graph = measure(layers, repeats)
        if graph != graphs[layers]:
            raise SystemExit(f"{layers} layers: the marked graph is not the one as written")
        yield {"layer": "marked"} | row


def with_growth(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with the seconds that one further layer took since the row above."""
    found = []
    for last, row in zip([None, *rows], rows):
        if last is None or last["layer"] != row["layer"]:
            grown = None
        else:
            grown = (row["s"] - last["s"]) / (row["layers"] - last["layers"])
        most = AT_MOST.get((row["layer"], row["layers"]))
        found.append(row | {"s a further layer": grown, "at most": most})
    return found


def growth(rows: list[dict[str, Any]], layer: str) -> str:
    """How the time of a layer changes with depth."""
    first, *_, last = (
        r["s a further layer"] for r in rows if r["layer"] == layer and r["layers"] > 1
    )
    return f"{layer}: {last * 1e3:.0f} ms a layer at the end, {last / first:.2f} of the beginning's"


def main(argv: list[str]) -> int:
    """Prints the table; 1 where a median is above what is asked."""
    p = argparse.ArgumentParser(prog="python -m benchmarks trace", description=__doc__)
    p.add_argument("--repeats", type=int, default=5)
    p.add_argument("--json", type=Path, help="keep the figures here")
    flags = p.parse_args(argv)
    measure(2, 1)  # torch's imports and caches
    rows = with_growth(list(both_ways(flags.repeats)))
    print(f"medians of {flags.repeats}\n")
    shown = [["" if v is None else f"{v:.3f}" if isinstance(v, float) else v for v in row.values()]
             for row in rows]  # fmt: skip
    print(fg.core.text.table(list(rows[0]), shown))
    lines = [growth(rows, layer) for layer in ("as written", "marked")]
    print("", *lines, sep="\n")
    if flags.json:
        write(flags.json, rows)
    return int(any(row["at most"] is not None and row["s"] > row["at most"] for row in rows))
