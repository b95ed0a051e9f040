"""What two processes of test_threads.py run: two steps, each called by a thread of its own."""

from __future__ import annotations

import collections
import threading
import warnings
from typing import Any

import torch
from rank_steps import LIMITS, Batch, batch

import fngraph as fg

CALLS = 200


def threads(rank: int) -> list[tuple[dict[str, int], bool]]:
    """Of each step, how often its calls were right, or raised what; and whether the last one, when
    one thread alone is left, was right."""
    warnings.simplefilter("ignore")
    tp = fg.make_mesh("cpu", timeout=20, tp=2)["tp"]

    def sums(w: Any, batch: Batch) -> Any:
        return fg.all_reduce(batch.x * w, tp)

    def most(w: Any, batch: Batch) -> Any:
        return fg.all_reduce(batch.x * w + 1 + rank, tp, "max")

    one, w = batch(0, 3, 2), torch.tensor(2.0)
    made = [
        fg.graphify(fn, stage="batch", modes="FULL", sizes=(4, 8))
        .bind(w).capture(LIMITS, progress=False) for fn in (sums, most)
    ]  # fmt: skip
    want = [one.x * 4, one.x * 2 + 2]
    found = [collections.Counter[str]() for _ in made]

    def work(i: int) -> None:
        for _ in range(CALLS):
            try:
                found[i][str(torch.equal(made[i](one), want[i]))] += 1
            except fg.errors.RankError as error:
                named = ("sum" in str(error) and "max" in str(error)) or "differ in" in str(error)
                found[i]["RankError" if named else str(error)] += 1

    running = [threading.Thread(target=work, args=(i,)) for i in ((0, 1), (1, 0))[rank]]
    for one_thread in running:
        one_thread.start()
    for one_thread in running:
        one_thread.join()
    last = [torch.equal(step(one), right) for step, right in zip(made, want)]
    return [(dict(counts), right) for counts, right in zip(found, last)]
