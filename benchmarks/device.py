"""Kernels on a CUDA device: random batches, device times, bandwidth, errors."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor

import fngraph as fg

DTYPE = torch.bfloat16
PREFILLS = ((4096,), (1024,) * 4, (3072, 700, 300, 24))  # tokens of each prompt
Fn = Callable[[], Any]


def draw(*shape: int) -> Tensor:
    """Normal numbers on the device."""
    return torch.randn(shape, device="cuda", dtype=DTYPE)


def starts_of(new: Sequence[int]) -> Tensor:
    """Where the tokens of each request begin, and the end: (R + 1,)."""
    return torch.tensor([0, *itertools.accumulate(new)], device="cuda", dtype=torch.int32)


def scattered(new: Sequence[int], lens: Sequence[int], block: int) -> Any:
    """Requests of `lens` tokens, the last `new` of which are new, in blocks in random order."""
    columns = -(-max(lens) // block)
    table = torch.randperm(len(lens) * columns, device="cuda").view(len(lens), columns)
    slots = []
    for row, n, length in zip(table, new, lens):
        i = torch.arange(length - n, length, device="cuda")
        slots.append(row[i // block] * block + i % block)
    seq_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    return fg.ops.AttentionMeta(torch.cat(slots), seq_lens, starts_of(new), table.int())


@contextlib.contextmanager
def counted_compilations() -> Iterator[list[str]]:
    """The names of Triton's kernels, once for each form that becomes ready to launch meanwhile."""
    names: list[str] = []
    try:
        from triton import knobs
    except ImportError:
        yield names
        return

    def note(*, fn: Any, **_: Any) -> None:
        names.append(fn.name)

    before, knobs.runtime.jit_post_compile_hook = knobs.runtime.jit_post_compile_hook, note
    try:
        yield names
    finally:
        knobs.runtime.jit_post_compile_hook = before


def in_graph(fn: Fn, calls: int = 1) -> torch.cuda.CUDAGraph:
    """So many calls of what is warm."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            fn()
    return graph


def once_ms(fn: Fn, calls: int = 1) -> float:
    """Device time of so many calls in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(calls):
        fn()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def device_us(fn: Fn, target_ms: float = 4.0) -> float:
    """Median device time of one call, in us, over replays of a graph of as many as take so long."""
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    calls = max(2, min(50, int(target_ms * 3 / once_ms(fn, 3))))
    graph = in_graph(fn, calls)
    graph.replay()
    return median(once_ms(graph.replay) * 1e3 / calls for _ in range(7))


def copy_bandwidth() -> float:
    """TB/s of a device copy, bytes read and written: the driver's, or a kernel's if faster."""
    x = torch.ones(1 << 28, device="cuda")
    y = torch.empty_like(x)
    us = min(device_us(lambda: y.copy_(x)), device_us(lambda: torch.neg(x, out=y)))
    peak = 2 * x.nbytes / us / 1e6
    print(f"copy: {peak:.2f} TB/s")
    return peak


def error_of(got: Tensor, want: Tensor, what: str) -> float:
    """The largest error of a (token, head) row, by the row's norm; of a large one this ends."""
    got, want = got.double(), want.double()
    error = float(((got - want).norm(dim=-1) / want.norm(dim=-1)).max())
    if not error < 1e-2:
        raise SystemExit(f"{what} is wrong: {error}")
    return error


def wait(device: str) -> None:
    """Until the device has done all."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def release(device: str) -> None:
    """Give memory back, for weights of another model."""
    gc.collect()
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
