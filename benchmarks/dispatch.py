"""What dispatch costs, in Python on one core: python -m benchmarks dispatch

Every figure of a row is the median over single calls on distinct, freshly built specs in random
order, the timer's own cost included. No spec comes twice, so nothing is answered from a memory of
earlier calls. Needs no GPU and imports no torch (but for `--json`).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from statistics import median
from time import perf_counter_ns
from typing import Any

import fngraph as fg
from benchmarks.harness import Benchmark, count, over, show

core = fg.core

QUERY_LENS = (1, 2, 3, 4)
ADAPTERS = core.adapter_counts(63, powers=True)  # 0, 1, 2, 4, ... 32, 64: 8 counts
LIMITS = fg.Limits(max_tokens=8192, max_reqs=256)
CHUNK = 1000  # specs alive at once; they are as warm as a scheduler would have just made them


def tables() -> dict[str, Any]:
    """The default 51-size ladder, and the same over all query lengths and adapter counts."""
    sizes = core.default_sizes(LIMITS)
    plain = core.ladders(sizes, (1,), LIMITS.max_reqs)
    wide = core.ladders(sizes, QUERY_LENS, LIMITS.max_reqs)
    modes = "FULL_AND_PIECEWISE"
    return {
        "51 sizes": lambda: core.build_table(modes, plain, LIMITS),
        "51 sizes x 4 query lengths x 8 adapter counts": lambda: core.build_table(
            modes, wide, LIMITS, ADAPTERS
        ),
    }


def fields(draw: random.Random, beyond: bool) -> Iterator[tuple]:
    """Endless distinct fields of specs; with `beyond`, a third lie outside of what is captured."""
    seen = set()
    while True:
        adapters = draw.randrange(65)
        reqs = draw.randint(1, LIMITS.max_reqs)
        query_len = draw.choice((*QUERY_LENS, None))
        outside = draw.randrange(9) if beyond else 9
        if outside == 0:
            query_len = draw.randint(5, 30)  # no key for this length
        elif outside == 1:
            adapters = draw.randint(65, 999)  # no key for so many
        if query_len is not None:
            tokens = reqs * query_len
        else:
            tokens = draw.randint(reqs, LIMITS.max_tokens if outside == 2 else 512)
        flags = (draw.random() < 0.1, draw.random() < 0.1) if beyond else (False, False)
        found = (tokens, reqs, query_len, adapters, *flags)
        if found not in seen and (beyond or tokens <= 512):
            seen.add(found)
            yield found


def timed(call: Callable[..., Any], arguments: list[tuple]) -> tuple[list[int], list[Any]]:
    """Nanoseconds and result of each single call."""
    times, results = [], []
    for arg in arguments:
        began = perf_counter_ns()
        result = call(*arg)
        times.append(perf_counter_ns() - began)
        results.append(result)
    return times, results


def row(what: str, times: list[int], unit: str, at_most: float | None = None) -> dict[str, Any]:
    """Median and p99, in `unit`, and what is asked of the median."""
    scale = {"us": 1e3, "ms": 1e6}[unit]
    ordered = sorted(times)
    p99 = ordered[len(ordered) * 99 // 100]
    return {
        "what": what, "median": median(ordered) / scale, "p99": p99 / scale, "unit": unit,
        "at_most": at_most,
    }  # fmt: skip


def dispatching(n: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows of building and dispatching `n` specs, and the share of each mode among them."""
    build = tables()["51 sizes x 4 query lengths x 8 adapter counts"]
    yield row("timer alone", timed(lambda: None, [()] * n)[0], "us")
    for beyond, what, at_most in ((False, "a hit", 0.5), (True, "any spec", 1.5)):
        stream = fields(random.Random(seed + beyond), beyond)
        table, spent, built, ran = build(), [], [], dict.fromkeys(core.Mode, 0)
        at_once = min(n, CHUNK)
        for _ in range(n // at_once):
            new, specs = timed(core.BatchSpec, list(islice(stream, at_once)))
            times, answers = timed(core.dispatch, [(table, spec) for spec in specs])
            built += new
            spent += times
            for answer in answers:
                ran[answer.mode] += 1
        shares = ", ".join(f"{mode} {found / n:.0%}" for mode, found in ran.items() if found)
        if not beyond and ran[core.Mode.NONE]:
            raise SystemExit("a spec of the row `a hit` was not a hit")
        yield row(f"dispatch, {what} ({shares})", spent, "us", at_most)
        yield row(f"  building that spec, {what}", built, "us")


def building(repeats: int) -> Iterator[dict[str, Any]]:
    """Rows of building tables from ready ladders, one alive at a time."""
    for what, build in tables().items():
        times = [timed(build, [()])[0][0] for _ in range(repeats)]
        yield row(f"build_table, {what}", times, "ms", 1.0 if what == "51 sizes" else None)


def importing(repeats: int) -> Iterator[dict[str, Any]]:
    """One row: `import fngraph.core` in fresh interpreters, bytecode compiled once before."""
    code = (
        "import sys, time; began = time.perf_counter_ns(); import fngraph.core; "
        "print(time.perf_counter_ns() - began, int('torch' in sys.modules))"
    )
    with tempfile.TemporaryDirectory() as compiled:
        env = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
        env.pop("PYTHONDONTWRITEBYTECODE", None)
        times = []
        for i in range(repeats + 1):
            run = [sys.executable, "-c", code]
            done = subprocess.run(run, capture_output=True, text=True, env=env, check=True)
            spent, torch = map(int, done.stdout.split())
            if torch:
                raise SystemExit("import fngraph.core brought torch in")
            times += [spent] if i else []
    yield row("import fngraph.core (no torch in it)", times, "ms", 50.0)


@Benchmark(
    {"--specs": count(200_000, "distinct specs a row"), "--seed": count(0, least=0)},
    quick={"specs": 1000},
    missed=lambda rows, flags: [] if flags.quick else over(rows, "median", "at_most"),
)
def measure(flags: argparse.Namespace) -> list[dict[str, Any]]:
    """Dispatching, building tables, importing."""
    tables_built, imports = (5, 1) if flags.quick else (200, 15)
    rows = [*dispatching(flags.specs, flags.seed), *building(tables_built), *importing(imports)]
    show(rows, f"medians over {flags.specs:,} distinct, freshly built specs in random order")
    return rows
