"""Rows of what it costs the host that processes agree on each step (`benchmarks ranks`)."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import fngraph as fg
from benchmarks.device import wait
from benchmarks.ranks.sharing import Task
from benchmarks.ranks.stepping import WARM, Row
from benchmarks.ranks.ways import captured_step, gather_into
from fngraph.models.serving.ranks.circles import Circle, hear, make_ranks, tell
from fngraph.models.serving.ranks.following import STEP, agree, agree_ahead, agreed_ahead, leaves_of
from fngraph.models.serving.ranks.joining import promise


def agreement_rows(task: Task, repeats: int) -> list[Row]:
    """What the host spends on a step of the first batch, on comparing it with the others before,
    and on the same over gloo, as between hosts. By turns: a neighbour changes all of them. All come
    to each at one moment, but to `late`, in which they wait for each other behind a barrier."""
    step, cache = captured_step(task, "FULL-fused")
    batch = task.batch(task.batches[0])
    board, group = fg.make_board(dist.group.WORLD, 60.0), dist.group.WORLD
    own = torch.zeros(3, dtype=torch.int64)
    every = own.new_empty(3 * task.axis.size)
    ways: dict[str, Callable[[], Any]] = {
        "step": lambda: step(cache, batch),
        "board": lambda: board and board.exchange([1, 2, 3]),
        "late": lambda: board and board.exchange([1, 2, 3]),
        "gloo": lambda: gather_into(every, own, group=group),
    }
    took: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(WARM + repeats):
        for name, call in ways.items():
            dist.barrier()
            if name != "late":
                wait_for_the_moment()
            began = time.perf_counter()
            call()
            if turn >= WARM:
                took[name].append(time.perf_counter() - began)
            wait(task.mesh.device)
    whole, asked, late, gloo = (median(times) * 1e6 for times in took.values())
    joint, ahead = meeting_us(task, lambda: step(cache, batch), repeats)
    told, by_gloo, length = telling_us(task, step.dispatch(batch.spec), batch, board, repeats)
    return [{"batch": task.batches[0], "step, host us": whole,
             "exchange us": asked if board else gloo, "and coming us": late if board else gloo,
             "over gloo us": gloo,
             "batch bytes": length, "batch told us": told, "told by gloo us": by_gloo,
             "teams meet, host us": joint, "ahead, host us": ahead}]  # fmt: skip


def wait_for_the_moment() -> None:
    """Until the clock, which processes of one host share, has the millisecond after the next."""
    until = (time.perf_counter_ns() // 1_000_000 + 2) * 1_000_000
    while time.perf_counter_ns() < until:
        pass


def telling_us(
    task: Task, chosen: fg.core.Dispatch, batch: Any, board: fg.Board | None, repeats: int
) -> tuple[float, float, int]:
    """From when a leader begins to tell a batch until it knows that all have it, as serving tells
    it and over gloo, by turns; and the bytes of its leaves.

    Args:
        board: another one, on which all begin together, and say that they have it, however it came.
    """
    team = make_ranks(task.mesh, apart=()).team
    leaves = [leaf.cpu() for leaf in leaves_of(batch)]
    ways: tuple[Circle, ...] = (team, team._replace(board=None))
    together: Callable[[], Any] = dist.barrier
    if board is not None:
        together = functools.partial(board.exchange, [0])
    took: list[list[float]] = [[], []]
    for turn in range(WARM + repeats):
        for times, way in zip(took, ways):
            together()
            began = time.perf_counter()
            if way.rank == 0:
                sent = tell(way, (STEP, batch.spec, chosen), leaves)
            else:
                hear(way)
            together()
            if way.rank == 0:
                sent.wait()
            if turn >= WARM:
                times.append(time.perf_counter() - began)
    on_board, by_gloo = (median(times) * 1e6 for times in took)
    return on_board, by_gloo, sum(leaf.nbytes for leaf in leaves)


def meeting_us(task: Task, call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """What leaders of teams that meet spend on the size of a step: before it; and on that of the
    next one, in all: begun behind a launch, while the device runs, and heard when it is done."""
    ranks = make_ranks(task.mesh, apart=task.mesh.names, meet=True, ahead=True)
    spec = fg.BatchSpec(task.batches[0], task.batches[0], query_len=1)
    before, ahead = [], []
    for turn in range(WARM + repeats):
        began = time.perf_counter()
        agree(ranks, spec)
        agreed = time.perf_counter()
        call()
        launched = time.perf_counter()
        coming = agree_ahead(ranks, promise(spec, True))
        told = time.perf_counter()
        wait(task.mesh.device)
        done = time.perf_counter()
        agreed_ahead(ranks, coming)
        heard = time.perf_counter()
        if turn >= WARM:
            before.append(agreed - began)
            ahead.append(told - launched + heard - done)
    return median(before) * 1e6, median(ahead) * 1e6
