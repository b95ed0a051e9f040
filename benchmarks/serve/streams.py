"""A request stream through the loop, and what its requests see of it (`benchmarks serve`).

Requests are submitted when they are due by a clock that jumps over idle time.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.device import counted_compilations
from benchmarks.serve.turns import DRAWN
from benchmarks.traffic import Arrival, quantile
from fngraph.models.serving.batches import MANY
from fngraph.models.serving.loop import gather, serve
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Event, State, start
from fngraph.models.serving.sampling import Settings
from fngraph.models.serving.steps import Steps
from fngraph.models.serving.submitting import submit
from fngraph.models.serving.tally import Tally


def served(
    steps: Steps, cache: Any, policy: Policy, num_blocks: int, arrivals: Sequence[Arrival]
) -> tuple[dict[str, Any], Tally, dict[int, tuple[int, ...]]]:
    """What a stream sees: one row, what ran as what, and the texts by their arrivals' numbers."""
    due, clock = list(reversed(arrivals)), Clock()
    last: dict[int, tuple[float, bool]] = {}  # when a request came or had a token, and which
    first: list[float] = []
    gaps: list[float] = []
    inside: list[float] = []
    longest = 0
    launched = 0.0

    def timed(cache: Any, batch: Any) -> tuple[Any, Any]:
        nonlocal launched
        launched = time.perf_counter()
        ids, cache = steps.run(cache, batch)
        if MANY[0] not in batch.spec.extra:  # for those the loop waits, and asks meanwhile
            ids = ids.cpu()
        inside.append(time.perf_counter() - launched)
        return ids, cache

    def pending() -> bool:
        inside[-1] = time.perf_counter() - launched
        return bool(due) and due[-1].at <= clock.now()

    def inbox(state: State) -> State:
        nonlocal longest
        if due and not state.live:
            clock.jump(due[-1].at)
        while due and due[-1].at <= clock.now():
            one = due.pop()
            last[state.submitted] = (one.at, True)
            drawn = Settings() if one.seed is None else DRAWN._replace(seed=one.seed)
            state = submit(
                state, policy, one.prompt, one.max_new, adapter=one.adapter, settings=drawn
            )
        longest = max(longest, len(state.waiting))
        return state

    tally, took = Tally(), []
    events: list[Event] = []
    began = time.perf_counter()
    state = start(num_blocks, policy)
    with counted_compilations() as compiled:
        for one in tally.watch(
            serve(steps._replace(run=timed), cache, state, policy, inbox, pending=pending)
        ):
            now = clock.now()
            took.append(one.seconds)
            events += one.events
            for event in one.events:
                if not event.tokens:
                    continue
                before, is_first = last[event.id]
                (first if is_first else gaps).append(now - before)
                gaps += [0.0] * (len(event.tokens) - 1)
                last[event.id] = (now, False)
    wall = time.perf_counter() - began
    new, total = tally.total("new"), tally.total("tokens") + tally.total("padding")
    row = {
        "requests": len(arrivals), "steps": len(took), "new tokens": new,
        "tokens/s": new / wall, "step p50 ms": median(took) * 1e3,
        "the loop's part p50 ms": median(a - b for a, b in zip(took, inside)) * 1e3,
        **waits(first, gaps), "kernels compiled": len(compiled),
        "most waiting": longest, "padding": tally.total("padding") / total,
    }  # fmt: skip
    return row, tally, gather(events)


def waits(first: Sequence[float], gaps: Sequence[float]) -> dict[str, float]:
    """ms of a row: from when requests were due to their first tokens, and between tokens (s)."""
    return {
        "between tokens p50 ms": quantile(gaps, 0.5) * 1e3,
        "between tokens p99 ms": quantile(gaps, 0.99) * 1e3,
        "first token p50 ms": quantile(first, 0.5) * 1e3,
        "first token p99 ms": quantile(first, 0.99) * 1e3,
        "first token max ms": max(first) * 1e3,
    }


class Clock:
    """Seconds since it was made, idle ones left out."""

    def __init__(self) -> None:
        self._zero = time.perf_counter()

    def now(self) -> float:
        """Where it stands."""
        return time.perf_counter() - self._zero

    def jump(self, to: float) -> None:
        """Go on from `to`, if that is later."""
        self._zero -= max(0.0, to - self.now())


def shares(tally: Tally) -> list[dict[str, Any]]:
    """A row for each kind of batch, mode and key, as shares of steps and of tokens."""
    return [
        {
            "kind": line.kind, "mode": str(line.mode), "key": str(line.key or ""),
            "of steps": line.steps / tally.total(),
            "of tokens": line.tokens / tally.total("tokens"),
            "padding": line.padding / (line.tokens + line.padding),
        }
        for line in tally.lines
    ]  # fmt: skip
