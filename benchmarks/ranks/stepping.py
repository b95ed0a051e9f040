"""Rows of decode steps, and of what agreeing on one costs the host (`benchmarks ranks`).

Every process runs the same ways of the same batches in the same order. A way is timed where its
logits, and the k and v that it keeps, are those of one process.
"""

from __future__ import annotations

import functools
import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import fngraph as fg
from benchmarks.decode.judging import MOST_ERROR, off, told
from benchmarks.decode.plain import FORMS
from benchmarks.device import once_ms, wait
from benchmarks.ranks.sharing import Right, Task, own_heads
from benchmarks.ranks.ways import (
    HANDS,
    OF_MANY,
    SPLIT,
    Made,
    by_hand,
    captured_step,
    gather_into,
    ours,
)
from fngraph.models.serving.ranks.circles import Circle, hear, make_ranks, tell
from fngraph.models.serving.ranks.following import STEP, agree, agree_ahead, agreed_ahead, leaves_of
from fngraph.models.serving.ranks.joining import promise

Row = dict[str, Any]
WARM = 5


def step_rows(
    task: Task, ways: Sequence[str], repeats: int, right: Mapping[int, Right], peak: float | None
) -> list[Row]:
    """A row a way and batch. By hand, attention is in each of its forms; what is compiled, where
    it has been captured as it is, in the one that was faster.

    Args:
        peak: TB/s of a copy, if that is known.
    """
    rows: list[Row] = []
    best: dict[int, str] = {}  # form of attention by batch, where it is known
    for way in ways:
        if way in SPLIT and task.axis.size == 1:
            continue
        made = {way: ours(task, way)} if way not in HANDS else {
            f"{way}, {form}": by_hand(task, way, form, batches)
            for form in FORMS
            if (batches := [n for n in task.batches if best.get(n, form) == form])
        }  # fmt: skip
        for name, steps in made.items():
            for row in _of_way(task, name, steps, repeats, right, peak):
                rows.append(row)
                if task.axis.rank == 0:
                    print(f"  {said_of(row)}", flush=True)
            gc.collect()
        if way == "captured":
            best = faster(task, rows)
    return rows


def prefill_rows(task: Task, ways: Sequence[str], repeats: int, right: Right) -> list[Row]:
    """A row a way, of a step that is all tokens of one request; nothing bounds it by its bytes."""
    ways = [way for way in ways if way in OF_MANY]
    return [{"tokens": task.new} | row for row in step_rows(task, ways, repeats, {1: right}, None)]


def took_ms(row: Row) -> float | None:
    """Device time, where there is one; None: it failed."""
    return row.get("device ms") or row.get("wall ms")


def said_of(row: Row) -> str:
    """A line for who waits."""
    how = row["failed"] if "failed" in row else f"{took_ms(row):.3f} ms"
    return f"{row['way']}, batch {row.get('batch', '-')}: {how}"


def faster(task: Task, rows: Sequence[Row]) -> dict[int, str]:
    """By batch the form of attention whose captured step the slowest process takes faster: the
    same in all of them."""
    known = {(row["way"], row.get("batch")): took_ms(row) for row in rows}
    ms = [[known.get((f"captured, {form}", n)) or float("inf") for form in FORMS]
          for n in task.batches]  # fmt: skip
    of_all = fg.all_reduce(torch.tensor(ms, device=task.mesh.device), task.axis, "max")
    return {n: list(FORMS)[i] for n, i in zip(task.batches, of_all.argmin(1).tolist())}


def _of_way(
    task: Task, name: str, made: Iterator[tuple[int, Made]], repeats: int,
    right: Mapping[int, Right], peak: float | None,
) -> Iterator[Row]:  # fmt: skip
    row: Row = {"way": name}
    try:
        for num_reqs, one in made:
            read = task.bytes_read(num_reqs)
            row = {"way": name, "batch": num_reqs, **one.more, "shard MB": read / 1e6}
            row |= judged(task, one, right[num_reqs])
            bound = read / peak / 1e9 if peak else None
            took = clocked(one.call, repeats, task.mesh.device)
            over = took["device ms"] / bound if bound and took["device ms"] else None
            yield row | took | {"bound ms": bound, "of bound": over}
    except Exception as error:
        failed = told(error)
        print(f"{task.axis.size} processes, {row}: {failed}", file=sys.stderr, flush=True)
        yield row | {"failed": failed}  # which a device that is broken does not let arrive


def judged(task: Task, made: Made, right: Right) -> dict[str, float]:
    """How far a way is off, in the process where it is furthest.

    Raises:
        ValueError: too far; in every process.
    """
    made.call()
    wait(task.mesh.device)
    heads = own_heads(task.config, task.axis)
    wanted = [x[:, heads] for x in right.kept]
    kept = max(off(x.cpu().float(), y.float()) for x, y in zip(made.kept(), wanted, strict=True))
    error = off(made.logits().cpu().float(), right.logits.float())
    here = torch.tensor([error, kept], device=task.mesh.device)
    error, kept = fg.all_reduce(here, task.axis, "max").tolist()
    if not (error < MOST_ERROR and kept < MOST_ERROR):
        raise ValueError(f"logits are off by {error:.3f}, k and v by {kept:.3f}, of {MOST_ERROR}")
    return {"error": error, "kept error": kept}


def clocked(call: Callable[[], Any], repeats: int, device: str) -> dict[str, float | None]:
    """Of a step: device time where steps follow one another; wall time with its device work
    finished; and what the call alone takes."""
    for _ in range(WARM):
        call()
    wait(device)
    walls, hosts = [], []
    for _ in range(repeats):
        began = time.perf_counter()
        call()
        hosts.append(time.perf_counter() - began)
        wait(device)
        walls.append(time.perf_counter() - began)
    device_ms = once_ms(call, repeats) / repeats if device.startswith("cuda") else None
    return {"device ms": device_ms, "wall ms": median(walls) * 1e3, "host us": median(hosts) * 1e6}


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
