"""The same stream through transformers' continuous batching (`benchmarks serve --beside`).

Its manager serves in a thread of its own, and `generate_batch` is a loop around it; here requests
are submitted when they are due by the clock of `streams`, and times are those that it notes for
each token. Weights are our own tensors, its cache holds as many tokens as ours. What it decides by
itself (graphs, batches, attention) it decides; `--beside 1` asks it for more. Another stream comes
first, without a clock, since it compiles in traffic.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from benchmarks.decode.theirs import its_model
from benchmarks.serve.streams import Clock, waits
from benchmarks.traffic import Arrival
from fngraph.models.families import llama

WAIT_S = 0.002  # between looks for what is due
BLOCK = 256  # tokens, as it has them unless told


def by_transformers(
    params: Any, arrivals: Sequence[Arrival], before: Sequence[Arrival], cache_tokens: int,
    level: int,
) -> tuple[dict[str, Any], dict[int, tuple[int, ...]]]:  # fmt: skip
    """A row as `served` makes it, and the texts by their arrivals' numbers.

    Args:
        before: served first, by no clock: what it compiles or captures in traffic is ready then.
        cache_tokens: room of its cache.
        level: of its compilation, 0 to 3.

    Raises:
        ImportError: there is no transformers, or one without continuous batching.
    """
    library = importlib.import_module("transformers")
    settings = importlib.import_module("transformers.generation.configuration_utils")
    longest = max(len(one.prompt) + one.max_new for one in (*arrivals, *before))
    model = its_model(library, llama, params, longest, params.embed.device)
    block = min(BLOCK, max(4, cache_tokens // 4))
    cached: dict[str, Any] = {"block_size": block, "num_blocks": -(-cache_tokens // block)}
    if not params.embed.is_cuda:  # where it cannot ask how much memory there is
        cached |= {"max_batch_tokens": cache_tokens, "max_requests_per_batch": len(arrivals)}
    if level:
        cached["default_compile_level"] = level
    asked = library.GenerationConfig(do_sample=False, eos_token_id=-1, max_new_tokens=longest)
    with model.continuous_batching_context_manager(
        generation_config=asked,
        continuous_batching_config=settings.ContinuousBatchingConfig(**cached),
    ) as manager:
        began = time.perf_counter()
        _run(manager, [one._replace(at=0.0) for one in before], "before")
        ready = time.perf_counter() - began
        came, done, wall = _run(manager, arrivals, "timed")
    firsts = [done[i].timestamps[0] - at for i, at in came.items()]
    gaps = [b - a for one in done.values() for a, b in pairwise(one.timestamps)]
    new = sum(len(one.generated_tokens) for one in done.values())
    row = {
        "requests": len(arrivals), "new tokens": new, "tokens/s": new / wall, "ready s": ready,
    }  # fmt: skip
    return row | waits(firsts, gaps), {i: tuple(one.generated_tokens) for i, one in done.items()}


def _run(
    manager: Any, arrivals: Sequence[Arrival], name: str
) -> tuple[dict[int, float], dict[int, Any], float]:
    """When each came and what it gave, by numbers, and the seconds that all took."""
    due = list(reversed(list(enumerate(arrivals))))
    came, done = dict[int, float](), dict[int, Any]()
    clock, began = Clock(), time.perf_counter()
    while len(done) < len(arrivals):
        if due and len(done) == len(came):
            clock.jump(due[-1][1].at)
        while due and due[-1][1].at <= clock.now():
            i, one = due.pop()
            came[i] = time.perf_counter() - (clock.now() - one.at)
            manager.add_request(
                list(one.prompt), request_id=f"{name} {i}", max_new_tokens=one.max_new,
                record_timestamps=True,
            )  # fmt: skip
        result = manager.get_result(timeout=WAIT_S)
        if result is not None:
            if result.error:
                raise RuntimeError(f"request {result.request_id}: {result.error}")
            done[int(result.request_id.split()[-1])] = result
        elif not manager.is_running():
            raise RuntimeError("its thread has ended")
    return came, done, time.perf_counter() - began
