"""The launch model beside what it predicts: python -m benchmarks launch

First the machine's constants are measured, on shapes that no model below has: products and chains
of other ops at several sizes, mixes of ops, layers of attention (--constants FILE keeps them, for
`fg.core.Constants.loads`). Then steps of models at level "none" in NONE, PIECEWISE and FULL, up to
64 tokens as decode batches with --context tokens of each request, from there on as the first chunk
of one request. `off` is what the prediction is off by, of what was measured; 15% are allowed.

A host that others share may be half as fast from one moment to the next. So each step is timed in
short rounds, in turns with mixes of ops that are none of a model's: `host slower` is how many times
as long those took, on both sides of the round, as the constants say, and the step is predicted with
a host that is as slow. A row is the round in the middle, by what it is off by; `off, rounds` in
--json has all of them.

--given FILE takes constants that were measured before. Without a GPU the tape replays, and all
clocks are the host's: the model takes host and device to work side by side, which is not so there.
"""

from __future__ import annotations

import argparse
import dataclasses
import platform
import time
from pathlib import Path
from typing import Any

import torch

import fngraph as fg
from benchmarks.decode.models import MODELS
from benchmarks.device import release
from benchmarks.harness import BACKEND, DEVICE, Benchmark, Mistake, count, kept, show, some_of
from benchmarks.launch import attending, beside, kernels, mixes
from benchmarks.workload import BLOCK_SIZE

ALLOWED = 0.15


def constants_of(flags: argparse.Namespace) -> fg.core.Constants:
    """Measured now."""
    device, tiny = flags.device, flags.quick
    bursts = 2 if tiny else mixes.BURSTS
    sizes = kernels.TINY if tiny else kernels.WHOLE
    grid = said("products", lambda: kernels.products(sizes, device))
    curves = said("ops by bytes", lambda: kernels.curves(sizes, device))
    bandwidth = kernels.bandwidth(device)
    rates = {"bfloat16": kernels.best_rate(grid), "float32": kernels.float32_rate(device)}
    release(device)
    ops = said("ops by calls", lambda: mixes.steps(device, 2 if tiny else mixes.BLOCKS, bursts))
    replay = mixes.replay_us(device)
    name = torch.cuda.get_device_name() if device.startswith("cuda") else "the host, as a device"
    told = fg.core.DeviceConstants(
        name, bandwidth, rates, kernels.tiny_us(device), gap_us=ops.gap_us, curves=curves,
        products={"bfloat16": grid},
    )  # fmt: skip
    works, us = ops.mixed
    switch_us = (us - sum(told.time(work)[0] for work in works)) / sum(w.kernels for w in works)
    told = dataclasses.replace(told, switch_us=max(switch_us, 0.0))

    def one_us(x: torch.Tensor) -> float:
        return told.time(fg.core.Work("pointwise", 2 * x.nbytes))[0]

    asked = attending.TINY if tiny else attending.WHOLE
    attention = said("attention", lambda: attending.attention(
        asked, device, flags.backend, ops, replay, one_us, bursts
    ))  # fmt: skip
    release(device)
    curves["decode attention"] = attention.decode
    curves |= {f"prefill attention {width}": curve for width, curve in attention.prefill.items()}
    one = told.time(fg.core.Work("pointwise", 2 * mixes.E * 2))[0]
    host = platform.processor() or platform.machine()
    told = dataclasses.replace(
        told, boundary_us=attention.boundary_us, step_us=max(ops.one_us - one, 0.0), curves=curves
    )
    op_us = ops.op_us | {"attention": attention.call_us}
    mean = sum(ops.op_us.values()) / len(ops.op_us)
    host_told = fg.core.HostConstants(
        host, max(ops.full_us - replay - ops.node_us, 0.0), replay, ops.node_us, ops.eager_us,
        mean, op_us, {"attention": attention.cut_us},
    )  # fmt: skip
    return fg.core.Constants(told, host_told, f"{flags.command}, {name}")


def said(what: str, measure: Any) -> Any:
    """The same, and how long it took."""
    began = time.perf_counter()
    found = measure()
    print(f"{what}: {time.perf_counter() - began:.1f} s", flush=True)
    return found


def shown(constants: fg.core.Constants) -> None:
    """What a reader asks first."""
    device, host = constants.device, constants.host
    rows = [
        {"constant": "copy, TB/s", "value": device.bytes_per_us / 1e6},
        *({"constant": f"products, {d}, TFLOP/s", "value": rate / 1e6}
          for d, rate in device.flops_per_us.items()),
        *({"constant": f"device: {name}", "value": getattr(device, name)}
          for name in ("kernel_us", "switch_us", "gap_us", "boundary_us", "step_us")),
        *({"constant": f"host: {name}", "value": getattr(host, name)}
          for name in ("step_us", "replay_us", "node_us", "eager_step_us")),
        *({"constant": f"host: {kind}, in NONE, us", "value": us}
          for kind, us in host.op_us.items()),
        *({"constant": f"host: {kind}, between graphs, us", "value": us}
          for kind, us in host.cut_us.items()),
    ]  # fmt: skip
    show(rows, str(constants))


def missed(figures: dict[str, Any], flags: argparse.Namespace) -> list[str]:
    """On a GPU, where the model is off by more than it may be."""
    if not flags.device.startswith("cuda"):
        return []
    return [
        f"{row['model']}, {row['tokens']} tokens, {row['mode']}: off by {row['off']:.0%}: "
        f"{row['predicted us']:.0f} us predicted, {row['measured us']:.0f} measured"
        for row in figures["step"]
        if abs(row["off"]) > ALLOWED
    ]


@Benchmark(
    {
        **DEVICE, **BACKEND, "--models": some_of(list(MODELS), ["1B", "8B"]),
        "--tokens": count([1, 8, 64, 512, 2048, 8192], "of a step"),
        "--context": count(512, "tokens of each request that decodes", multiple_of=BLOCK_SIZE),
        "--repeats": count(20, "steps of each clock"),
        "--constants": {"type": Path, "help": "keep the constants here"},
        "--given": {"type": Path, "help": "take constants from here"},
    },
    quick={"models": ["tiny"], "tokens": [1, 4, 128], "context": 32, "repeats": 2},
    missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """The constants, and rows of steps."""
    if flags.given is not None:
        try:
            constants = fg.core.Constants.loads(flags.given.read_text())
        except (OSError, fg.errors.SpecError) as error:
            raise Mistake(f"--given {flags.given}: {error}") from error
    else:
        constants = constants_of(flags)
    if flags.constants is not None:
        try:
            flags.constants.parent.mkdir(parents=True, exist_ok=True)
            flags.constants.write_text(constants.dumps())
        except OSError as error:
            raise Mistake(f"--constants {flags.constants}: {error}") from error
    shown(constants)
    figures: dict[str, Any] = {"step": [], "kinds": []}
    yardstick = mixes.Yardstick(flags.device, constants.host, 2 if flags.quick else mixes.BLOCKS)
    for name in flags.models:
        began = time.perf_counter()
        for row, kinds in beside.rows_of(
            name, flags.tokens, flags.context, constants, flags.device, flags.backend,
            flags.repeats, yardstick,
        ):  # fmt: skip
            figures["kinds"] += [kinds] if kinds else []
            kept(flags, [row], figures, "step")
        print(f"{name}: {time.perf_counter() - began:.1f} s", flush=True)
        short = ("model", "tokens", "requests", "context", "mode", "bound", "predicted us",
                 "measured us", "off", "host slower", "predicted host us", "measured host us",
                 "predicted device us", "measured device us")  # fmt: skip
        show([{k: row.get(k) for k in short} for row in figures["step"] if row["model"] == name],
             name)  # fmt: skip
    return figures
