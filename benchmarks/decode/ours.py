"""fngraph's ways: a mode at a level, and bare `forward`. The likeliest token is part of the step.

One captured step serves all batches of a model. Its outputs are borrowed, so each batch's tokens
are those that the step before has left in the output.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

import fngraph as fg
from benchmarks.compile import nodes_of
from benchmarks.decode.bench import Bench, Made
from benchmarks.workload import BLOCK_SIZE, attention_of, batch_of, to_device
from fngraph.models.families import llama

MODES = ("FULL", "PIECEWISE", "NONE")
LEVELS = ("none", "fused", "pieces")  # "fused" is "none" with all passes


def greedy(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A family's `forward` that gives the likeliest token of each request too."""

    def step(params: Any, cache: Any, batch: llama.Batch) -> tuple[Tensor, Tensor, Any]:
        logits_RV, cache = forward(params, cache, batch)
        return logits_RV.argmax(-1), logits_RV, cache

    return step


class Fed:
    """A step over one batch, whose tokens are those that it is called with."""

    def __init__(self, step: Callable[[Any, Any], Any], cache: Any, batch: Any) -> None:
        self.step, self.cache, self.batch = step, cache, batch
        self.logits: Any = None

    def __call__(self, ids_R: Tensor) -> Tensor:
        if ids_R.data_ptr() != self.batch.token_ids.data_ptr():  # else it reads them there
            self.batch = dataclasses.replace(self.batch, token_ids=ids_R)
        ids_R, self.logits, _ = self.step(self.cache, self.batch)
        return ids_R


def made_of(bench: Bench, step: Callable[[Any, Any], Any], num_reqs: int, **more: Any) -> Made:
    """`step(cache, batch)` over the bench's pages."""
    batch = to_device(batch_of(num_reqs, 1, bench.context), bench.device)
    fed = Fed(step, bench.pages(), batch)
    return Made(fed, lambda: fed.logits, lambda: bench.in_pages(num_reqs), bench.wait, more=more)


def bare(bench: Bench) -> Callable[[int], Made]:
    """`forward`, called."""
    step = greedy(bench.model.family.forward)
    return lambda num_reqs: made_of(
        bench, lambda cache, batch: step(bench.params, cache, batch), num_reqs
    )


def captured(mode: str, level: str) -> Callable[[Bench], Callable[[int], Made]]:
    """Graphs of every batch, in one mode at one level."""

    def open_(bench: Bench) -> Callable[[int], Made]:
        most = max(bench.batches)
        fast = fg.graphify(
            greedy(bench.model.family.forward), modes=mode, donate="cache", stage="batch",
            compile="none" if level == "fused" else level, sizes=bench.batches,
            passes="all" if level == "fused" else None,
            compile_sizes=bench.batches if level == "pieces" else (),
            backends={"attention": bench.backend},
        )  # fmt: skip
        limits = fg.Limits(max_tokens=most, max_reqs=most, B=bench.context // BLOCK_SIZE)
        step = fast.bind(bench.params).capture(
            bench.pages(), limits, outputs="borrow", progress=False
        )

        def at(num_reqs: int) -> Made:
            ran = step.dispatch(fg.BatchSpec(num_reqs, num_reqs, query_len=1))
            told = {"ran as": str(ran.mode), "attention": attention_of(step)}
            if ran.mode is not fg.Mode.NONE:
                told |= nodes_of(step[ran.descriptor])
            return made_of(bench, step, num_reqs, **told)

        return at

    return open_


WAYS = {f"{mode}-{level}": captured(mode, level) for mode in MODES for level in LEVELS}
WAYS["bare"] = bare
