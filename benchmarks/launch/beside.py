"""Steps of models in each mode, measured and predicted.

Up to `DECODED` tokens a batch has one of each request, whose context is full; more are the first
tokens of one request. The same weights and memory serve all. Before a mode is timed, its logits are
held to those of the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

import fngraph as fg
from benchmarks.decode.bench import Bench, make_bench
from benchmarks.decode.judging import Wrong, off
from benchmarks.decode.ours import greedy
from benchmarks.device import release, wait
from benchmarks.launch.mixes import Yardstick
from benchmarks.launch.turns import in_the_middle, timed
from benchmarks.workload import BLOCK_SIZE, batch_of, to_device

DECODED = 64  # tokens up to which a batch decodes
MODES = ("NONE", "PIECEWISE", "FULL")
MOST_OFF = 0.03  # of logits of two modes, by their norm: attention splits otherwise
Row = dict[str, Any]


class Steps(NamedTuple):
    """Captured steps of one kind of batch, by mode, and what predicts them."""

    steps: dict[str, Any]
    model: fg.core.LaunchModel


def opened(
    bench: Bench, constants: fg.core.Constants, sizes: Sequence[int], decode: bool, context: int
) -> Steps:
    """NONE runs on the step of FULL."""
    cache = bench.pages()
    most_reqs = max(sizes) if decode else 1
    limits = fg.Limits(max(sizes), most_reqs, B=-(-context // BLOCK_SIZE))

    def made(modes: str) -> tuple[Any, fg.core.LaunchModel]:
        fast = fg.graphify(
            greedy(bench.model.family.forward), modes=modes, donate="cache", stage="batch",
            sizes=tuple(sizes), backends={"attention": bench.backend}, outputs="borrow",
        )  # fmt: skip
        lowered = fast.trace(bench.params, cache, limits=limits).split().lower()
        step = lowered.compile().capture(bench.params, cache)
        return step, lowered.launch_model(constants)

    if decode:  # keys of uniform batches, and of any
        step, model = made("FULL_AND_PIECEWISE")
        return Steps(dict.fromkeys(MODES, step), model)
    full, model = made("FULL")
    return Steps({"NONE": full, "PIECEWISE": made("PIECEWISE")[0], "FULL": full}, model)


def point(
    bench: Bench, found: Steps, tokens: int, decode: bool, repeats: int, yardstick: Yardstick
) -> Iterator[tuple[Row, Row | None]]:
    """A row a mode; with FULL's, where its device time goes, as predicted and as seen."""
    context = bench.context if decode else tokens
    reqs, new = (tokens, 1) if decode else (1, tokens)
    batch = batch_of(reqs, new, -(-context // BLOCK_SIZE) * BLOCK_SIZE)
    spec = batch.spec._replace(host=fg.HostBounds(new, context))
    columns = found.model.table.limits["B"]
    tables = F.pad(batch.block_tables, (0, columns - batch.block_tables.shape[1]))
    batch = dataclasses.replace(batch, spec=spec, block_tables=tables)
    batch = to_device(batch, bench.device)
    cache, logits = bench.pages(), {}
    for mode in MODES:
        step = found.steps[mode]
        last: list[Any] = []

        def once(step: Any = step, mode: str = mode, last: list[Any] = last) -> None:
            last[:] = step(cache, batch, allowed=(mode,))

        likely_us = found.model.predict(spec, mode).wall_us
        once()
        wait(bench.device)
        logits[mode] = last[1].float().clone()
        error = off(logits[mode], logits["NONE"])
        if not error < MOST_OFF:
            raise Wrong(f"{mode}, {tokens} tokens: logits are off by {error:.3f}, of {MOST_OFF}")
        measured = timed(once, bench.device, repeats, likely_us, yardstick)
        each = [as_slow(found.model, one.slower).predict(spec, mode) for one in measured.rounds]
        offs = [told.wall_us / one.wall - 1 for told, one in zip(each, measured.rounds)]
        middle = in_the_middle(offs)
        told, seen = each[middle], measured.rounds[middle]
        row = {
            "tokens": tokens, "requests": reqs, "context": context, "mode": mode,
            "attention": next(iter(step.backends.values())),
            "predicted us": told.wall_us, "bound": told.bound, "predicted host us": told.host_us,
            "predicted device us": told.device_us, "host slower": seen.slower,
            "measured us": seen.wall, "measured host us": seen.host,
            "measured device us": measured.device, "off": offs[middle],
            "off, rounds": sorted(offs), "error": error,
        }  # fmt: skip
        kinds = None
        if mode == "FULL":
            kinds = {
                "tokens": tokens, "predicted": kinds_of(found.model, spec),
                "kernels": slowest_kernels(once, bench.device),
            }  # fmt: skip
        yield row, kinds


def as_slow(model: fg.core.LaunchModel, by: float) -> fg.core.LaunchModel:
    """The model while the host takes `by` times as long as when its constants were measured."""
    constants = model.constants
    slow = constants._replace(host=constants.host.slower(by))
    return dataclasses.replace(model, constants=slow)


def kinds_of(model: fg.core.LaunchModel, spec: fg.BatchSpec) -> dict[str, Any]:
    """Predicted device time by kind of op, and how many there are."""
    limits = model.table.limits
    sizes = {"T": spec.num_tokens, "R": spec.num_reqs, **limits.dims}
    us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for part in model.count(sizes, sizes, spec.host.max_seq_len):
        for work in part.works:
            us[work.kind] += model.constants.device.time(work)[0]
            calls[work.kind] += work.kernels
    return {kind: [calls[kind], round(t, 1)] for kind, t in _slowest(us) if t}


def _slowest(us: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(us.items(), key=lambda one: -one[1])


def slowest_kernels(once: Any, device: str) -> dict[str, Any]:
    """The device's time of one step by kernel, number and sum, as the profiler sees them."""
    if not device.startswith("cuda"):
        return {}
    activity = torch.profiler.ProfilerActivity
    once()
    wait(device)
    with torch.profiler.profile(activities=[activity.CUDA], acc_events=True) as profile:
        once()
        wait(device)
    us: dict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            name = event.name[:100]
            us[name] += event.time_range.elapsed_us()
            calls[name] += 1
    return {name: [calls[name], round(t, 1)] for name, t in _slowest(us)[:16]}


def rows_of(
    name: str, tokens: Sequence[int], context: int, constants: fg.core.Constants, device: str,
    backend: str | None, repeats: int, yardstick: Yardstick,
) -> Iterator[tuple[Row, Row | None]]:  # fmt: skip
    """All rows of a model."""
    decoded = [n for n in tokens if n <= DECODED]
    chunks = [n for n in tokens if n > DECODED]
    reqs = max(decoded, default=1)
    room = -(-max([reqs * context, *chunks]) // (reqs * BLOCK_SIZE)) * BLOCK_SIZE
    bench = dataclasses.replace(
        make_bench(name, room, [reqs], device, backend), context=context
    )  # fmt: skip
    for sizes, decode in ((decoded, True), (chunks, False)):
        if not sizes:
            continue
        longest = context if decode else max(sizes)
        found = opened(bench, constants, sizes, decode, longest)
        for size in sizes:
            for row, kinds in point(bench, found, size, decode, repeats, yardstick):
                yield {"model": name, **row}, kinds and {"model": name, **kinds}
        del found
        release(device)
    del bench
    release(device)
