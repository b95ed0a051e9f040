"""A vision encoder's graphs beside its bare `forward`: python -m benchmarks encoder

images     requests of images sized as a chat has them, through budgets of graphs and bare
video      requests of one video
squares    requests of 20 images of 336 x 336; with --ranks 2 shared by two devices (NCCL, or gloo)
budgets    for sets of budgets, with and without the rule that defers items: padding, graphs, MB
towers     two paths, of which the items' crops are beyond every budget: one graph and one eager run
           against both run eagerly, as they would if they were one graph
attention  the tower's attention alone, by backend and order of images

Qwen3-VL's tower at its real shape, random weights in bf16; DeepSeek-OCR's for `towers`. Patches lie
on the device, as a processor there leaves them. Each request goes through every way in turn, and
`ms` is its wall time with the device's work done: what a server adds to the time to a first token.
Bare `forward` takes all images of a request in one call. Rows are held to float32's first.
Budgets are as asked, in steps of 512, or planned from the requests of the warm-up.

`of bare` are ratios of means, of 99th percentiles, of requests of up to 1,024 patches, and of the
kind of request (by tokens, in eight parts) that fares worst.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.device import wait
from benchmarks.encoder.kernels import attention_alone
from benchmarks.encoder.ranked import in_ranks
from benchmarks.encoder.requests import Request, chat, squares, videos
from benchmarks.encoder.towers import two_towers
from benchmarks.encoder.ways import SIZES, Tower, as_asked, as_seen, make_tower, named, way_of
from benchmarks.harness import BACKEND, DEVICE, Benchmark, count, kept, show, some_of
from benchmarks.traffic import quantile

PARTS = ("images", "video", "squares", "budgets", "towers", "attention")
LEVELS = ("none", "fused", "pieces")
BUDGETS = ("asked", "planned")
SMALL = 1024  # patches
GOALS = {  # of bare: the most that each may be
    "images": {"mean": 0.75, "p99": 0.80, "small": 1 / 1.9, "worst kind": 1.03},
    "squares over ranks": {"mean": 0.82, "p99": 0.86},
}
Ways = Mapping[str, Callable[[Sequence[Any]], list[Any]]]


def timed(
    ways: Ways, requests: Sequence[Request], device: str, warmup: int, limit: float = math.inf
) -> dict[str, Any]:
    """Seconds of each request by each way, in turns; the first `warmup` requests do not count. None
    is begun `limit` seconds after the first."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    names, start = list(ways), time.perf_counter()
    for at, request in enumerate(requests):
        if time.perf_counter() - start > limit and at > warmup:
            break
        items = request.items()
        for i in range(len(names)):
            way = names[(at + i) % len(names)]
            wait(device)
            began = time.perf_counter()
            ways[way](items)
            wait(device)
            if at >= warmup:
                seconds[way].append(time.perf_counter() - began)
    return seconds


def rows_of(
    part: str, seconds: Mapping[str, Sequence[float]], requests: Sequence[Request]
) -> list[dict[str, Any]]:
    """A row for each way; `requests` are those that were timed."""
    small = [i for i, one in enumerate(requests) if one.patches <= SMALL]
    rows = []
    for way, took in seconds.items():
        bare = seconds["bare"]
        row = {
            "part": part, "way": way, "requests": len(took),
            "mean ms": statistics.fmean(took) * 1e3, "p50 ms": quantile(took, 0.5) * 1e3,
            "p99 ms": quantile(took, 0.99) * 1e3,
            "mean of bare": statistics.fmean(took) / statistics.fmean(bare),
            "p99 of bare": quantile(took, 0.99) / quantile(bare, 0.99),
        }  # fmt: skip
        if small:
            mine, its = ([x[i] for i in small] for x in (took, bare))
            row["small ms"] = statistics.fmean(mine) * 1e3
            row["small of bare"] = statistics.fmean(mine) / statistics.fmean(its)
        row["worst kind of bare"] = max(
            statistics.median(took[i] / bare[i] for i in kind) for kind in kinds(requests)
        )
        rows.append(row)
    return rows


def kinds(requests: Sequence[Request], many: int = 8) -> list[list[int]]:
    """Numbers of requests that are about as large, in up to `many` lists."""
    order = sorted(range(len(requests)), key=lambda i: requests[i].patches)
    step = -(-len(order) // many)
    return [order[i : i + step] for i in range(0, len(order), step)]


def stream_part(part: str, tower: Tower, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """A stream through every level and bare."""
    make = {"images": chat, "video": videos, "squares": squares}[part]
    many = flags.requests if part == "images" else max(3, flags.requests // 10)
    warmup = min(flags.warmup, many // 4)
    requests = make(tower, many, flags.seed)
    ways: dict[str, Any] = {"bare": tower.bare}
    earlier = [one.items() for one in requests[: warmup or None]]
    asked = {"asked": as_asked(tower), "planned": as_seen(tower, earlier)}
    for level, budgets in itertools.product(flags.levels, flags.budgets):
        began, way = time.perf_counter(), named(level, budgets)
        ways[way] = way_of(tower, level, flags, **asked[budgets])
        print(f"  {part}, {way}: {time.perf_counter() - began:.1f} s to capture", flush=True)
    tower.check(ways, requests[0].items())
    seconds = timed(ways, requests, flags.device, warmup, flags.seconds or math.inf)
    rows = rows_of(part, seconds, requests[warmup : warmup + len(seconds["bare"])])
    for row in rows[1:]:
        encoder = ways[row["way"]]
        stats = encoder.stats
        graphs = max(stats.tokens() + stats.padding(), 1)
        row |= {"hits": stats.hit_rate(), "padding": stats.padding() / graphs}
        row |= {"graphs": encoder.plan.num_graphs, "graphs MB": megabytes(encoder)}
        encoder.sleep()
    return rows


def megabytes(encoder: Any) -> float:
    """Of graphs and static buffers, as measured."""
    tables = list(encoder.memory.values())
    graphs = sum(table.total - table.pool for table in tables)
    return (graphs + max(table.pool for table in tables)) / 1e6


def budget_sets(tower: Tower, flags: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each set of budgets and rule: what the chat's runs pad, and what graphs take."""
    requests = [one.items() for one in chat(tower, flags.requests, flags.seed)]

    def ran(encoder: Any) -> list[tuple[int | None, int]]:
        """The budget of each run, and its true tokens."""
        found = []
        for items in requests:
            tokens = [tower.model.measure(item).tokens["default"] for item in items]
            for run in encoder.pack(items).runs:
                found.append((run.budget, sum(tokens[i] for i in run.items)))
        return found

    rows, seen = [], list[int]()
    for name in ("in steps of 512", "doubled", "planned from the stream"):
        asked = {"in steps of 512": as_asked(tower), "doubled": {}}.get(name, {"histogram": seen})
        for defer in (True, False):
            encoder = way_of(tower, "none", flags, defer=defer, **asked)
            runs = ran(encoder)
            seen = seen or [true for _, true in runs]
            held = sum(budget or true for budget, true in runs)
            rows.append({
                "budgets": name, "defers": defer, "graphs": encoder.plan.num_graphs,
                "runs": len(runs), "eager": sum(budget is None for budget, _ in runs),
                "padding": 1 - sum(true for _, true in runs) / max(held, 1),
                "graphs MB": megabytes(encoder),
            })  # fmt: skip
            encoder.sleep()
    return rows


def missed(found: dict[str, Any], flags: argparse.Namespace) -> list[str]:
    """What is asked of a GPU and not met, by the best level."""
    if not flags.device.startswith("cuda"):
        return []
    lines = []
    for part, goals in GOALS.items():
        rows = [row for row in found.get(part, ()) if row["way"] != "bare"]
        if not rows:
            continue
        best = min(rows, key=lambda row: row["mean of bare"])
        lines += [
            f"{part}, {best['way']}: {name} is {best[f'{name} of bare']:.3f} of bare, and "
            f"{most:.3f} is asked"
            for name, most in goals.items()
            if best.get(f"{name} of bare", most) > most
        ]
    return lines


@Benchmark(
    DEVICE | BACKEND | {
        "--parts": some_of(PARTS), "--levels": some_of(LEVELS, ["none", "fused"]),
        "--budgets": some_of(BUDGETS),
        "--model": {"choices": list(SIZES), "default": "qwen3-vl"},
        "--requests": count(3000), "--warmup": count(300, least=0), "--seed": count(0, least=0),
        "--seconds": count(0, "after which no request of a part is begun; 0: no limit", least=0),
        "--ranks": count(1, "processes that share a request of squares, a GPU each"),
    },
    quick={"device": "cpu", "model": "tiny", "requests": 6, "warmup": 1, "levels": ["none"],
           "budgets": ["asked"]},
    missed=missed,
)  # fmt: skip
@torch.no_grad()
def measure(flags: argparse.Namespace) -> dict[str, Any]:
    """Each part's rows."""
    found: dict[str, Any] = {}
    tower = make_tower(flags)
    for part in flags.parts:
        if part == "budgets":
            rows = budget_sets(tower, flags)
        elif part == "towers":
            rows = two_towers(flags, timed)
        elif part == "attention":
            rows = attention_alone(tower, flags.device)
        else:
            rows = stream_part(part, tower, flags)
        show(kept(flags, rows, found, part), part)
    if flags.ranks > 1:
        rows, part = rows_of("squares over ranks", *in_ranks(flags)), "squares over ranks"
        show(kept(flags, rows, found, part), f"squares over {flags.ranks} ranks")
    return found
