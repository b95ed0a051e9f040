"""Times of kinds of kernels on the device, at several sizes: curves, and a grid of products.

Calls follow one another in a graph, as in a captured step, the device held until that is launched.
Weights are read from memory, as in a model: each call has others, which the cache does not hold.
What is pointwise reads what was written just before. On a CPU it is wall time of the calls.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.device import in_graph, wait
from benchmarks.workload import BF16

Fn = Callable[[], Any]
REPEATS = 5
COLD = 200e6  # bytes of weights that a round of calls reads: more than a cache holds
ROUND_US = 1500.0
HELD = 4e5  # cycles, some 0.2 ms: for one launch


class Sizes(NamedTuple):
    """Where is measured: none of them a shape of a model that is predicted.

    Attributes:
        rows, columns, depth: of products.
        tokens, width: of all other kinds.
        table: rows that are looked up in.
    """

    rows: tuple[int, ...]
    columns: tuple[int, ...]
    depth: tuple[int, ...]
    tokens: tuple[int, ...]
    width: int
    table: int


WHOLE = Sizes(
    rows=(1, 4, 16, 48, 96, 384, 768, 1536, 3072, 6144, 12288),
    columns=(384, 768, 1536, 3072, 6144, 12288, 24576), depth=(1536, 3072, 6144, 12288, 18432),
    tokens=(1, 3, 6, 12, 24, 48, 96, 192, 768, 3000, 12000), width=3072, table=32000,
)  # fmt: skip
TINY = Sizes((1, 6, 24), (48, 96), (24, 96), (1, 24), 48, 100)


def each_us(fns: Sequence[Fn], device: str) -> float:
    """Of one of these calls, one after the other."""
    for fn in fns[:2]:
        fn()
    wait(device)
    if not device.startswith("cuda"):
        return median(_wall_us(fns) for _ in range(REPEATS)) / len(fns)
    calls = iter(fns)
    graph = in_graph(lambda: next(calls)(), len(fns))
    graph.replay()
    us = median(held_us(graph.replay) for _ in range(REPEATS))
    del graph
    return us / len(fns)


def _wall_us(fns: Sequence[Fn]) -> float:
    began = time.perf_counter_ns()
    for fn in fns:
        fn()
    return (time.perf_counter_ns() - began) / 1e3


def held_us(launch: Fn) -> float:
    """Device time of what `launch` launches, none of which begins before all is launched."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(HELD))
    begin.record()
    launch()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) * 1e3


def _calls(us: float, nbytes: float) -> int:
    """How many make a round: of about that long a call, and so many bytes that are to be cold."""
    return max(2, min(200, int(max(ROUND_US / us, COLD / nbytes if us < 100 else 0))))


# --- products -------------------------------------------------------------------------------------


def products(sizes: Sizes, device: str) -> fg.core.Grid:
    """Times of (rows, depth) @ (columns, depth).t() in bfloat16."""
    most = max(sizes.columns) * max(sizes.depth)
    pool = torch.randn(most, device=device).mul_(0.02).to(BF16)
    us = []
    for M, N, K in itertools.product(sizes.rows, sizes.columns, sizes.depth):
        x = torch.randn(M, K, device=device, dtype=BF16)
        likely = 2.0 + N * K * 2 / 3e6 + 2 * M * N * K / 5e8
        many = _calls(likely, N * K * 2) if device.startswith("cuda") else 2
        blocks = pool[: most // (N * K) * N * K].view(-1, N, K)  # each begins where it may
        weights = [blocks[i % len(blocks)].t() for i in range(many)]
        us.append(round(each_us([_product(x, w) for w in weights], device), 3))
    return fg.core.Grid(sizes.rows, sizes.columns, sizes.depth, tuple(us))


def _product(x: Tensor, weight: Tensor) -> Fn:
    return lambda: torch.mm(x, weight)


def best_rate(grid: fg.core.Grid) -> float:
    """FLOPs a microsecond of the best product."""
    points = itertools.product(*grid.axes)
    return max(2 * m * n * k / us for (m, n, k), us in zip(points, grid.us))


def float32_rate(device: str) -> float:
    """The same in float32, of one large product."""
    n = 5000 if device.startswith("cuda") else 100
    x = torch.randn(n, n, device=device)
    return 2 * n**3 / each_us([_product(x, x)] * 3, device)


# --- kinds that move bytes ------------------------------------------------------------------------


def curves(sizes: Sizes, device: str) -> dict[str, fg.core.Curve]:
    """Times over bytes, by kind."""
    found: dict[str, list[tuple[float, float]]] = {}
    table = torch.randn(sizes.table, sizes.width, device=device, dtype=BF16)
    for T in sizes.tokens:
        for kind, (nbytes, fn) in _kinds(T, sizes.width, table).items():
            many = _calls(2.0 + nbytes / 3e6, float("inf")) if device.startswith("cuda") else 4
            found.setdefault(kind, []).append((nbytes, each_us([fn] * many, device)))
    made = {kind: tuple(zip(*points)) for kind, points in found.items()}
    return {kind: fg.core.Curve(nbytes, us) for kind, (nbytes, us) in made.items()}


def _kinds(T: int, E: int, table: Tensor) -> dict[str, tuple[float, Fn]]:
    """Bytes, and what moves them, of (T, E)."""
    device, n = table.device, T * E
    x, y = (torch.randn(T, E, device=device, dtype=BF16) for _ in range(2))
    wide, scale, row = x.float(), torch.rand(T, 1, device=device), x[0].clone()
    left, right = (z.view(T, -1, E // 4)[..., : E // 8].clone() for z in (x, y))
    ids = torch.randint(len(table), (T,), device=device)
    return {
        "pointwise": (3 * n * 2, lambda: torch.add(x, y)),
        "broadcast 2": (2 * n * 2 + E * 2, lambda: torch.mul(x, row)),
        "broadcast 4": (2 * n * 4 + T * 4, lambda: torch.mul(wide, scale)),
        "reduction": (n * 4 + T * 4, lambda: wide.mean(-1, keepdim=True)),
        "cat": (2 * n * 2, lambda: torch.cat([left, right], -1)),
        "index": (2 * n * 2 + T * 8, lambda: table[ids]),
    }


def tiny_us(device: str) -> float:
    """Of a kernel that has nothing to do."""
    x = torch.zeros(32, device=device)
    return each_us([lambda: torch.neg(x)] * 200, device)


def bandwidth(device: str) -> float:
    """Bytes a microsecond of a copy, read and written."""
    x = torch.ones(1 << 28 if device.startswith("cuda") else 1 << 20, device=device)
    y = torch.empty_like(x)
    return 2 * x.nbytes / each_us([lambda: torch.neg(x, out=y)] * 3, device)
