"""From `import` to the first token, a new process each time: python -m benchmarks startup

cold         nothing is kept: the folders of artefacts, of Inductor and of Triton are empty
warm         the second process, with what the first one has kept; it compiles nothing
no compile   level "none", with Triton's folder as the others have left it

Random weights, drawn on the device, and all decode sizes captured: 51 of them up to --top 512.

import       torch, fngraph, the model
weights      the device's context, weights and cache
trace        `trace`, `split`, `lower`
compile      `compile`: code is made, or loaded; `artefacts s` is that alone
warm-up      static buffers, and one key of each kind run for real
capture      the others recorded
first token  a batch of one request from the host, its token on the host

Where there is no GPU it is the tape that records. Where torch's modules have no bytecode beside
them (an installation that nobody can write to), it is kept in a folder too, by the cold process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import fngraph as fg
from benchmarks.harness import BACKEND, DEVICE, MODES, Benchmark, count, kept, over, show, some_of
from benchmarks.workload import (
    BF16,
    BLOCKS,
    SHAPES,
    attention_of,
    batch_of,
    new_cache,
    random_params,
    to_device,
)  # fmt: skip
from fngraph.models.families import llama

ROOT = Path(__file__).parents[1]
STARTS = ("cold", "warm", "no compile")
AT_MOST = {("1B", "warm"): (8.0, 2.0), ("1B", "cold"): (60.0, None)}  # s in all, s of artefacts
FRESH = """
import time
began = time.perf_counter()
import json, sys
from benchmarks.startup import started
print(json.dumps(started(began, **json.loads(sys.argv[1]))))
"""


@torch.no_grad()
def started(
    began: float, device: str, model: str, level: str, mode: str, top: int, backend: str | None
) -> dict[str, Any]:
    """What a process that began then has spent its seconds on, till the first token."""
    _, laps = fg.graphify, [("import s", time.perf_counter() - began)]

    def lap(name: str) -> None:
        laps.append((name, time.perf_counter() - began - sum(s for _, s in laps)))

    config = SHAPES[model]
    params, cache = random_params(config, device, BF16), new_cache(config, device)
    lap("weights s")
    limits = fg.Limits(max_tokens=top, max_reqs=top, B=BLOCKS)
    fast = fg.graphify(
        llama.forward, modes=mode, compile=level, donate="cache", stage="batch",
        backends={"attention": backend},
    )  # fmt: skip
    lowered = fast.trace(params, cache, limits=limits).split().lower()
    lap("trace s")
    compiled = lowered.compile()
    lap("compile s")
    step = compiled.capture(params, cache, lazy=True)
    step.capture_all()
    stats = step.stats
    capture_s = sum(took.us for took in stats.captures.values()) / 1e6
    lap("warm-up s")
    laps[-1:] = [("warm-up s", laps[-1][1] - capture_s), ("capture s", capture_s)]
    logits, _ = step(cache, to_device(batch_of(1, 1), device))
    logits.argmax(-1).tolist()
    lap("first token s")
    return {
        "s": sum(s for _, s in laps), **dict(laps),
        "artefacts s": sum(took.us for took in stats.compiles.values()) / 1e6,
        "compiled": stats.compiled, "loaded": len(stats.compiles) - stats.compiled,
        "keys": len(step), "ran as": str(step.stats.rows()[0].mode),
        "attention": attention_of(step),
    }  # fmt: skip


def in_new_process(folder: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """`started` in a Python of its own, which keeps all that it compiles in `folder`."""
    places = ["FNGRAPH_CACHE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
    places += ["PYTHONPYCACHEPREFIX"] * (not keeps_bytecode())
    env = {**os.environ, **{name: str(folder / name) for name in places}}
    env.pop("PYTHONDONTWRITEBYTECODE", None)  # some images set it: each process would compile torch
    told = [sys.executable, "-c", FRESH, json.dumps(asked)]
    ran = subprocess.run(told, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found


def keeps_bytecode() -> bool:
    """Whether torch's modules lie there compiled, as they do where it was installed by pip. Where
    they do not, each process would compile them again: the cold one does, and keeps them."""
    source = find_spec("torch._inductor.lowering")
    cached = None if source is None else source.cached
    return cached is not None and Path(cached).exists()


def rows_of(flags: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each model and start."""
    for model in flags.models:
        with tempfile.TemporaryDirectory() as folder:
            for start in STARTS:
                level = "none" if start == "no compile" else flags.level
                asked = {
                    "device": flags.device, "model": model, "level": level, "mode": flags.mode,
                    "top": flags.top, "backend": flags.backend,
                }  # fmt: skip
                row = {"model": model, "start": start, **in_new_process(Path(folder), asked)}
                measures = flags.device.startswith("cuda")
                most = AT_MOST.get((model, start)) if measures else None
                row["at most"], row["artefacts at most"] = most or (None, None)
                print(f"{model}, {start}: {row['s']:.1f} s", flush=True)
                yield row


def missed(rows: list[dict[str, Any]], flags: argparse.Namespace) -> list[str]:
    """Seconds; and a second process that compiles."""
    again = [
        f"{row['model']}: the second process has compiled {row['compiled']} pieces, of "
        f"{row['compiled'] + row['loaded']}"
        for row in rows
        if row["start"] == "warm" and row["compiled"]
    ]
    return [*again, *over(rows, "s", "at most"), *over(rows, "artefacts s", "artefacts at most")]


@Benchmark(
    {
        **DEVICE, **BACKEND, "--models": some_of(list(SHAPES), ["1B", "8B"]),
        "--level": {"choices": ("pieces", "once", "stock"), "default": "pieces"},
        "--mode": {"choices": MODES, "default": "FULL_AND_PIECEWISE"},
        "--top": count(512, "the largest size"),
    },
    quick={"device": "cpu", "models": ["tiny"], "top": 4}, missed=missed,
)  # fmt: skip
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of `rows_of`."""
    rows = kept(flags, rows_of(flags))
    show(rows)
    return rows
