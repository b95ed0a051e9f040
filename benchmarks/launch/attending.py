"""Layers of attention under `fg.graphify`: a call of it in NONE and between graphs; a graph's
boundaries; device times over bytes of the cache, and over FLOPs. What is measured is the difference
between many layers and few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import fngraph as fg
from benchmarks.launch.mixes import (
    BURSTS,
    LEAST_US,
    NOTHING,
    Steps,
    device_us,
    hosts_in_turn,
)
from benchmarks.workload import BF16, BLOCK_SIZE

Of = Callable[[Tensor], float]
FEW, MANY = 2, 8  # layers that are compared


@fg.struct
class Tokens:
    x: Tensor = fg.buffer("T W", "bfloat16")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0)
    spec: fg.BatchSpec = fg.host()


class Heads(NamedTuple):
    """Of attention: queries, keys, and their width."""

    queries: int
    keys: int
    width: int


def layers(heads: Heads, count: int) -> Callable[..., Any]:
    """A function that attends so often, with one op between."""
    H, K, D = heads

    def forward(cache: Any, batch: Tokens) -> Any:
        x = batch.x
        for kv in cache:
            q = F.silu(x).view(-1, H, D)
            k = x[:, : K * D].reshape(-1, K, D)
            x = fg.ops.attention(q, k, k, kv, batch)[0].reshape(-1, H * D)
        return x, cache

    return forward


def tokens_of(heads: Heads, reqs: int, new: int, context: int, B: int, device: str) -> Tokens:
    """The last `new` tokens of each request, its blocks one after the other."""
    each = -(-context // BLOCK_SIZE)
    blocks = torch.arange(reqs * each, dtype=torch.int32).view(reqs, each)
    at = torch.arange(context - new, context).repeat(reqs)
    owner = torch.arange(reqs).repeat_interleave(new)
    slots = blocks[owner, at // BLOCK_SIZE].long() * BLOCK_SIZE + at % BLOCK_SIZE
    spec = fg.BatchSpec(
        reqs * new, reqs, query_len=1 if new == 1 else None, host=fg.HostBounds(new, context)
    )
    made = Tokens(
        torch.randn(reqs * new, heads.queries * heads.width).to(BF16), slots,
        torch.full((reqs,), context, dtype=torch.int32),
        torch.arange(0, reqs * new + 1, new, dtype=torch.int32), F.pad(blocks, (0, B - each)), spec,
    )  # fmt: skip
    leaves = {name: getattr(made, name).to(device) for name in fg.core.buffers_of(Tokens)}
    return Tokens(**leaves, spec=spec)


class Layers(NamedTuple):
    """Steps of some layers of attention, the work of one, and the ops beside it."""

    call: Callable[[Tokens, str], Any]
    work: Callable[[Tokens], Any]
    beside: Counter[str]


def made_layers(
    heads: Heads, count: int, sizes: Sequence[int], reqs: int, context: int, modes: str,
    device: str, backend: str | None,
) -> Layers:  # fmt: skip
    """Captured, of requests of so many tokens."""
    B = -(-context // BLOCK_SIZE)
    shape = (reqs * B, BLOCK_SIZE, heads.keys, heads.width)
    cache = tuple(
        tuple(torch.randn(shape, device=device, dtype=BF16) for _ in range(2))
        for _ in range(count)
    )  # fmt: skip
    limits = fg.Limits(max(sizes), reqs, B=B, W=heads.queries * heads.width)
    fast = fg.graphify(
        layers(heads, count), modes=modes, donate="cache", stage="batch", sizes=tuple(sizes),
        limits=limits, backends={"attention": backend}, outputs="borrow",
    )  # fmt: skip
    example = tokens_of(heads, 1, 1, 1, B, device)
    lowered = fast.trace(cache, batch=example).split().lower()
    step = lowered.compile().capture(cache)
    model = lowered.launch_model(NOTHING)

    def parts(spec: fg.BatchSpec) -> tuple[fg.core.Part, ...]:
        sizes = {"T": spec.num_tokens, "R": spec.num_reqs, **limits.dims}
        return model.count(sizes, sizes, spec.host.max_seq_len)

    def work(batch: Tokens) -> Any:
        return next(part.works[0] for part in parts(batch.spec) if part.cut)

    runs = (part for part in parts(example.spec) if not part.cut)
    beside = Counter(work.called or work.kind for part in runs for work in part.works)
    return Layers(lambda batch, mode: step(cache, batch, allowed=(mode,)), work, beside)


class Attention(NamedTuple):
    """What layers of attention were measured to take.

    Attributes:
        decode: over bytes.
        prefill: over FLOPs, by width of a head.
        boundary_us: device.
        call_us: host, of a call in NONE.
        cut_us: host, of a call between graphs.
    """

    decode: fg.core.Curve
    prefill: dict[int, fg.core.Curve]
    boundary_us: float
    call_us: float
    cut_us: float


class Asked(NamedTuple):
    """Where attention is measured."""

    heads: tuple[Heads, ...]
    reqs: tuple[int, ...]
    context: int
    chunks: tuple[int, ...]


WHOLE = Asked((Heads(16, 4, 64), Heads(16, 4, 128)), (1, 6, 24, 96), 1024, (384, 1536, 6144))
TINY = Asked((Heads(4, 2, 16),), (1, 3), 32, (16, 32))


def attention(
    asked: Asked, device: str, backend: str | None, found: Steps, replay: float, between_us: Of,
    bursts: int = BURSTS,
) -> Attention:  # fmt: skip
    """Differences between few and many layers.

    Args:
        found: of ops, which layers have too.
        replay: of the host.
        between_us: device, what a layer takes beside attention, of its operand.
    """
    heads, most = asked.heads[-1], max(asked.reqs)
    few, many = (
        made_layers(
            heads, n, asked.reqs, most, asked.context, "FULL_AND_PIECEWISE", device, backend
        )
        for n in (FEW, MANY)
    )
    more = MANY - FEW
    points, edges, hosts = [], [], []
    for reqs in asked.reqs:
        batch = tokens_of(heads, reqs, 1, asked.context, asked.context // BLOCK_SIZE, device)

        def per_layer(mode: str, batch: Tokens = batch) -> float:
            less, all_ = (
                device_us(lambda: one.call(batch, mode), device, bursts)  # noqa: B023
                for one in (few, many)
            )
            return (all_ - less) / more

        full = per_layer("FULL")
        points.append((many.work(batch).nbytes, max(full - between_us(batch.x), LEAST_US)))
        if reqs != most:
            edges.append((per_layer("PIECEWISE") - full) / 2)
            hosts.append(hosts_us(few, many, batch, found, device, bursts))
    calls = many.beside - few.beside
    beside_us = sum(count * found.op_us[kind] for kind, count in calls.items()) / more
    call_us = median(none for none, _ in hosts) - beside_us
    cut_us = median(piecewise for _, piecewise in hosts) - replay - found.node_us
    prefill = {
        one.width: prefill_curve(one, asked.chunks, device, backend, between_us, bursts)
        for one in asked.heads
    }
    return Attention(
        _rising(points, "nbytes"), prefill, max(median(edges), 0.0), max(call_us, LEAST_US),
        max(cut_us, LEAST_US),
    )  # fmt: skip


def hosts_us(
    few: Layers, many: Layers, batch: Tokens, found: Steps, device: str, bursts: int
) -> tuple[float, float]:
    """Of a layer in NONE and in PIECEWISE, on a host as fast as it was when ops were measured."""
    calls = [
        lambda one=one, mode=mode: one.call(batch, mode)  # type: ignore[misc]
        for mode in ("NONE", "PIECEWISE")
        for one in (few, many)
    ]
    less, all_, less_cut, all_cut, mix = hosts_in_turn([*calls, found.none], device, bursts)
    by = found.none_us / mix / (MANY - FEW)
    return (all_ - less) * by, (all_cut - less_cut) * by


def prefill_curve(
    heads: Heads, chunks: Sequence[int], device: str, backend: str | None, between_us: Of,
    bursts: int,
) -> fg.core.Curve:  # fmt: skip
    """Of one request's first tokens."""
    most = max(chunks)
    few, many = (
        made_layers(heads, n, chunks, 1, most, "FULL", device, backend) for n in (1, 3)
    )  # fmt: skip
    points = []
    for chunk in chunks:
        batch = tokens_of(heads, 1, chunk, chunk, -(-most // BLOCK_SIZE), device)
        less, more = (
            device_us(lambda: one.call(batch, "FULL"), device, max(bursts // 5, 1))  # noqa: B023
            for one in (few, many)
        )
        us = (more - less) / 2 - between_us(batch.x)
        points.append((many.work(batch).flops, max(us, LEAST_US)))
    return _rising(points, "flops")


def _rising(points: Sequence[tuple[float, float]], over: str) -> fg.core.Curve:
    """A curve of points, of which none may be faster than a smaller one: that would be noise."""
    sizes, us = zip(*sorted(points))
    return fg.core.Curve(sizes, tuple(np.maximum.accumulate(us).tolist()), over)
