"""Kernels on a CUDA device: random inputs, device times, errors, tables."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fngraph as fg

DTYPE = torch.bfloat16
Fn = Callable[[], Any]


def draw(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def device_us(fn: Fn, target_ms: float = 4.0) -> float:
    """Median device time of one call, in us, over replays of a graph of as many as take so long."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        fn()
    end.record()
    torch.cuda.synchronize()
    calls = max(2, min(50, int(target_ms * 3 / begin.elapsed_time(end))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    graph.replay()
    times = []
    for _ in range(7):
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / calls)
    return median(times)


def copy_bandwidth() -> float:
    """TB/s of a device copy, bytes read and written: the driver's, or a kernel's if faster."""
    x = torch.ones(1 << 28, device="cuda")
    y = torch.empty_like(x)
    us = min(device_us(lambda: y.copy_(x)), device_us(lambda: torch.neg(x, out=y)))
    return 2 * x.nbytes / us / 1e6


def worst(got: Tensor, want: Tensor) -> float:
    """The largest error of a (token, head) row, by the row's norm."""
    got, want = got.double(), want.double()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())


def show(title: str, rows: list[dict[str, Any]]) -> None:
    """A table; numbers short."""
    names = [name for name in rows[0] if not name.endswith("failed")]

    def cell(x: Any) -> str:
        if isinstance(x, float):
            return f"{x:.3f}" if x < 10 else f"{x:.1f}"
        return "-" if x is None else str(x)

    print(
        f"\n{title}\n{fg.core.text.table(names, [[cell(r.get(n)) for n in names] for r in rows])}"
    )
    for row in rows:
        for name in row:
            if name.endswith("failed"):
                print(f"  batch {row['batch']}, context {row['context']}: {name}: {row[name]}")
