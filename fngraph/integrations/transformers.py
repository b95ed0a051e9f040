"""Hugging Face causal LMs as they are: attention over a paged cache, graphs around it.

    fast = graphify_model(model, fg.Limits(2048, 64, B=128))
    fast.generate(prompts, max_new_tokens=48)      # lists of tokens in, lists of tokens out
    print(fast.support)                            # per layer: backend, level, reason

Nothing of transformers is edited. Attention reaches `fg.ops.attention` through the interface that
transformers has for it, weights are passed in by `torch.func.functional_call`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from fngraph.core import Limits, Mode
from fngraph.graphified import graphify
from fngraph.integrations.hf_check import check_step
from fngraph.integrations.hf_fixed import Fixed, experts_of, refuse_unsuitable, scaled_ropes
from fngraph.integrations.hf_forward import (
    KV,
    Batch,
    Forward,
    attention_layers,
    init_cache,
    params_of,
    pure_forward,
)
from fngraph.integrations.hf_support import ModelSupport, support_of
from fngraph.integrations.serving import Row, State, advance, lay_out, schedule, start
from fngraph.step.step import Step


class Served(NamedTuple):
    """One step of `GraphifiedModel.serve`: its rows, its batch, their logits, the state after."""

    rows: tuple[Row, ...]
    batch: Batch
    logits_RV: Tensor
    state: State


@dataclasses.dataclass(frozen=True)
class GraphifiedModel:
    """A model with its graphs, over a paged cache of its own.

    Attributes:
        forward: the pure function, forward(params, cache, batch) -> (logits, cache).
        params: the model's own parameters and buffers by name, held in place.
        cache: a (k, v) pair a layer, each (num_blocks, block_size, K, D); the step writes it.
        step: step(cache, batch) -> (logits, cache), with graphs for the keys of `step.table`.
        support: per layer, what runs its attention.
        stop: tokens that end a text, of the model's own generation config.
    """

    forward: Forward
    params: Mapping[str, Tensor]
    cache: tuple[KV, ...]
    step: Step
    support: ModelSupport
    stop: frozenset[int]

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop: Collection[int] | None = None,
    ) -> list[list[int]]:
        """Greedy tokens after each prompt, without the prompt, all prompts batched continuously.

        Args:
            prompts: lists of tokens, of any lengths.
            stop: tokens that end a text, the last one in it; None: the model's own.

        Raises:
            SpecError: a prompt that is empty, or too long for the limits or the cache.
        """
        texts: dict[int, list[int]] = {}
        for served in self.serve(prompts, max_new_tokens, stop=stop):
            texts = {r.id: list(r.tokens[r.prompt_len :]) for r in served.state.finished}
        return [texts[i] for i in range(len(prompts))]

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        stop: Collection[int] | None = None,
    ) -> Iterator[Served]:
        """The steps of `generate`, one by one. The whole cache is taken; run one at a time."""
        limits = self.step.limits
        num_blocks, block_size = self.cache[0][0].shape[:2]
        state = start(prompts, max_new_tokens, limits, num_blocks, block_size)
        while state.live:
            state, rows = schedule(state, limits)
            batch = Batch(**lay_out(rows, limits, block_size))
            logits_RV, _ = self.step(self.cache, batch)
            tokens = logits_RV.argmax(-1).tolist()
            state = advance(state, rows, tokens, self.stop if stop is None else stop)
            yield Served(rows, batch, logits_RV, state)

    def __repr__(self) -> str:
        return f"GraphifiedModel({len(self.support.rows)} layers, {self.step!r})"


def graphify_model(
    model: Any,
    limits: Limits,
    *,
    modes: Mode | str = Mode.FULL_AND_PIECEWISE,
    sizes: Sequence[int] | None = None,
    num_blocks: int | None = None,
    block_size: int = 16,
    backends: Mapping[str, str] | None = None,
    experts: str | None = None,
    recorder: str | None = None,
    outputs: str = "own",
    lazy: bool = False,
    check: bool = True,
) -> GraphifiedModel:
    """Graphs for a transformers causal LM over a paged cache.

    Args:
        model: in eval mode, on one device; neither it nor its config is changed.
        limits: with B, the most blocks that a request may have: `Limits(2048, 64, B=128)`.
        modes, sizes, backends, recorder, outputs: as `fg.graphify` takes them.
        num_blocks: of the cache; None: enough for `max_reqs` requests of B blocks each.
        block_size: tokens a block.
        experts: transformers' name for how experts run, where there are any; None: "grouped_mm"
            where the device can, else "batched_mm".
        lazy: capture a key when it is first needed, not now.
        check: first run two small requests, and compare their logits with the model's own.

    Raises:
        ModelError: a model that cannot run over a paged cache, with the reason.
        PurityError: its forward does what a graph would freeze, with the line in its file.
        FnGraphError: see the classes in `fngraph.errors`.
    """
    refuse_unsuitable(model)
    longest = limits["B"] * block_size
    fixed = Fixed(experts_of(model, experts), scaled_ropes(model, longest))
    params = params_of(model, fixed.ropes)
    layers = attention_layers(model, params, limits, longest, fixed)
    num_blocks = limits.max_reqs * limits["B"] if num_blocks is None else num_blocks
    cache = init_cache(layers, num_blocks, block_size, next(iter(params.values())).device)
    forward = pure_forward(model, longest, fixed)
    if check:
        check_step(model, forward, params, layers)
    fast = graphify(
        forward, modes=modes, donate="cache", stage="batch", limits=limits, sizes=sizes,
        backends=backends, recorder=recorder, outputs=outputs,
    )  # fmt: skip
    lowered = fast.trace(params, cache).split().lower()
    step = lowered.compile().capture(params, cache, recorder=recorder, outputs=outputs, lazy=lazy)
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return GraphifiedModel(
        forward, params, cache, step, support_of(model, layers, lowered), frozenset(ends)
    )
