"""What two processes run: a layer split over them, of which one flips a bit."""

from __future__ import annotations

import warnings
from typing import Any

import planted
import torch
from rank_steps import Batch, batch

import fngraph as fg

E = 8
LAYERS = 3


def make_forward(tp: fg.Axis) -> Any:
    """A split product a layer, summed over the processes; and its rows kept."""

    def forward(params: Any, state: Any, batch: Batch) -> Any:
        h = batch.x
        for layer in params["layers"]:
            part = torch.tanh(h @ layer["up"])
            h = h + fg.all_reduce(part @ layer["down"], tp) / 8
        rows = state["rows"].index_put((batch.slot,), h)
        return h, {"rows": rows}

    return forward


def params(rank: int) -> dict[str, Any]:
    """Each process's own part."""
    g = torch.Generator().manual_seed(5 + rank)
    draw = lambda: torch.randn(E, E, generator=g) / 3  # noqa: E731
    return {"layers": [{"up": draw(), "down": draw()} for _ in range(LAYERS)]}


def found_by_all(rank: int, at: int) -> dict[str, Any]:
    """What each process is told of a bit that process 1 flips."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=60, tp=2)["tp"]
    state = {"rows": torch.zeros(12, E)}
    fast = fg.graphify(make_forward(tp), donate="state", stage="batch", modes="FULL", sizes=(4, 8))
    given, limits = params(rank), fg.Limits(16, 4)
    stage = fast.trace(given, state, limits=limits).split().lower().compile()
    if rank == 1:
        stage = planted.with_flipped_op(stage, "aten.tanh.default", at)
    step = stage.capture(given, state, verify=0.01, lazy=True)
    calls = 0
    for i in range(500):
        step(state, batch(i, 3 + i % 6, 2))
        calls += 1
        if step.differences:
            break
    (kept,) = step.differences
    found = fg.bisect(step, kept)
    return {
        "calls": calls, "verified": step.stats.verified, "own": bool(kept.leaves),
        "rank": found.rank, "kind": found.kind, "op": found.op, "line": found.line,
        "text": str(found), "told": dict(found.told),
    }  # fmt: skip


def one_raises(rank: int) -> str:
    """A process whose copy fails: nobody runs the step a second time, and each says why."""
    tp = fg.make_mesh("cpu", timeout=60, tp=2)["tp"]
    state = {"rows": torch.zeros(12, E)}
    fast = fg.graphify(make_forward(tp), donate="state", stage="batch", modes="FULL", sizes=(4,))
    step = fast.bind(params(rank)).capture(state, fg.Limits(16, 4), progress=False, verify=1.0)
    if rank == 1:
        step._parts_of = lambda keys: 1 / 0  # type: ignore[method-assign, attr-defined]
    with warnings.catch_warnings(record=True):
        warnings.simplefilter("always")
        step(state, batch(0, 3, 2))
    (why,) = step.stats.unverified
    return why
