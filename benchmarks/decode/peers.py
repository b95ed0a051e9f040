"""What one would use otherwise, of torch alone: plain.py's step, and how it is run.

eager             called
captured          captured by hand in one graph, with the next token's way back
compile           under `torch.compile`, and captured by hand
max-autotune      likewise, mode "max-autotune-no-cudagraphs"
reduce-overhead   under `torch.compile(mode="reduce-overhead")`, weights and caches marked static,
                  without which it copies them or captures nothing
gpt-fast          the same of a module with weights and caches as buffers, fullgraph, with
                  Inductor's coordinate descent, as gpt-fast does

Attention is SDPA, in the form that is faster for the batch. On a CPU nothing is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from benchmarks.decode import plain
from benchmarks.decode.bench import Bench, Made
from benchmarks.decode.clocks import typical_us

Step = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # ids_R, positions_R -> ids_R, logits_RV
Open = Callable[[Bench], Callable[[int], Made]]


def form_of(bench: Bench, num_reqs: int) -> str:
    """Which form of SDPA is the fastest for a layer."""
    k, v = bench.contiguous(num_reqs)[0]
    q = torch.zeros(
        num_reqs, bench.config.num_heads, 1, bench.config.head_dim, device=k.device, dtype=k.dtype
    )
    seen = torch.ones(num_reqs, 1, bench.context, device=k.device, dtype=torch.bool)
    times = {
        name: typical_us(functools.partial(form, q, k, v, seen), bench.device)
        for name, form in plain.FORMS.items()
    }
    return min(times, key=times.__getitem__)


class Kept:
    """What stays where it is: tokens and positions; and the last logits."""

    def __init__(self, bench: Bench, num_reqs: int) -> None:
        self.positions = bench.positions(num_reqs)
        self.ids = torch.zeros_like(self.positions)
        self.logits: Any = None


def made_of(bench: Bench, num_reqs: int, form: str, kept: Kept, step: Any) -> Made:
    """Over contiguous caches."""

    def views() -> Any:
        return [(k.transpose(1, 2), v.transpose(1, 2)) for k, v in bench.contiguous(num_reqs)]

    more = {"attention": f"SDPA, {form}"}
    return Made(step, lambda: kept.logits, views, bench.wait, more=more)


def called(step: Step, kept: Kept) -> Callable[[Tensor], Tensor]:
    """It as it is."""

    def call(ids: Tensor) -> Tensor:
        ids, kept.logits = step(ids, kept.positions)
        return ids

    return call


def captured(
    once: Callable[[], None], device: torch.device, errors: str = "global"
) -> Callable[[], None]:
    """It in a graph, warm; on a CPU as it is.

    Args:
        errors: of which threads what a capture cannot hold ends it.
    """
    for _ in range(3):  # compiles, and chooses kernels
        once()
    if device.type != "cuda":
        return once
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=errors):
        once()

    def replay(reads: Any = once) -> None:  # what the graph reads, and holds none of
        graph.replay()

    return replay


def by_hand(step: Step, kept: Kept) -> Callable[[Tensor], Tensor]:
    """One graph, which leaves the next tokens where it reads them."""

    def once() -> None:
        ids, kept.logits = step(kept.ids, kept.positions)
        kept.ids.copy_(ids)

    replay = captured(once, kept.ids.device)

    def call(ids: Tensor) -> Tensor:
        if ids is not kept.ids:
            kept.ids.copy_(ids)
        replay()
        return kept.ids

    return call


def in_trees(step: Step, kept: Kept) -> Callable[[Tensor], Tensor]:
    """What torch captures itself: its results are good till its next step."""

    def call(ids: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        ids, kept.logits = step(ids, kept.positions)
        return ids.clone()

    for _ in range(4):  # compiles, and captures
        call(kept.ids)
    return call


def of_function(run: Any, compiled: Any = None, *, static: bool = False) -> Open:
    """`plain.step`, compiled with these options if there are any.

    Args:
        run: `called`, `by_hand` or `in_trees`.
        static: tell torch that weights and caches stay where they are.
    """

    def open_(bench: Bench) -> Callable[[int], Made]:
        weights = plain.weights_of(bench.params)

        def at(num_reqs: int) -> Made:
            cache, form = bench.contiguous(num_reqs), form_of(bench, num_reqs)
            if static:
                for leaf in fg.core.trees.flatten((weights, cache))[0]:
                    torch._dynamo.mark_static_address(leaf)
            fn: Any = plain.step
            if compiled is not None:
                fn = torch.compile(plain.step, fullgraph=True, dynamic=False, **compiled)
            attend = plain.FORMS[form]

            def step(ids: Tensor, positions: Tensor) -> Any:
                return fn(bench.config, weights, cache, ids, positions, attend)

            kept = Kept(bench, num_reqs)
            ready = run(step, kept)
            return made_of(bench, num_reqs, form, kept, ready)

        return at

    return open_


def gpt_fast(bench: Bench) -> Callable[[int], Made]:
    """A module's step, with the settings of gpt-fast's `generate.py`; written anew."""
    weights = plain.weights_of(bench.params)
    options: dict[str, Any] = {"triton.cudagraphs": True, "coordinate_descent_tuning": True}

    def at(num_reqs: int) -> Made:
        form = form_of(bench, num_reqs)
        module = plain.Module(
            bench.config, weights, bench.contiguous(num_reqs), plain.FORMS[form]
        )  # fmt: skip
        fn: Any = torch.compile(module, options=options, fullgraph=True)
        kept = Kept(bench, num_reqs)
        ready = in_trees(fn, kept)
        return made_of(bench, num_reqs, form, kept, ready)

    return at


WAYS: dict[str, Open] = {
    "eager": of_function(called),
    "captured": of_function(by_hand),
    "compile": of_function(by_hand, {}),
    "max-autotune": of_function(by_hand, {"mode": "max-autotune-no-cudagraphs"}),
    "reduce-overhead": of_function(in_trees, {"mode": "reduce-overhead"}, static=True),
    "gpt-fast": gpt_fast,
}
