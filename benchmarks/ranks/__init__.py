"""Llama over processes, a GPU each: python -m benchmarks ranks --models 8B --tp 2

Parts: `step`, a decode step of a model split over `--tp`, in FULL with each sum over processes as
`torch.distributed`'s collective (`sums`), as one kernel with its norm (`fused`), of own rows
(`rows`) or compiled (`pieces`), and in PIECEWISE, beside the same in one process, and beside a step
by hand whose collectives are `torch.distributed`'s, captured in one graph as it is and under
torch.compile; `prefill`, a step of all `--tokens` of one request, of own rows also with products
that go at once with what gathers or sums them (`overlapped`); `agreement`, what asking the others
before each step costs the host; `stream`, tokens a second of a mixed stream that as many processes
share, each with a whole model, beside one; `memory`, the most that each has while it loads its part
of a folder.

Of each figure the slowest process's is shown. Weights are random, the same in all ways, and a way
is timed if its logits and what it keeps are those of one process. `bound ms` is what a process has
to read over the bandwidth of a copy. Where there is no GPU, processes are this machine's, over
gloo: the tape replays, a step by hand is called, and there is no device time.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
from pathlib import Path

import torch

import fngraph as fg
from benchmarks.device import copy_bandwidth, release
from benchmarks.harness import DEVICE, Benchmark, Mistake, count, show, some_of, write
from benchmarks.ranks.agreeing import agreement_rows
from benchmarks.ranks.loaded import memory_row, save
from benchmarks.ranks.sharing import Right, Task, part_of, rights
from benchmarks.ranks.started import in_processes
from benchmarks.ranks.stepping import Row, prefill_rows, said_of, step_rows
from benchmarks.ranks.streams import as_one, stream_row
from benchmarks.ranks.ways import HANDS, OURS, OVERLAPPED
from benchmarks.workload import SHAPES
from fngraph.models.families import llama

MODELS = SHAPES | {
    "70B": llama.Config(
        vocab_size=128256, num_layers=80, num_heads=64, num_kv_heads=8, head_dim=128, dim=8192,
        mlp_dim=28672,
    ),
}  # fmt: skip
FEWER = {"70B": 8}  # layers, where --layers says nothing: of all, one GPU has no room
PARTS = ("step", "prefill", "agreement", "stream", "memory")
MOST_MS, AHEAD, MOST_ASKING_US = 2.4, 1.15, 30.0  # 8B over two GPUs at batch 1; an exchange
OF_ONE, OF_PART = 1.85, 1.1  # tokens a second of two; the peak of loading


def config_of(name: str, flags: argparse.Namespace) -> llama.Config:
    """With as many layers as are asked for."""
    config = MODELS[name]
    layers = flags.layers or FEWER.get(name, config.num_layers)
    return dataclasses.replace(config, num_layers=min(layers, config.num_layers))


@torch.no_grad()
def ran(flags: argparse.Namespace, size: int, folder: str) -> dict[str, list[Row]]:
    """What one of `size` processes finds of each part. One alone leaves what is right."""
    device = "cuda" if flags.device.startswith("cuda") else "cpu"
    mesh = fg.make_mesh(device, tp=size)
    peak = copy_bandwidth() if device == "cuda" else None
    found: dict[str, list[Row]] = {part: [] for part in flags.parts}
    for name in flags.models:
        config = config_of(name, flags)
        said: Row = {"model": name, "layers": config.num_layers, "processes": size}
        where = Path(folder) / name
        if "memory" in flags.parts and size > 1:
            found["memory"].append(said | memory_row(where, mesh))
            release(mesh.device)
        task = Task(config, mesh, part_of(config, mesh), flags.context, flags.batch)
        if size == 1 and "memory" in flags.parts:
            save(where, task.params)
        if "step" in flags.parts:
            ways = [way for way in flags.ways if way != OVERLAPPED]
            right = kept_right(task, where.with_suffix(".pt"))
            rows = step_rows(task, ways, flags.repeats, right, peak)
            found["step"] += [said | row for row in rows]
        for tokens in flags.tokens if "prefill" in flags.parts else ():
            many = task._replace(context=tokens, batches=(1,), new=tokens)
            right = kept_right(many, where.with_suffix(f".{tokens}.pt"))
            rows = prefill_rows(many, flags.ways, flags.repeats, right[1])
            found["prefill"] += [said | row for row in rows]
            release(mesh.device)
        if "agreement" in flags.parts and size > 1:
            found["agreement"] += [said | row for row in agreement_rows(task, flags.repeats)]
        if "stream" in flags.parts:
            alone = fg.Mesh((fg.Axis("tp"),), mesh.device)
            task = task._replace(mesh=alone, params=part_of(config, alone))
            row = stream_row(task, flags.requests, mesh["tp"].rank, size, flags.quick)
            found["stream"].append(said | row)
        del task
        release(mesh.device)
    return found


def kept_right(task: Task, path: Path) -> dict[int, Right]:
    """What is right, which one process alone finds, and leaves for several."""
    if task.axis.size == 1:
        torch.save(rights(task), path)
    found: dict[int, Right] = torch.load(path, weights_only=False)
    return found


def slowest(by_rank: list[list[Row]]) -> list[Row]:
    """Rows of all processes as one: the largest figure of each, and what failed in any."""
    merged = []
    for rows in zip(*by_rank, strict=True):
        one: Row = {}
        for row in rows:
            for name, value in row.items():
                known = one.get(name)
                one[name] = max(known, value) if isinstance(known, float) else known or value
        merged.append(one)
    return merged


def together(by_rank: list[list[Row]], alone: dict[str, Row]) -> list[Row]:
    """Rows of the stream, of all processes as one.

    Args:
        alone: by model, the row of one process; it is added here.
    """
    merged = []
    for rows in zip(*by_rank, strict=True):
        model = rows[0]["model"]
        one = as_one(list(rows), alone.get(model))
        alone.setdefault(model, one)
        merged.append({name: value for name, value in one.items() if name != "texts"})
    return merged


def missed(found: dict[str, list[Row]], flags: argparse.Namespace) -> list[str]:
    """What is wrong; and what is asked of GPUs and not met."""
    lines = [
        f"{row['model']} over {row['processes']}, {said_of(row)}"
        for part in ("step", "prefill") for row in found.get(part, []) if "failed" in row
    ]  # fmt: skip
    if not flags.device.startswith("cuda"):
        return lines
    for row in found.get("stream", []):
        if row["processes"] == 2 and row["of one"] < OF_ONE:
            lines.append(
                f"{row['model']}: two serve {row['of one']:.2f} times as much as one, {OF_ONE} is "
                "asked"
            )
    for row in found.get("memory", []):
        if row["of part"] > OF_PART:
            lines.append(
                f"{row['model']} over {row['processes']}: loading takes {row['of part']:.2f} times "
                f"the part, and at most {OF_PART} is asked"
            )
    for row in found.get("agreement", []):
        if row["exchange us"] > MOST_ASKING_US:
            lines.append(
                f"{row['model']} over {row['processes']}: agreeing takes {row['exchange us']:.0f} "
                f"us of the host, and at most {MOST_ASKING_US:.0f} are asked"
            )
    at = [row for row in found.get("step", [])
          if row["model"] == "8B" and row.get("batch") == 1 and row.get("device ms")]  # fmt: skip
    split = [row for row in at if row["processes"] == 2 and row["way"] in OURS]
    if split and split[0]["layers"] == MODELS["8B"].num_layers:
        best = min(row["device ms"] for row in split)
        others = [row["device ms"] for row in at
                  if row["processes"] == 1 or row["way"] not in OURS]  # fmt: skip
        where = "8B over 2, batch 1"
        if best > MOST_MS:
            lines.append(f"{where}: {best:.2f} ms, and at most {MOST_MS} are asked")
        if min(others) / best < AHEAD:
            ahead = min(others) / best
            lines.append(f"{where}: {ahead:.2f} times as fast as the others, {AHEAD} is asked")
    return lines


@Benchmark(
    DEVICE | {
        "--models": some_of(list(MODELS), ["8B"]),
        "--layers": count(0, "of each model; 0: all, of the 70B 8", least=0),
        "--tp": count([2], "processes that share a model", least=2),
        "--batch": count([1, 64]),
        "--context": count(512, "tokens of each request", multiple_of=16),
        "--tokens": count([512, 2048, 8192], "of a prefill", multiple_of=16),
        "--ways": some_of((*OURS, OVERLAPPED, *HANDS)),
        "--parts": some_of(PARTS),
        "--requests": count(800, "of the stream", least=8),
        "--repeats": count(50),
    },
    quick={"models": ["tiny"], "batch": [1, 3], "context": 32, "repeats": 3, "requests": 8,
           "tokens": [32],
           "ways": ["FULL-sums", "FULL-fused", "FULL-rows", "FULL-overlapped", "PIECEWISE-fused",
                    "captured"]},
    missed=missed,
)  # fmt: skip
def measure(flags: argparse.Namespace) -> dict[str, list[Row]]:
    """Rows by part: one process, then those of each --tp."""
    gpus = torch.cuda.device_count()
    if flags.device.startswith("cuda") and gpus < max(flags.tp):
        raise Mistake(f"--tp {max(flags.tp)}: {gpus} GPU{'s' * (gpus != 1)} here")
    found: dict[str, list[Row]] = {part: [] for part in flags.parts}
    streams: dict[str, Row] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1, *dict.fromkeys(flags.tp)):
            print(f"processes: {size}", flush=True)
            by_rank = in_processes(ran, size, flags, size, folder)
            for part in flags.parts:
                rows = [one[part] for one in by_rank]
                found[part] += together(rows, streams) if part == "stream" else slowest(rows)
            write(flags, found, unfinished=True)
    for part, rows in found.items():
        show(rows, part)
    return found
