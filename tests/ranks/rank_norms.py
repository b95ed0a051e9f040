"""What processes run of passes over collectives: two halves of a layer whose weights are split, in
graphs, beside bare `forward`; and on GPUs the kernel by itself."""

from __future__ import annotations

import dataclasses
import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.torch_facts.symmetric import ON_ONE_DEVICE

E, F = 32, 48
BATCHES = ((3, 2), (8, 4), (1, 1), (11, 3), (5, 2))
"""T, R; the fourth is beyond all keys."""
LIMITS = fg.Limits(max_tokens=16, max_reqs=4)


@fg.struct
class Batch:
    """Padding of rows that nobody reads."""

    x: Tensor = fg.buffer(f"T {E}", "float32")
    last: Tensor = fg.buffer("R", "int64", pad=0, min=0)
    spec: fg.BatchSpec = fg.host()


def batch(seed: int, T: int, R: int, device: str = "cpu") -> Batch:
    """The same in each process of a seed."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(T, E, generator=g)
    last = torch.randint(0, T, (R,), generator=g)
    return Batch(x=x.to(device), last=last.to(device), spec=fg.BatchSpec(T, R))


def params(rank: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> dict[str, Tensor]:
    """Each process's own parts of products, and norms that are alike."""
    own, alike = (torch.Generator().manual_seed(n) for n in (100 + rank, 7))
    made = {
        name: torch.randn(*shape, generator=own) / shape[1] ** 0.5
        for name, shape in (("up", (F, E)), ("gate", (F, E)), ("down", (E, F)), ("out", (E, F)))
    }
    made |= {name: torch.rand(E, generator=alike) + 0.5 for name in ("first", "second", "third")}
    return {name: x.to(dtype).to(device) for name, x in made.items()}


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As models do."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
    return wide.to(x.dtype) * weight


def make_forward(tp: fg.Axis, dtype: torch.dtype = torch.float32) -> Any:
    """Two sums over processes that are added and normed, then one that is not."""

    def forward(params: Any, batch: Batch) -> Any:
        p, x = params, batch.x.to(dtype)
        h = rms_norm(x, p["first"])
        x = x + fg.all_reduce(linear(torch.relu(linear(h, p["up"])), p["out"]), tp)
        h = rms_norm(x, p["second"])
        h = torch.nn.functional.silu(linear(h, p["gate"])) * linear(h, p["up"])
        x = fg.all_reduce(linear(h, p["down"]), tp) + x
        h = rms_norm(x, p["third"])
        x = x + fg.all_reduce(linear(torch.relu(linear(h, p["up"])), p["out"]), tp)
        return rms_norm(x[batch.last], p["first"]).float(), h.float()

    return forward


def in_graphs(
    rank: int, size: int, cases: Sequence[tuple[str, tuple[str, ...], str]], compile: str = "none"
) -> dict[tuple[str, str], tuple[float, dict[str, int]]]:
    """By name and mode: how far results are from bare forward's at most, and how often each pass
    matched.

    Args:
        cases: a name, passes, a mode.
    """
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=60, tp=size)["tp"]
    forward, weights = make_forward(tp), params(rank)
    batches = [batch(i, T, R) for i, (T, R) in enumerate((*BATCHES, BATCHES[0]))]
    wanted = [forward(weights, one) for one in batches]
    found = {}
    for name, passes, mode in cases:
        fast = fg.graphify(
            forward, stage="batch", modes=mode, sizes=(4, 8), passes=passes, compile=compile
        )
        step = fast.bind(weights).capture(LIMITS, guards=True, progress=False)
        off = [
            (got - want).abs().max().item()
            for one, results in zip(batches, wanted)
            for got, want in zip(step(one), results, strict=True)
        ]
        found[name, mode] = max(off), dict(step.stats.passes)
    return found


# on GPUs


def _mesh(shares_device: bool, size: int) -> fg.Mesh:
    """Of GPUs, or of processes on one GPU: torch allows that for such memory, and NCCL does not."""
    if shares_device:
        os.environ.update({ON_ONE_DEVICE: "1", "LOCAL_RANK": "0"})
        torch.cuda.set_device(0)
        dist.init_process_group("gloo")
    return fg.make_mesh("cuda", timeout=60, tp=size)


SHAPES = (
    (1, 4096), (3, 80), (64, 4096), (300, 1024), (7, 8192), (1200, 4096), (5, 512), (2, 33),
)  # fmt: skip


def on_devices(rank: int, size: int, shares_device: bool) -> dict[str, Any]:
    """The kernel by itself in one and two shots, and in a step of many batches."""
    from fngraph.ops.symmetric import ONE_SHOT, TWO_SHOT
    from fngraph.ops.triton.reducing import all_reduce_rms_norm
    from fngraph.ranks.symmetric import shared_of

    mesh = _mesh(shares_device, size)
    tp, found = mesh["tp"], {"wrong": [], "steps": []}
    shared = shared_of(tp.name, tp.group)
    assert shared is not None
    calls = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for rows, width in SHAPES:
            calls, normed = calls + 1, []
            for way in (ONE_SHOT, TWO_SHOT):
                draws = [torch.Generator().manual_seed(1000 * calls + r) for r in range(size + 1)]
                *xs, y = (torch.randn(rows, width, generator=g).to(dtype).cuda() for g in draws)
                weight = y[0] + 1
                got = all_reduce_rms_norm(xs[rank], y, weight, 1e-5, False, shared, way)
                total = xs[0].float()
                for x in xs[1:]:
                    total = total + x.float()
                want = torch.ops.fngraph.add_rms_norm(total.to(dtype), y, weight, 1e-5, False)
                bound = 1e-4 if dtype == torch.float32 else 2e-2
                same = torch.equal(got[0], want[0])
                if not same or not torch.allclose(got[1], want[1], atol=bound, rtol=bound):
                    found["wrong"].append((str(dtype), rows, width, way))
                normed.append(got[1])
            if not torch.equal(normed[0], normed[-1]):
                found["wrong"].append((str(dtype), rows, width, "other bits in two shots"))
    forward, weights = make_forward(tp), params(rank, device=mesh.device)
    fast = fg.graphify(
        forward, stage="batch", modes="FULL", sizes=(4, 8, 16), passes=("all_reduce_rms_norm",)
    )
    if shares_device:  # the sum that no norm follows is gloo's there, which no graph can hold
        return found
    step = fast.bind(weights).capture(LIMITS, progress=False)
    found["matches"] = dict(step.stats.passes)
    for i in range(300):
        one = batch(i, 1 + i % 16, 1, mesh.device)
        off = [(a - b).abs().max().item() for a, b in zip(step(one), forward(weights, one))]
        found["steps"].append(max(off))
    return found


MANY = (512, 1024)
"""Sizes of keys from which products and collectives go at once."""


def own_rows(rank: int, size: int, passes: tuple[str, ...], device: str) -> dict[str, Any]:
    """Of many rows: how far results are from bare forward's, by how many; and matches. A batch that
    is beyond all keys has torch make more room, and graphs are launched again behind it."""
    from fngraph.ranks.symmetric import shared_of

    mesh = fg.make_mesh(device, timeout=60, tp=size)
    forward, weights = make_forward(mesh["tp"]), params(rank, device=mesh.device)
    fast = fg.graphify(forward, stage="batch", modes="FULL", sizes=MANY, passes=passes)
    step = fast.bind(weights).capture(fg.Limits(4 * MANY[-1], 4), progress=False)
    found: dict[str, Any] = {"matches": dict(step.stats.passes), "off": []}
    for i, T in enumerate((*MANY, 700, 3, 4 * MANY[-1], *MANY, 700)):
        one = batch(i, T, 2, mesh.device)
        mode = str(step.dispatch(one.spec).mode)
        off = [(a - b).abs().max().item() for a, b in zip(step(one), forward(weights, one))]
        found["off"].append((T, mode, max(off)))
    if device == "cuda":  # beside its own block, what graphs go through: torch makes more of it
        shared = shared_of("tp", mesh["tp"].group)
        found["kept"] = 0 if shared is None else len(shared.kept) - 1
    return found


def in_a_graph(rank: int, size: int, shares_device: bool, launches: int = 200) -> dict[str, Any]:
    """Eight ops in one CUDA graph, launched again and again with other numbers: how many launches
    were wrong, and us an op."""
    mesh = _mesh(shares_device, size)
    tp = mesh["tp"]
    x, y = (torch.zeros(1, 4096, dtype=torch.bfloat16, device=mesh.device) for _ in range(2))
    weight = torch.ones(4096, dtype=torch.bfloat16, device=mesh.device)

    def ops() -> list[Tensor]:
        made, total = [], y
        for _ in range(8):
            total, normed = torch.ops.fngraph.all_reduce_rms_norm(
                x, total, weight, 1e-5, False, tp.name, tp.group
            )
            made += [total, normed]
        return made

    ops()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = ops()
    wrong = 0
    for i in range(launches):
        x.fill_((i + rank) % 5)
        y.fill_(i % 3)
        graph.replay()
        each = sum((i + r) % 5 for r in range(size))
        want = [float(i % 3 + each * n) for n in range(1, 9)]
        wrong += [made[2 * n][0, -1].item() for n in range(8)] != want
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    for _ in range(50):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return {"wrong": wrong, "us": begin.elapsed_time(end) / 50 / 8 * 1e3}


def alone(rank: int, shares_device: bool) -> None:
    """One whose peer does not come: its error says after how many seconds."""
    from fngraph.ops.symmetric import ONE_SHOT
    from fngraph.ops.triton.reducing import all_reduce_rms_norm
    from fngraph.ranks.symmetric import shared_of

    tp = _mesh(shares_device, 2)["tp"]
    shared = shared_of(tp.name, tp.group)
    assert shared is not None
    x = torch.ones(2, 4096, device="cuda")
    if rank == 1:
        time.sleep(8)
        return
    began = time.monotonic()
    try:
        soon = dataclasses.replace(shared, wait_s=2)
        all_reduce_rms_norm(x, x, x[0], 1e-5, False, soon, ONE_SHOT)
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise RuntimeError(f"after {time.monotonic() - began:.0f} s: {error}") from None
