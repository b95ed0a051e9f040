"""Hugging Face causal LMs as they are: attention over a paged cache, graphs around it.

    fast = graphify_model(model, fg.Limits(2048, 64, B=128))
    fast.generate(prompts, max_new_tokens=48)      # lists of tokens in, lists of tokens out
    print(fast.support)                            # per layer: backend, level, reason

A vision-language model is three of them on one pool: its tower's graphs, those of steps in which
there are tokens of pictures, and those of all other steps.

    fast.generate(prompts, max_new_tokens=48, pictures=[pictures(pixel_values, image_grid_thw)])

Nothing of transformers is edited. Attention reaches `fg.ops.attention` through the interface that
transformers has for it, weights are passed in by `torch.func.functional_call`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, overload

import torch
from torch import Tensor

from fngraph.core import Limits, Mode
from fngraph.encoder.graphs import graphify_encoder
from fngraph.errors import ModelError, SpecError
from fngraph.graphified import graphify
from fngraph.integrations.transformers.fixed import Fixed, experts_of, scaled_ropes
from fngraph.integrations.transformers.forward import (
    KV,
    Batch,
    Forward,
    Pictured,
    Placed,
    attention_layers,
    init_cache,
    params_of,
    pure_forward,
    refuse_moved,
)
from fngraph.integrations.transformers.generation import asked, processors
from fngraph.integrations.transformers.multimodal import (
    APART,
    Vision,
    batch_of,
    picture_tokens,
    see,
    shown_in,
    vlm_of,
)
from fngraph.integrations.transformers.prompts import refuse_endless, tokens_of
from fngraph.integrations.transformers.suitable import refuse_long, refuse_unsuitable
from fngraph.integrations.transformers.support import ModelSupport, support_of
from fngraph.integrations.transformers.trial import check_step
from fngraph.integrations.transformers.vision import Picture, vision_encoder
from fngraph.models.serving.policy import Policy, whole
from fngraph.models.serving.requests import Event, Row, State, start
from fngraph.models.serving.sampling import likeliest
from fngraph.models.serving.scheduling import advance, plan
from fngraph.models.serving.submitting import submit
from fngraph.step.step import Step


class Served(NamedTuple):
    """One step of `GraphifiedModel.serve`.

    Attributes:
        rows: of the step: each request, with how many tokens it computed.
        logits_RV: of each row's last token.
        state: after the step.
        events: the new token of each request that got one.
    """

    rows: tuple[Row, ...]
    batch: Batch
    logits_RV: Tensor
    state: State
    events: tuple[Event, ...]


@dataclasses.dataclass(frozen=True)
class GraphifiedModel:
    """A model with its graphs, over a paged cache of its own.

    Attributes:
        model: that it was made of.
        forward: the pure function, forward(params, cache, batch) -> (logits, cache).
        params: the model's own parameters and buffers by name, held in place.
        cache: a (k, v) pair a layer, each (num_blocks, block_size, K, D); the step writes it.
        step: step(cache, batch) -> (logits, cache), with graphs for the keys of `step.table`.
        support: per layer, what runs its attention.
        stop: tokens that end a text, of the model's own generation config.
        vocab_size: tokens that the model has.
        max_len: positions that it was made for; None: not known.
        generation: the model's own generation config, of which `generate` takes the rest.
        tokenizer: of transformers, for prompts that are strings; None: there is none.
        picture_tokens: tokens that stand for pictures, or for sound.
        vision: what runs pictures, and steps with tokens of theirs; None: it takes none.
    """

    model: Any
    forward: Forward
    params: Mapping[str, Tensor]
    cache: tuple[KV, ...]
    step: Step
    support: ModelSupport
    stop: frozenset[int]
    vocab_size: int
    max_len: int | None
    generation: Any
    tokenizer: Any = None
    picture_tokens: frozenset[int] = frozenset()
    vision: Vision | None = None

    @overload
    def generate(
        self, prompts: list[str], max_new_tokens: int, *, stop: Collection[int] | None = None
    ) -> list[str]: ...

    @overload
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int,
        *,
        pictures: Sequence[Sequence[Picture]] | None = None,
        stop: Collection[int] | None = None,
    ) -> list[list[int]]: ...

    def generate(
        self,
        prompts: Sequence[Any],
        max_new_tokens: int,
        *,
        pictures: Sequence[Sequence[Picture]] | None = None,
        stop: Collection[int] | None = None,
    ) -> Any:
        """Greedy tokens after each prompt, without the prompt, all prompts batched continuously.

        As transformers' own `generate(..., do_sample=False)`, with the penalties and bans of the
        model's generation config.

        Args:
            prompts: lists of tokens, of any lengths, those of pictures as the model's processor
                writes them; or strings, if there is a tokenizer.
            pictures: of each prompt, as `fngraph.integrations.transformers.pictures` makes them:
                images in the order in which they come, and videos likewise.
            stop: tokens that end a text, the last one in it; None: the model's own.

        Returns:
            the new tokens of each prompt; of prompts that are strings, texts without special
            tokens.

        Raises:
            AddressError: a weight of the model that is no longer where it was.
            SpecError: a prompt that is empty, too long for the limits, the cache or the model, or
                has tokens that are none, or that are not those of its pictures; a string without a
                tokenizer.
            ModelError: pictures for a model that takes none here; the generation config asks for
                what is not here; or, when all others are done, the logits of a prompt are no
                numbers.
        """
        texts: list[list[int]] = [[] for _ in prompts]
        failed: list[Event] = []
        for served in self.serve(prompts, max_new_tokens, pictures=pictures, stop=stop):
            for event in served.events:
                texts[event.id] += event.tokens
                failed += [event] * event.failed
        if failed:
            which = "; ".join(f"prompt {event.id} {event.end}" for event in failed)
            raise ModelError(f"{which}. fast.serve(...) gives the texts of the others")
        if any(isinstance(prompt, str) for prompt in prompts):
            return [self.tokenizer.decode(text, skip_special_tokens=True) for text in texts]
        return texts

    def serve(
        self,
        prompts: Sequence[Sequence[int]] | list[str],
        max_new_tokens: int,
        *,
        pictures: Sequence[Sequence[Picture]] | None = None,
        stop: Collection[int] | None = None,
    ) -> Iterator[Served]:
        """The steps of `generate`, one by one. The whole cache is taken; run one at a time.

        A prompt whose logits are no numbers fails alone: see `Event.end`.
        """
        refuse_moved(self.model, self.params)
        asks, max_new_tokens = asked(self.generation), whole("max_new_tokens", max_new_tokens)
        limits = self.step.limits
        num_blocks, block_size = self.cache[0][0].shape[:2]
        prompts, vision = tokens_of(prompts, self.tokenizer), self.vision
        shown = shown_in(vision and vision.vlm, self.picture_tokens, prompts, pictures)
        policy = Policy(  # blocks go by tokens, and equal tokens may stand for other pictures
            limits.max_tokens, limits.max_reqs, limits["B"], block_size, share=not shown
        )
        ends = [int(token) for token in (self.stop if stop is None else stop)]
        state = start(num_blocks, policy)
        for i, prompt in enumerate(prompts):
            refuse_endless(i, len(prompt), max_new_tokens, policy, num_blocks, self.max_len)
            try:
                state = submit(state, policy, prompt, max_new_tokens, stop=ends)
            except (TypeError, ValueError) as error:
                raise SpecError(f"prompt {i}: {error}") from None
            if (top := max(state.waiting[-1].request.prompt)) >= self.vocab_size:
                raise SpecError(
                    f"prompt {i} has token {top}, but the model's are below {self.vocab_size}"
                )
        device = next(iter(self.params.values())).device
        change = {
            job.id: processors(asks, ends, len(job.tokens), device) for job in state.waiting if asks
        }
        seen: dict[int, Tensor] = {}  # of the prompts that are not computed to their end
        look = functools.partial(see, vision, shown, seen) if vision else None
        kind = Placed if vision else Batch
        while state.live:
            state = plan(state, policy)
            rows = state.rows
            batch = batch_of(kind, rows, policy, shown, look)
            step = vision.prefill if vision and isinstance(batch, Pictured) else self.step
            logits_RV, _ = step(self.cache, batch)
            for job, new, _ in rows:
                if job.computed + new >= len(job.request.prompt):
                    seen.pop(job.id, None)
            chosen_RV = changed(logits_RV, rows, change) if change else logits_RV
            state, events = advance(state, likeliest(chosen_RV)[:, None].tolist())
            yield Served(rows, batch, logits_RV, state, events)

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
    compile: str = "none",
    passes: Any = None,
    tokenizer: Any = None,
    encoder: Mapping[str, Any] | None = None,
) -> GraphifiedModel:
    """Graphs for a transformers causal LM over a paged cache, or for a vision-language model.

    Args:
        model: in eval mode, on one device; neither it nor its config is changed.
        limits: with B, the most blocks that a request may have: `Limits(2048, 64, B=128)`.
        modes, sizes, backends, recorder, outputs, compile, passes: as `fg.graphify` takes them.
        num_blocks: of the cache; None: enough for `max_reqs` requests of B blocks each.
        block_size: tokens a block.
        experts: transformers' name for how experts run, where there are any; None: "grouped_mm"
            where the device can, else "batched_mm".
        lazy: capture a key when it is first needed, not now.
        tokenizer: of transformers, for `generate` of strings: AutoTokenizer.from_pretrained(...).
        check: first run two small requests, and compare their logits with the model's own.
        encoder: of a vision-language model, what `fg.graphify_encoder` takes for its tower:
            budgets, max_items, ...; its graphs are of up to 8192 output tokens, or as many as a
            request may have.

    Raises:
        ModelError: a model that cannot run over a paged cache, with the reason; options of an
            encoder for one that takes no pictures here.
        PurityError: its forward does what a graph would freeze, with the line in its file.
        FnGraphError: see the classes in `fngraph.errors`.
    """
    refuse_unsuitable(model)
    if not isinstance(limits, Limits):
        raise TypeError(
            f"limits={limits!r}: pass Limits(max_tokens, max_reqs, B=blocks of a request)"
        )
    refuse_long(model, limits, block_size)
    vlm = vlm_of(model)
    if encoder is not None and vlm is None:
        raise ModelError(
            f"encoder= is for models that take pictures here, and {type(model).__name__} is none "
            f"of {', '.join(sorted(APART))}. Leave it out"
        )
    longest = limits["B"] * block_size
    fixed = Fixed(experts_of(model, experts), scaled_ropes(model, longest))
    params = params_of(model, fixed.ropes)
    layers = attention_layers(model, params, limits, longest, fixed)
    num_blocks = limits.max_reqs * limits["B"] if num_blocks is None else num_blocks
    cache = init_cache(layers, num_blocks, block_size, next(iter(params.values())).device)
    kind = Batch if vlm is None else Placed
    forward = pure_forward(model, longest, fixed, kind)
    if check:
        check_step(model, forward, params, layers, kind)
    modes, options = Mode.parse(modes), {"compile": compile, "passes": passes}
    laid = {
        "donate": "cache", "stage": "batch", "sizes": sizes, "outputs": outputs,
        "backends": backends, **options,
    }  # fmt: skip
    fast = graphify(forward, modes=modes, limits=limits, recorder=recorder, **laid)
    lowered = fast.trace(params, cache).split().lower()
    step = lowered.compile().capture(params, cache, recorder=recorder, outputs=outputs, lazy=lazy)
    vision = None
    if vlm is not None:
        seeing, weights = vision_encoder(model, max_tokens=min(8192, longest))
        if modes is Mode.NONE:
            seeing = dataclasses.replace(seeing, eager_because='modes="NONE"')
        of_tower = "PIECEWISE" if modes is Mode.PIECEWISE else "FULL"
        given = {"modes": of_tower, "recorder": step.recorder, **options, **(encoder or {})}
        tower = graphify_encoder(seeing, weights, **given)
        pictured = graphify(
            pure_forward(model, longest, fixed, Pictured), modes=modes.mixed, **laid
        )
        wide = Limits(
            limits.max_tokens, limits.max_reqs, **limits.dims | {"N": vlm.rows, "E": vlm.dim}
        )
        prefill = pictured.bind(params).capture(
            cache, wide, recorder=step.recorder, lazy=lazy, progress=False
        )
        vision = Vision(vlm, tower if lazy else tower.capture(), prefill)
    stop = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    ends = [] if stop is None else [stop] if isinstance(stop, int) else stop
    return GraphifiedModel(
        model, forward, params, cache, step, support_of(model, layers, lowered), frozenset(ends),
        model.get_input_embeddings().weight.shape[0],
        getattr(model.config.get_text_config(), "max_position_embeddings", None),
        getattr(model, "generation_config", None), tokenizer, picture_tokens(model), vision,
    )  # fmt: skip


def changed(
    logits_RV: Tensor, rows: Sequence[Row], change: Mapping[int, Callable[[Tensor, Tensor], Tensor]]
) -> Tensor:
    """The logits in float32, each row by its text so far."""
    out_RV = logits_RV.float()
    for i, (job, new, _) in enumerate(rows):
        text = torch.as_tensor(job.tokens.view(0, job.computed + new), device=out_RV.device)
        out_RV[i] = change[job.id](text[None], out_RV[i, None].clone())[0]
    return out_RV
