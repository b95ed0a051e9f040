"""A decode step of a Llama at each level of compilation in each mode: python -m benchmarks compile

Llama-3.2-1B's shape with random weights (--layers, --dim, --vocab for others, or --models), beside
a plain step over a static cache under `torch.compile` that is captured by hand. Each call is handed
a batch that lies on the device, and leaves its logits in memory of its own: by hand it is two
copies and a replay. `ms` is wall time of one call with its device work finished, `in a row ms` of
one of ten without a wait in between; `replay ms` is that of the captured graph alone, which reads
the same tokens each time. `padding ms` is device time of a key over a batch of padding, whose
attention has nothing to read. Where there is no GPU it is the tape that replays, and nothing is
captured by hand.

Levels: "fused" is "none" with all passes. "once" and "stock" of a Llama are "pieces", since
attention runs by a backend; the row says what it ran as. Compiled code is kept where FNGRAPH_CACHE
says: an empty folder shows what a first start takes, a second run what a second one does.

A way is a level in a mode, or one by hand. After --seconds no way is begun, and its row says so.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.harness import (
    BACKEND,
    DEVICE,
    ENDS,
    LATE,
    Benchmark,
    Row,
    count,
    ends_of,
    kept,
    show,
    some_of,
)  # fmt: skip
from benchmarks.steps import median_ms
from benchmarks.workload import (
    BF16,
    BLOCKS,
    CONTEXT,
    QUICK,
    SHAPE,
    SHAPES,
    attention_of,
    batch_of,
    new_cache,
    nodes_of,
    random_params,
    shape,
    to_device,
)  # fmt: skip
from fngraph.models.families import llama

LEVELS = ("none", "fused", "pieces", "once", "stock")
MODES = ("FULL", "PIECEWISE", "NONE")
HANDS = ("default", "max-autotune-no-cudagraphs", "none")  # torch.compile's modes
BY_HAND = "captured by hand"  # in place of a mode
MB = 1e6
IN_A_ROW = 10  # calls
AHEAD, MOST_NODES = 1.1, 200  # of the best by hand, at every point; of a FULL key of the 1B


def timed(call: Callable[[], Any], repeats: int) -> Row:
    """Its clocks, ms."""

    def in_a_row() -> None:
        for _ in range(IN_A_ROW):
            call()

    row = median_ms(in_a_row, repeats) / IN_A_ROW
    return {"ms": median_ms(call, repeats), "in a row ms": row}


def stepped(
    flags: argparse.Namespace, params: Any, level: str, mode: str
) -> Iterator[dict[str, Any]]:
    """A row for each batch of a step under one level and mode."""
    cache = new_cache(params.config, flags.device)
    limits = fg.Limits(max_tokens=64, max_reqs=64, B=BLOCKS)
    fast = fg.graphify(
        llama.forward, modes=mode, compile="none" if level == "fused" else level, donate="cache",
        stage="batch", sizes=tuple(flags.batch), backends={"attention": flags.backend},
        passes="all" if level == "fused" else None,
        compile_sizes=tuple(flags.batch) if level == "pieces" else (),
    )  # fmt: skip
    began = time.perf_counter()
    compiled = fast.trace(params, cache, limits=limits).split().lower().compile()
    ready = time.perf_counter()
    step = compiled.capture(params, cache, outputs="borrow")
    captured = time.perf_counter()
    for num_reqs in flags.batch:
        batch = to_device(batch_of(num_reqs, 1), flags.device)
        ran = step.dispatch(batch.spec)
        row = {
            "level": level, "ran as": compiled.level, "mode": mode, "batch": num_reqs,
            "attention": attention_of(step),
            **timed(lambda: step(cache, batch), flags.repeats),  # noqa: B023
        }  # fmt: skip
        if ran.mode is not fg.Mode.NONE:
            replay = step[ran.descriptor]
            memory = next(r for r in step.memory.rows if r.key == ran.descriptor)
            row["padding ms"] = step.times(ran.descriptor, flags.repeats).total / 1e3
            row |= nodes_of(replay) | {
                "estimated MB": memory.estimated.pool / MB,
                "measured MB": memory.measured.pool / MB if memory.measured else None,
            }
        stats = step.stats
        yield row | {
            "trace and compile s": ready - began, "capture s": captured - ready,
            "compiled": stats.compiled, "loaded": len(stats.compiles) - stats.compiled,
            "kernels": sum(made.kernels for made in stats.compiles),
        }  # fmt: skip
    step.sleep()


def by_hand(flags: argparse.Namespace, params: Any, name: Row, how: str) -> Iterator[Row]:
    """The row, by this name, of the plain step, under `torch.compile` in a mode of its, or as it
    is ("none")."""
    num_reqs = name["batch"]
    cache = plain.static_cache(params.config, num_reqs, CONTEXT, flags.device, BF16)
    weights = plain.weights_of(params)
    batch = to_device(batch_of(num_reqs, 1), flags.device)
    fn: Callable[..., Any] = plain.step
    if how != "none":
        torch.compiler.reset()
        fn = torch.compile(plain.step, mode=how, fullgraph=True, dynamic=False)
    token_ids, positions = batch.token_ids.clone(), batch.positions.clone()
    call = lambda: fn(params.config, weights, cache, token_ids, positions)  # noqa: E731
    began = time.perf_counter()
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    ready = time.perf_counter()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def step() -> None:
        token_ids.copy_(batch.token_ids)
        positions.copy_(batch.positions)
        graph.replay()

    row = name | timed(step, flags.repeats)
    row["replay ms"] = median_ms(graph.replay, flags.repeats)
    yield row | {"trace and compile s": ready - began}


def ways_of(
    flags: argparse.Namespace, params: Any
) -> Iterator[tuple[Row, Callable[[], Iterable[Row]]]]:
    """What each way is called in its rows, and what makes them."""
    for level, mode in itertools.product(flags.levels, flags.modes):
        name = {"level": level, "mode": mode}
        yield name, functools.partial(stepped, flags, params, level, mode)
    hands = flags.by_hand if flags.device.startswith("cuda") else ()
    for how, num_reqs in itertools.product(hands, flags.batch):
        level = "as it is" if how == "none" else f"torch.compile, {how}"
        name = {"level": level, "mode": BY_HAND, "batch": num_reqs}
        yield name, functools.partial(by_hand, flags, params, name, how)


def rows_of(flags: argparse.Namespace) -> Iterator[Row]:
    """Of each model: one a level, mode and batch, and one each of what is captured by hand."""
    models = {name: SHAPES[name] for name in flags.models}
    ends = ends_of(flags)
    for model, config in (models or {f"{flags.layers} x {flags.dim}": shape(flags)}).items():
        params = fg.ops.lay_side_by_side(random_params(config, flags.device, BF16))
        for name, make in ways_of(flags, params):
            late = time.monotonic() > ends
            for row in [name | {"failed": LATE}] if late else make():
                yield {"model": model, **row}
        del params, make
        gc.collect()  # graphs and weights of one model before those of the next


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """Where FULL at its best is not so far ahead of the best by hand; and keys of many nodes."""
    lines = []
    there = [row for row in rows if "ms" in row]
    for model, num_reqs in dict.fromkeys((row["model"], row["batch"]) for row in there):
        here = [row for row in there if (row["model"], row["batch"]) == (model, num_reqs)]
        full = [row for row in here if row["mode"] == "FULL"]
        hands = [row["ms"] for row in here if row["mode"] == BY_HAND]
        if full and hands:
            best = min(full, key=lambda row: row["ms"])
            ahead, nodes = min(hands) / best["ms"], best.get("nodes")
            where = f"{model}, batch {num_reqs}, {best['level']}"
            if ahead < AHEAD:
                lines.append(
                    f"{where}: {ahead:.2f} times as fast as the best by hand, {AHEAD} is asked"
                )
            if model == "1B" and nodes is not None and nodes > MOST_NODES:
                lines.append(f"{where}: {nodes} nodes, and at most {MOST_NODES} are asked")
    return lines


@Benchmark(
    {
        **DEVICE, **BACKEND, **SHAPE,
        "--models": some_of(list(SHAPES), ()) | {"help": "in place of --layers, --dim, --vocab"},
        "--repeats": count(50), "--batch": count([1]),
        "--levels": some_of(LEVELS, LEVELS[:4]), "--modes": some_of(MODES),
        "--by-hand": some_of(HANDS, HANDS[:1]),
        **ENDS,
    },
    quick=QUICK | {"repeats": 1, "levels": ["none", "pieces"]}, missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of each model."""
    logging.basicConfig(format="%(message)s")
    logging.getLogger("fngraph").setLevel(logging.INFO)
    rows = kept(flags, _told(rows_of(flags)))
    show(rows)
    return rows


def _told(rows: Iterable[Row]) -> Iterator[Row]:
    """Each in a line as it comes."""
    for row in rows:
        shown = ("model", "level", "mode", "batch", "ms", "failed")
        print({k: row[k] for k in shown if k in row}, flush=True)
        yield row
