"""Decode steps of fixed batches in every mode, in turns with bare `forward` (`benchmarks serve`).

A step is the model, the draw of its tokens and the wait for them. All ways get the same batch, on
the device. In each round every way has its share of steps, so that a clock or a neighbour that
changes meanwhile changes all of them. What each of them draws is held to what bare `forward` does.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from operator import truediv
from statistics import median
from typing import Any

import torch
from torch import Tensor

from benchmarks.serve.right import refill, share_right
from benchmarks.workload import to_device
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Job, Request, Row
from fngraph.models.serving.sampling import Settings, key_of
from fngraph.models.serving.texts.tokens import Tokens

DRAWN = Settings(temperature=0.8, top_p=0.95)
ROUNDS, ROUND_S, MOST = 9, 0.05, 100  # of one way: rounds, seconds of each, steps of each at most
Step = Callable[[Any, Any], tuple[Tensor, Any]]  # cache, batch -> ids, cache
Logits = Callable[[Any, Any], Tensor]  # cache, batch -> bare forward's (R, Q, V)


def decode_batch(
    num_reqs: int, context: int, policy: Policy, device: Any, *more: str, vocab_size: int,
    adapters: int = 0,
) -> Any:  # fmt: skip
    """Requests of `context` tokens that draw their next one, in blocks of their own.

    Of so many adapters, every second request uses one.
    """
    per = -(-context // policy.block_size)
    rows = []
    for i in range(num_reqs):
        tokens = Tokens(tuple((i + 7 * j) % vocab_size for j in range(context)))
        blocks = Tokens(tuple(range(i * per, (i + 1) * per)))
        adapter = i // 2 % adapters if adapters and i % 2 == 0 else -1
        request = Request(i, (1,), context, adapter=adapter, settings=DRAWN, key=key_of(i))
        rows.append(Row(Job(request, tokens, context - 1, blocks, -1), 1))
    return on_device(rows, policy, device, *("adapters",) * bool(adapters), *more)


def on_device(rows: Sequence[Row], policy: Policy, device: Any, *more: str) -> Any:
    """The batch of these rows, each leaf on the device."""
    kind = batch_type(*more)
    return to_device(lay_out(rows, policy, lambda spec: empty_batch(kind, policy, spec)), device)


def seconds(step: Step, cache: Any, batch: Any, steps: int) -> float:
    """Of one step, with its tokens on the host."""
    began = time.perf_counter()
    for _ in range(steps):
        step(cache, batch)[0].tolist()
    return (time.perf_counter() - began) / steps


def waits(step: Step, cache: Any, batch: Any) -> int:
    """How often a call waits for the device, as torch's sync debug mode sees it."""
    if not torch.cuda.is_available():
        return 0
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            step(cache, batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchron" in str(one.message) for one in seen)


@torch.no_grad()
def in_turns(
    ways: Mapping[str, Step], cache: Any, batches: Sequence[Any], logits: Logits
) -> list[dict[str, Any]]:
    """A row for each batch and way: ms a step, and tokens a second over all its requests.

    `of bare` is the median over the rounds of a way's time over that of bare `forward` beside it.

    Args:
        ways: bare `forward` first, which the others are held to.
    """
    rows = []
    for batch in batches:
        right = judge(ways, cache, batch, logits)
        steps: dict[str, int] = {}
        times: dict[str, list[float]] = {}
        for name, step in ways.items():
            seconds(step, cache, batch, 3)  # warm
            about = seconds(step, cache, batch, 2)
            steps[name], times[name] = max(2, min(MOST, int(ROUND_S / about))), []
        for _ in range(ROUNDS):
            for name, step in ways.items():
                times[name].append(seconds(step, cache, batch, steps[name]))
        for name, step in ways.items():
            took = median(times[name])
            rows.append({
                "batch": batch.spec.num_reqs, "way": name, "ms": took * 1e3,
                "least ms": min(times[name]) * 1e3, "most ms": max(times[name]) * 1e3,
                "of bare": beside(times[name], next(iter(times.values()))),
                "tokens/s": batch.spec.num_reqs / took, "waits": waits(step, cache, batch),
                "right": right[name],
            })  # fmt: skip
    return rows


def beside(times: Sequence[float], others: Sequence[float]) -> float:
    """The median over rounds of one way's time over another's."""
    return median(map(truediv, times, others))


def judge(ways: Mapping[str, Step], cache: Any, batch: Any, logits: Logits) -> dict[str, float]:
    """The share of each way's tokens that are right, all drawn from equal caches."""
    drawn = {}
    for name, step in ways.items():
        refill(cache)
        drawn[name] = step(cache, batch)[0].clone().flatten()
    refill(cache)
    logits_NV = logits(cache, batch).flatten(0, -2)
    wanted_N = next(iter(drawn.values()))
    return {name: share_right(logits_NV, drawn_N, wanted_N) for name, drawn_N in drawn.items()}


def by_batch(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a batch, for reading: ms of each way, and what graphs gain over NONE."""
    out = []
    for batch in sorted({row["batch"] for row in rows}):
        ms = {row["way"]: row["ms"] for row in rows if row["batch"] == batch}
        least = min(ms.values())
        out.append({
            "batch": batch, **{f"{way}, ms": took for way, took in ms.items()},
            "tokens/s at best": batch / least * 1e3, "NONE / best": ms.get("NONE", least) / least,
        })  # fmt: skip
    return out


def broken(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is asked of a GPU and was not met, a line each.

    FULL_AND_PIECEWISE: 2.5 times NONE up to batch 8, 0.98 of the best single mode at every batch;
    NONE: at most 1.05 times the time of bare `forward`, round by round; no step waits for anything
    but its tokens.
    """
    lines = []
    for batch in sorted({row["batch"] for row in rows}):
        ms = {row["way"]: row["ms"] for row in rows if row["batch"] == batch}
        single = [ms[way] for way in ms if way not in ("bare forward", "FULL_AND_PIECEWISE")]
        best = min(single, default=0)
        both, none = ms.get("FULL_AND_PIECEWISE"), ms.get("NONE")
        of_bare = {r["batch"]: r["of bare"] for r in rows if r["way"] == "NONE"}.get(batch, 0)
        if both and none and batch <= 8 and none / both < 2.5:
            lines.append(f"batch {batch}: FULL_AND_PIECEWISE is {none / both:.2f} times NONE")
        if best and both and best / both < 0.98:
            lines.append(f"batch {batch}: FULL_AND_PIECEWISE is {best / both:.3f} of the best mode")
        if of_bare > 1.05:
            lines.append(f"batch {batch}: NONE takes {of_bare:.3f} times bare forward")
    waiting = {row["way"] for row in rows if row["waits"] and row["way"] != "bare forward"}
    return [*lines, *(f"{way}: a step waits for the device" for way in sorted(waiting))]
