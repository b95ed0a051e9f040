"""fngraph's ways: a mode at a level, and bare `forward`. The likeliest token is part of the step.

One captured step serves all batches of a model. Its outputs are borrowed, so each batch's tokens
are those that the step before has left in the output.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

import fngraph as fg
from benchmarks.decode.bench import Bench, Made
from benchmarks.workload import BLOCK_SIZE, attention_of, batch_of, nodes_of, to_device
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


def made_of(
    bench: Bench, step: Callable[[Any, Any], Any], cache: Any, num_reqs: int, **more: Any
) -> Made:
    """`step(cache, batch)` of so many requests."""
    batch = batch_of(num_reqs, bench.new, bench.context)
    bounds = fg.HostBounds(bench.new, bench.context)  # as a scheduler knows them
    spec = batch.spec._replace(host=bounds)
    batch = to_device(dataclasses.replace(batch, spec=spec), bench.device)
    fed = Fed(step, cache, batch)
    return Made(fed, lambda: fed.logits, lambda: bench.in_pages(num_reqs), bench.wait, more=more)


def bare(bench: Bench) -> Callable[[int], Made]:
    """`forward`, called."""
    step, cache = greedy(bench.model.family.forward), bench.pages()
    call = functools.partial(step, bench.params)
    return functools.partial(made_of, bench, call, cache)


def captured(mode: str, level: str) -> Callable[[Bench], Callable[[int], Made]]:
    """Graphs of every batch, in one mode at one level."""

    def open_(bench: Bench) -> Callable[[int], Made]:
        most, cache = max(bench.batches), bench.pages()
        fast = fg.graphify(
            greedy(bench.model.family.forward), modes=mode, donate="cache", stage="batch",
            compile="none" if level == "fused" else level, sizes=bench.sizes,
            passes="all" if level == "fused" else None,
            compile_sizes=bench.sizes if level == "pieces" else (),
            backends={"attention": bench.backend},
        )  # fmt: skip
        limits = fg.Limits(max(bench.sizes), most, B=bench.context // BLOCK_SIZE)
        step = fast.bind(bench.params).capture(cache, limits, outputs="borrow", progress=False)

        def at(num_reqs: int) -> Made:
            ran = step.dispatch(batch_of(num_reqs, bench.new, bench.context).spec)
            told = {"ran as": str(ran.mode), "attention": attention_of(step)}
            if ran.mode is not fg.Mode.NONE:
                told |= nodes_of(step[ran.descriptor])
            return made_of(bench, step, cache, num_reqs, **told)

        return at

    return open_


WAYS = {f"{mode}-{level}": captured(mode, level) for mode in MODES for level in LEVELS}
WAYS["bare"] = bare
