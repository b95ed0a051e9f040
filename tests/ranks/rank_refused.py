"""Calls of graphified functions that one process refuses before it has a step for them, and what
each process has of these and of the calls that follow."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from rank_differs import told
from torch import Tensor

import fngraph as fg

Call = Callable[[], Tensor]
OF_X = {"NumPy": np.ones((3, 2)), "None": None, "a list": [1.0]}
"""What one process passes for x, which is a tensor."""
AFTER = (1.0, 2.0, 3.0)
"""What is passed to the calls that follow, by all."""
WINDOWS = 4
"""Of two calls, of which one is verified."""
SOME = ("other params", "NumPy params", "too few")
REFUSED = [
    *(f"known, {kind}" for kind in (*OF_X, *SOME)), *(f"a spec, {kind}" for kind in SOME),
    *(f"at first, {kind}" for kind in (*OF_X, "too few")), "twice at first, NumPy",
    "verified, NumPy",
]  # fmt: skip
STATIC = ("static, known", "static, at first")
AHEAD = ("times", "capture_some", "capture_all", "recapture")


@fg.struct
class Batch:
    """Of a spec."""

    x: Tensor = fg.buffer("T 2", "float32")
    spec: fg.BatchSpec = fg.host()


def x_of(number: float) -> Tensor:
    return torch.full((3, 2), number)


def batch_of(number: float) -> Batch:
    return Batch(x=x_of(number), spec=fg.BatchSpec(3, 1))


def params() -> dict[str, Tensor]:
    return {"w": torch.ones(2)}


def calls_of(name: str, tp: fg.Axis, refuses: bool) -> list[Call]:
    """One that a process refuses, and those around it."""
    when, _, kind = name.partition(", ")
    give: Any = batch_of if when == "a spec" else x_of

    def forward(p: dict[str, Tensor], x: Any) -> Tensor:
        return fg.all_reduce((x.x if when == "a spec" else x) * p["w"], tp)

    if when == "a spec":
        forward.__annotations__["x"] = Batch
    verify = 0.5 if when == "verified" else 0.0
    fast: Any = fg.graphify(forward, stage="x", modes="FULL", verify=verify)
    p, one = params(), give(9.0)
    others = {
        "other params": (params(), one), "NumPy params": ({"w": np.ones(2)}, one), "too few": (p,),
        **{of: (p, x) for of, x in OF_X.items()},
    }  # fmt: skip
    given = others[kind] if refuses else (p, one)
    before: list[Call] = [] if "at first" in when else [lambda: fast(p, give(0.0))]
    refused: list[Call] = [lambda: fast(*given)] * (1 + when.startswith("twice"))
    after = AFTER * (WINDOWS if verify else 1)
    return before + refused + [lambda i=i: fast(p, give(i)) for i in after]  # type: ignore[misc]


def static_calls(name: str, tp: fg.Axis, refuses: bool) -> list[Call]:
    """Of a function that has several programs: the first of one of them is refused, and one of a
    program without collectives comes next."""

    def forward(p: dict[str, Tensor], x: Tensor, how: str) -> Tensor:
        return x + p["w"] if how == "plain" else fg.all_reduce(x * p["w"], tp, how)

    fast: Any = fg.graphify(forward, stage="x", modes="FULL")
    p = params()
    before: list[Call] = [lambda: fast(p, x_of(0.0), "sum")] if name == STATIC[0] else []
    between: list[Call] = [
        lambda: fast(p, None if refuses else x_of(9.0), "max"), lambda: fast(p, x_of(9.0), "plain")
    ]  # fmt: skip
    after = [(i, how) for how in ("sum", "max") for i in AFTER]
    return before + between + [lambda i=i, how=how: fast(p, x_of(i), how) for i, how in after]  # type: ignore[misc]


def ahead_calls(name: str, tp: fg.Axis, refuses: bool) -> list[Call]:
    """What captures or replays between the steps of one that is bound; then steps."""
    p = params()

    def forward(p: dict[str, Tensor], x: Tensor) -> Tensor:
        return fg.all_reduce(x * p["w"], tp)

    fast: Any = fg.graphify(forward, stage="x", modes="FULL")
    step = fast.bind(p).capture(batch=x_of(0.0), progress=False)
    (key,) = step
    other = fg.BatchDescriptor(7) if refuses else key

    def between() -> None:
        if name == "times":
            step.times(other, 1)
        elif name == "recapture":
            step.recapture(other)
        elif name == "capture_some":
            step.release()
            step.capture_some("1" if refuses else 1.0)
        else:
            step.release()
            was = p["w"].data
            p["w"].data = was.clone() if refuses else was
            try:
                step.capture_all()
            finally:
                p["w"].data = was

    return [between, *(lambda i=i: step(x_of(i)) for i in AFTER)]  # type: ignore[list-item, misc]


def found_of(calls: Sequence[Call]) -> list[Any]:
    """The first number of what each call gives, or its error."""
    got: list[Tensor] = []
    return [told(lambda call=call: got.append(call())) or got[-1][0, 0].item() for call in calls]  # type: ignore[misc]


def refusing(rank: int) -> Callable[[str], dict[str, list[Any]]]:
    """What does one of them, on one mesh, which stays whole."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]

    def do(name: str) -> dict[str, list[Any]]:
        make = static_calls if name in STATIC else ahead_calls if name in AHEAD else calls_of
        return {name: found_of(make(name, tp, rank == 0))}

    return do
