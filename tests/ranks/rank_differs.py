"""What two processes run that are not alike, and what each is then told."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from rank_steps import LIMITS, Batch, batch
from torch import Tensor

import fngraph as fg
from fngraph.core import BatchSpec, Dispatch

ARMED: dict[str, Any] = {}
"""What `trip` does, if anything: a function."""


@torch.library.custom_op("rank_tests::trip", mutates_args=())
def trip(w: Tensor) -> Tensor:
    """A copy of `w`; whatever else the test has asked for happens on the way."""
    for fn in list(ARMED.values()):
        fn()
    return w.clone()


@trip.register_fake
def _(w: Tensor) -> Tensor:  # a tape records by it
    for fn in list(ARMED.values()):
        fn()
    return torch.empty_like(w)


def made(
    tp: fg.Axis,
    rank: int = 0,
    act: Callable[[Tensor], Tensor] = torch.relu,
    dtype: torch.dtype = torch.float32,
    limits: fg.Limits = LIMITS,
    capture: Any = None,
    late: bool = False,
    padded: bool = False,
    dp: fg.Axis | None = None,
    device: str = "cpu",
    **options: Any,
) -> tuple[Any, dict[str, Tensor]]:
    """A step and its state. late: the tripping op comes after the collective; padded: a sum over
    T needs to know what padding is in each process."""

    def forward(w: Tensor, state: Any, batch: Batch) -> Any:
        h = act(batch.x.to(w.dtype) @ (w if late else trip(w)))
        if padded:
            h = torch.where((batch.slot > 0)[:, None], h, rank)
        h = fg.all_reduce(h, tp, "max") - rank if padded else fg.all_reduce(h, tp)
        h = fg.all_reduce(h, dp, "max") if dp is not None else h
        h = h * trip(w)[0, 0] if late else h
        summed = h.sum(0) if padded else h
        rows = state["rows"].index_put((batch.slot,), h.float())
        return summed, {"rows": rows}

    state = {"rows": torch.zeros(12, 8, device=device)}
    w = torch.eye(8, dtype=dtype, device=device)
    told = {"modes": "FULL", "sizes": (4, 8), **options}
    fast = fg.graphify(forward, donate="state", stage="batch", **told).bind(w)
    return fast.capture(state, limits, progress=False, **(capture or {})), state


def told(fn: Callable[[], Any]) -> str:
    """The error's class and text; "" if there is none."""
    try:
        fn()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def captures(rank: int, tp: fg.Axis) -> dict[str, str]:
    """What is said of steps that differ when they are captured."""
    one = rank == 1
    return {
        "limits": told(lambda: made(tp, limits=fg.Limits(16, 4 + one))),
        "sizes": told(lambda: made(tp, sizes=(4, 8, 12) if one else (4, 8))),
        "modes": told(lambda: made(tp, modes="PIECEWISE" if one else "FULL")),
        "code": told(lambda: made(tp, act=torch.tanh if one else torch.relu)),
        "dtype": told(lambda: made(tp, dtype=torch.bfloat16 if one else torch.float32)),
        "passes": told(lambda: made(tp, passes=("no_ops",) if one else ())),
        "padding": told(lambda: made(tp, rank=rank, padded=True)),
        "same padding": told(lambda: made(tp, padded=True)),
        "other numbers": told(lambda: made(tp, act=lambda x: x + float(rank))),
        "a budget": told(lambda: made(tp, capture={"memory_budget": 1 << 30})),
    }


def differs(rank: int) -> dict[str, Any]:
    """All of it, on one mesh, which stays whole."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    found: dict[str, Any] = dict(captures(rank, tp))
    step, state = made(tp)
    small, large = batch(0, 3, 2), batch(1, 7, 2)

    def steps(name: str, one: Any, **options: Any) -> None:
        before = state["rows"].clone()
        error = told(lambda: step(state, one, **options))
        found[name] = error, torch.equal(state["rows"], before), step.stats.steps

    steps("other keys", large if rank else small)
    steps("other modes", small, allowed=("NONE",) if rank else None)
    steps("other counts", batch(2, 2, 1) if rank else small)
    wrong = Batch(x=small.x, ids=small.ids, slot=small.slot, spec=BatchSpec(4, 2))
    steps("one is refused", wrong if rank else small)
    steps("beyond the limits", Batch(*[small.x] * 3, spec=BatchSpec(400, 2)) if rank else small)
    steps("then alike", small)
    chosen = step.dispatch(large.spec)
    assert isinstance(chosen, Dispatch)
    steps("decided for all", small, allowed=chosen)
    steps("decided otherwise", small, allowed=chosen if rank else step.dispatch(small.spec))
    steps("decided, other counts", large if rank else small, allowed=chosen)
    steps("decided by one", small, allowed=chosen if rank else None)
    bounds = fg.HostBounds(max_query_len=2 + rank, max_seq_len=9 + rank)
    bounded = Batch(x=small.x, ids=small.ids, slot=small.slot, spec=BatchSpec(3, 2, host=bounds))
    steps("other bounds", bounded, allowed=("FULL",))  # counts that were not prepared
    steps("decided, one is refused", wrong if rank else small, allowed=chosen)
    if rank:
        step.release(chosen.descriptor)
    steps("one must capture it", large)
    found["captured"] = len(step)
    found["times of one"] = told(
        lambda: step.times(chosen.descriptor, 2) if rank else step(state, large)
    )
    found["times of both"] = told(lambda: step.times(chosen.descriptor, 2))
    step.release(step.dispatch((large if rank else small).spec).descriptor)
    found["others lack"] = told(lambda: step.capture_some(0.0))
    step.release()
    found["a few"] = [step.capture_some(0.0 if rank else 1e9) for _ in range(3)]
    lazy, state = made(tp, sizes=(4, 8, 12) if rank else (4, 8), capture={"lazy": True})
    found["decided, other tables"] = told(lambda: lazy(state, small, allowed=chosen)), len(lazy)
    for how in ("raise", "eager"):
        one, state = made(tp, late=True, capture={"lazy": True, "on_failure": how})
        if rank:
            ARMED["now"] = fail
        error = told(one.capture_all)
        found[f"capture fails: {how}"] = error, [*one.failed.values()]
        ARMED.clear()
    found["and runs"] = told(lambda: one(state, small)), str(one.runs_as(small.spec).mode)
    if rank:  # and would try again
        one.release(one.dispatch(small.spec).descriptor)
    other = batch(3, 2, 1)  # of counts that were not prepared: the same key
    state["rows"].zero_()
    error = told(lambda: one(state, other))
    right = torch.equal(state["rows"][other.slot], 2 * torch.relu(other.x))
    found["one would try again"] = error, right, len(one), str(one.runs_as(other.spec).mode)
    one, state = made(tp)
    twice = 2 * torch.eye(8)
    found["rebound"] = []
    for by in ((), (1,), (0,), (0, 1), (0,), (1,)):
        if rank in by:
            one.rebind(w=twice)
        state["rows"].zero_()
        error = told(lambda: one(state, small))
        rows = state["rows"][small.slot]
        factors = [n for n in (0, 2, 4) if torch.equal(rows, n * torch.relu(small.x))]
        found["rebound"].append((error, factors))
    fresh, slept = made(tp), (one, state)
    one.sleep()
    one.wake()
    one, state = fresh if rank else slept  # whose weights are others, but never rebound
    found["one is new"] = told(lambda: one(state, small))
    return found


def fail() -> None:
    raise ValueError("no such luck")
