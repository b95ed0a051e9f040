"""Random programs of collectives, rehearsed: what is claimed of padding, where all processes have
the same program and each has its own numbers."""

from __future__ import annotations

import dataclasses
import random
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rank_steps import E
from torch import Tensor

import fngraph as fg
from fngraph.errors import RowsError
from fngraph.fx.rows.check import facts_of
from fngraph.fx.rows.rehearsal import rehearse
from fngraph.fx.tracing.refusals import Refusals
from fngraph.rehearsing import padded_leaves

INF = float("inf")


@fg.struct
class Batch:
    """Pads of several kinds."""

    x: Tensor = fg.buffer(f"T {E}", "float32")
    ids: Tensor = fg.buffer("T", "int64", pad=0, min=0)
    slot: Tensor = fg.buffer("T", "int64", pad=-1)
    place: Tensor = fg.buffer("T", "int64", pad=0, min=0)
    starts: Tensor = fg.buffer("R + 1", "int64", pad="stride")
    spec: fg.BatchSpec = fg.host()


def batch(g: torch.Generator, T: int, R: int) -> Batch:
    """Odd numbers, each process's own."""
    cuts = torch.randperm(T - 1, generator=g)[: R - 1].sort()[0] + 1 if T > 1 else torch.empty(0)
    starts = torch.cat([torch.tensor([0]), cuts.long(), torch.tensor([T])])
    return Batch(
        x=(torch.randint(-9, 9, (T, E), generator=g) * 2 + 1) / 4,
        ids=torch.randint(0, 6, (T,), generator=g),
        slot=torch.randint(0, 9, (T,), generator=g),
        place=torch.randint(1, 12, (T,), generator=g),
        starts=starts,
        spec=fg.BatchSpec(T, R),
    )


Value = Any
LARGEST = torch.finfo(torch.float32).max
OPS: tuple[Callable[[Value, Any, Batch, fg.Axis], Value], ...] = (
    lambda x, w, b, a: fg.all_reduce(x, a),
    lambda x, w, b, a: fg.all_reduce(x, a, "max"),
    lambda x, w, b, a: fg.all_reduce(x, a, "min"),
    lambda x, w, b, a: fg.all_gather(x, a, x.ndim - 1)[..., :E],
    lambda x, w, b, a: fg.all_gather(x, a, 1)[..., a.size - 1 :: a.size],
    lambda x, w, b, a: fg.all_gather(fg.reduce_scatter(x, a, 1), a, 1),
    lambda x, w, b, a: fg.all_to_all(x, a, 1),
    lambda x, w, b, a: fg.all_gather(x, a)[: x.shape[0]],
    lambda x, w, b, a: torch.where((b.slot >= 0)[:, None], x, 0),
    lambda x, w, b, a: torch.where((b.slot >= 0)[:, None], x, -INF),
    lambda x, w, b, a: torch.where((b.slot >= 0)[:, None], x, 1),
    lambda x, w, b, a: torch.where((b.slot >= 0)[:, None], x, w["row"]),
    lambda x, w, b, a: x * (b.slot >= 0)[:, None],
    lambda x, w, b, a: w["table"][b.ids],
    lambda x, w, b, a: w["table"][fg.all_reduce(b.ids, a, "max")],
    lambda x, w, b, a: w["table"][fg.all_gather(b.ids[:, None], a, 1)[:, 0]],
    lambda x, w, b, a: x @ w["square"],
    lambda x, w, b, a: x @ fg.all_gather(w["square"][: E // a.size], a),
    lambda x, w, b, a: x.relu() + w["row"],
    lambda x, w, b, a: x - x.clamp(max=40),
    lambda x, w, b, a: x + fg.all_reduce(x.sum(0), a),
    lambda x, w, b, a: x + fg.all_reduce(x, a, "max").amax(0),
    lambda x, w, b, a: x * fg.all_reduce(x, a).prod(0),
    lambda x, w, b, a: x.cumsum(0),
    lambda x, w, b, a: x + fg.all_reduce(torch.zeros(12, E).index_put((b.place,), x), a)[1:].sum(0),
    lambda x, w, b, a: x + fg.all_gather(torch.zeros(12, E).index_put((b.place,), x), a)[12].sum(),
    lambda x, w, b, a: x + fg.all_gather(torch.zeros(12, E).index_put((b.place,), x), a)[13:].sum(),
    lambda x, w, b, a: x + fg.all_to_all(kept(x, b), a, 1)[1:].sum(),
    lambda x, w, b, a: x + fg.all_reduce(b.starts, a, "max").diff()[0],
    lambda x, w, b, a: fg.all_reduce(x.to(torch.bfloat16), a).float(),
    lambda x, w, b, a: (fg.all_reduce((x > 0), a, "max") & (b.slot >= 0)[:, None]).float(),
)  # fmt: skip


def only(b: Batch, x: Any, other: Any) -> Tensor:
    """True rows of `x`; in padding another one."""
    return torch.where((b.slot >= 0)[:, None], x, other)


def kept(x: Tensor, b: Batch) -> Tensor:
    """A table of which padding has written row 0."""
    return torch.zeros(12, E).index_put((b.place,), x)


TOLD: dict[str, tuple[str, Any]] = {
    "zeros add up to zeros": (
        "right", lambda w, b, a: fg.all_reduce(only(b, b.x, 0), a).sum(0)),
    "ones add up to twos": (
        "refused", lambda w, b, a: fg.all_reduce(only(b, b.x, 1), a).prod(0)),
    "zeros scattered are zeros": (
        "right", lambda w, b, a: fg.reduce_scatter(only(b, b.x, 0), a, 1).sum(0)),
    "ones scattered are twos": (
        "refused", lambda w, b, a: fg.reduce_scatter(only(b, b.x, 1), a, 1).prod(0)),
    "weights add up to what is finite": (
        "right", lambda w, b, a: only(b, fg.all_reduce(only(b, b.x, w["row"]), a), 0).sum(0)),
    "a mask of finite sums": (
        "right", lambda w, b, a: (fg.all_reduce(only(b, b.x, w["row"]), a)
                                  * (b.slot >= 0)[:, None]).sum(0)),
    "a mask of sums in half precision": (
        "refused", lambda w, b, a: (fg.all_reduce(only(b, b.x, 4e4).half(), a)
                                    * (b.slot >= 0)[:, None]).sum(0)),
    "a mask of large sums": (
        "refused", lambda w, b, a: (fg.all_reduce(only(b, b.x, LARGEST), a)
                                    * (b.slot >= 0)[:, None]).sum(0)),
    "a mask of large sums, scattered": (
        "refused", lambda w, b, a: (fg.reduce_scatter(only(b, b.x, -LARGEST), a, 1)
                                    * (b.slot >= 0)[:, None]).sum(0)),
    "a mask of small sums": (
        "right", lambda w, b, a: (fg.all_reduce(only(b, b.x, 7.0), a)
                                  * (b.slot >= 0)[:, None]).sum(0)),
    "the least is the least": (
        "right", lambda w, b, a: fg.all_reduce(only(b, b.x, INF), a, "min").amin(0)),
    "the sum of the least is not": (
        "refused", lambda w, b, a: fg.all_reduce(only(b, b.x, -3.0), a).amax(0)),
    "padding of its own in each column": (
        "right", lambda w, b, a: (fg.all_gather(only(b, b.x, torch.arange(float(E))), a, 1)
                                  - torch.arange(float(E)).repeat(a.size)).sum(0)),
    "columns that are exchanged": (
        "refused", lambda w, b, a: (fg.all_to_all(only(b, b.x, torch.arange(float(E))), a, 1)
                                    - torch.arange(float(E))).sum(0)),
    "a softmax of all": (
        "right", lambda w, b, a: fg.all_gather(only(b, b.x, -INF).softmax(0), a, 1).sum(0)),
    "a softmax, added": (
        "refused", lambda w, b, a: fg.all_reduce(only(b, b.x, -INF).softmax(0), a, "max").sum(0)),
    "ids of all": (
        "right", lambda w, b, a: w["table"][fg.all_gather(b.ids[:, None], a, 1)].sum(1)),
    "ids, added": (
        "refused", lambda w, b, a: b.x[fg.all_reduce(b.ids - 2, a)]),
    "counts go on": (
        "right", lambda w, b, a: fg.all_reduce(torch.arange(b.x.shape[0]), a, "max")),
    "rows kept for padding, left out": (
        "right", lambda w, b, a: fg.all_reduce(kept(b.x, b), a)[1:].sum(0)),
    "rows kept for padding": (
        "refused", lambda w, b, a: fg.all_reduce(kept(b.x, b), a).sum(0)),
    "of both": (
        "refused", lambda w, b, a: fg.all_gather(kept(b.x, b), a)[12:].sum(0)),
    "of both, left out": (
        "right", lambda w, b, a: fg.all_gather(kept(b.x, b), a)[13:].sum(0)),
    "parts of them": (
        "refused", lambda w, b, a: fg.reduce_scatter(kept(b.x, b), a)[1:].sum(0)),
    "along T": (
        "refused", lambda w, b, a: fg.all_gather(b.x, a)),
    "gathered weights are finite": (
        "right", lambda w, b, a: (only(b, b.x, 0).T @ only(b, b.x, 0))
        @ fg.all_gather(w["square"][: E // a.size], a)),
}  # fmt: skip
"""What each rule claims, and what it must not: the verdict, and a program."""


def program(seed: int | str, axis: fg.Axis) -> tuple[Callable[..., Any], Any]:
    """Of a seed, the same in all processes; or one of `TOLD`."""
    if isinstance(seed, str):
        _, fn = TOLD[seed]
        return lambda w, batch: fn(w, batch, axis), seed
    draw = random.Random(seed)
    chosen = [draw.randrange(len(OPS)) for _ in range(draw.randint(2, 5))]

    def forward(w: Any, batch: Batch) -> Any:
        x = batch.x
        for i in chosen:
            x = OPS[i](x, w, batch, axis)
        return x, fg.all_reduce(x, axis), x.sum(0) if seed % 3 == 0 else x

    return forward, chosen


def weights(g: torch.Generator) -> dict[str, Tensor]:
    """Each process's own."""
    make = lambda *shape: torch.randint(-2, 3, shape, generator=g).float()  # noqa: E731
    return {"square": make(E, E), "row": make(E) + 0.5, "table": make(6, E)}


def rehearsed(seed: int | str, axis: fg.Axis) -> tuple[str, Any]:
    """What becomes of a program: "refused", "right", or what is claimed wrongly."""
    forward, chosen = program(seed, axis)
    g = torch.Generator().manual_seed(sum(str(seed).encode()) * 10 + axis.rank)
    w, limits = weights(g), fg.Limits(max_tokens=24, max_reqs=6)
    wrong: list[str] = []
    given: dict[int, list[Batch]] = {}
    one = batch(g, 5, 3)

    def look(args: Any, limits: Any, graph: Any, facts: Any) -> None:
        given[0] = [args, graph, facts]

    fast = fg.graphify(lambda w, batch: forward(w, batch), stage="batch", limits=limits)
    try:
        fast.trace_call((w, one), Refusals(), look)
    except RowsError as error:
        return "refused", str(error)
    args, graph, facts = given[0]  # type: ignore[misc]
    facts = facts_of(graph.gm, args.leaves, graph.constants, graph.text, {})  # all that is claimed
    for T, R, key in ((5, 3, (8, 4)), (1, 1, (4, 3)), (8, 4, (8, 4))):
        mine = batch(g, T, R)
        leaves = [*fg.core.trees.flatten(w)[0]]
        staged = [getattr(mine, f.name) for f in dataclasses.fields(Batch) if f.name != "spec"]
        padded = padded_leaves(args, staged, mine.spec, {**limits.dims, "T": key[0], "R": key[1]},
                               limits)  # fmt: skip
        found = rehearse(graph.gm, facts, [*leaves, *staged], [*leaves, *padded])
        wrong += [f"{chosen} {found}"] if found is not None else []
        if any_found(found is not None, axis):
            break
    return ("wrong" if wrong else "right"), wrong


def any_found(here: bool, axis: fg.Axis) -> bool:
    """Whether it is so in any process, so that all stop."""
    return bool(fg.all_reduce(torch.tensor([here]), axis, "max").item())


def programs(rank: int, seeds: list[int | str]) -> list[tuple[int | str, str, Any]]:
    """Each of them, on two processes."""
    warnings.simplefilter("ignore")
    axis = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]
    found = []
    for seed in seeds:
        made = rehearsed(seed, axis)
        alike = fg.all_gather(torch.tensor([made[0] == "refused"]), axis)
        assert alike.all() == alike.any(), (seed, made)
        found.append((seed, *made))
    return found
