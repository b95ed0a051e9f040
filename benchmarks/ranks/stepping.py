"""Rows of decode steps and of prefills (`benchmarks ranks`).

Every process runs the same ways of the same batches in the same order. A way is timed where its
logits, and the k and v that it keeps, are those of one process.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

import torch

import fngraph as fg
from benchmarks.decode.judging import MOST_ERROR, off, told
from benchmarks.decode.plain import FORMS
from benchmarks.device import once_ms, wait
from benchmarks.ranks.sharing import Right, Task, own_heads
from benchmarks.ranks.ways import (
    HANDS,
    NEEDS_SEVERAL,
    OF_MANY,
    Made,
    by_hand,
    ours,
)

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
        if way in NEEDS_SEVERAL and task.axis.size == 1:
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
    return step_rows(task, [way for way in ways if way in OF_MANY], repeats, {1: right}, None)


def took_ms(row: Row) -> float | None:
    """Device time, where there is one; None: it failed."""
    return row.get("device ms") or row.get("wall ms")


def said_of(row: Row) -> str:
    """A line for who waits."""
    how = row["failed"] if "failed" in row else f"{took_ms(row):.3f} ms"
    what = f"{row['tokens']} tokens" if "tokens" in row else f"batch {row.get('batch', '-')}"
    return f"{row['way']}, {what}: {how}"


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
    what: Row = {"way": name} | ({"tokens": task.new} if task.new > 1 else {})
    row = what
    try:
        for num_reqs, one in made:
            read = task.bytes_read(num_reqs)
            row = what | {"batch": num_reqs, **one.more, "shard MB": read / 1e6}
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
