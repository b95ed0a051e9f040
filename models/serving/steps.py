"""What the loop calls: a model's forward and the draw of its tokens, captured as one function.

What only some batches need is not paid for by the others: a `Case` of them has a function of its
own, over the same cache and pool. Adapters cost two products a projection. Penalties, masks and
logprobs cost some passes over the vocabulary, and the text so far in the batch. A verify batch
draws at each place of a draft, the others once a request. Cascade attention is never part of a
graph, so that its batches run PIECEWISE where there is that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families import lora
from fngraph.models.families.rope import unscaled
from fngraph.models.serving.ability import (
    Ability,
    check_made,
    check_many,
    check_names,
    check_unused,
    count_blocks,
)
from fngraph.models.serving.batches import MANY, SHAPED, batch_type, empty_batch, limits_of
from fngraph.models.serving.halting import Halt
from fngraph.models.serving.logits import Drawn, changed, drawn
from fngraph.models.serving.policy import Policy, whole
from fngraph.models.serving.ranks.circles import ONE, Ranks
from fngraph.models.serving.ranks.stages import WHOLE, Stage, like_hidden, run_stage
from fngraph.models.serving.requests import State
from fngraph.models.serving.sampling import sample
from fngraph.models.serving.turns import many_forward

Forward = Callable[[Any, Any, Any], tuple[Tensor, Any]]


def no_slots(slot: int, adapter: Any, state: State) -> None:
    """`load_slot` of steps without adapters."""
    raise ValueError(
        f"slot {slot}: these steps load no adapters. Make slots for them: "
        "make_steps(..., adapters=lora.slots(params, count=8, rank=16))"
    )


class Steps(NamedTuple):
    """How the loop reaches a model.

    Attributes:
        host_batch: spec -> a batch to be filled.
        run: cache, batch, allowed=None -> token ids (R, Q), cache; of a batch of "many" (R,
            decode_many), UNDRAWN behind each request's last; `Drawn` in place of ids where a
            request of the batch wants more than a draw. `allowed`: what was decided beforehand.
        runs_as: spec -> what it runs as; asked after the step, what it ran as.
        captured: the functions beneath, the one for plain batches first.
        can: what they were made for, by which requests fail; None: nothing is refused.
        load_slot: slot, adapter, state -> writes what `load_adapter` or `lora.one_slot` made into
            the slot, between two steps; ValueError if a request uses it. Nothing is captured.
        ranks: the processes that run these steps together.
        halt: what ends a launch of several tokens while it runs; None: there are none.
    """

    host_batch: Callable[[fg.BatchSpec], Any]
    run: Callable[..., tuple[Any, Any]]
    runs_as: Callable[[fg.BatchSpec], fg.core.Dispatch]
    captured: tuple[Any, ...] = ()
    can: Ability | None = None
    load_slot: Callable[[int, Any, State], None] = no_slots
    ranks: Ranks = ONE
    halt: Halt | None = None

    def __repr__(self) -> str:
        keys = f"{sum(map(len, self.captured))} keys of {len(self.captured)} functions"
        return f"Steps({keys}; {self.can})"


def served_forward(
    forward: Forward, *more: str, max_logprobs: int = 1, draws: bool = True
) -> Callable[..., tuple[Tensor | Drawn, Any]]:
    """`forward`, then the draw: what is captured. Batches have the fields of `batch_type(*more)`.

    With "adapters" it takes them behind the params, as `lora.adapted(forward)` does.

    Args:
        draws: whether it gives logits; hidden states come back as they are.
    """
    greedy = "sampling" not in more

    def draw(logits_RQV: Tensor, batch: Any) -> Tensor | Drawn:
        if not draws:
            return logits_RQV
        places_RQ = batch.positions[batch.logits_indices] + 1
        if "logits" not in more:
            return sample(logits_RQV, batch, places_RQ, greedy=greedy)
        changed_RQV = changed(logits_RQV, batch, places_RQ)
        ids_RQ = sample(changed_RQV, batch, places_RQ, greedy=greedy)
        return drawn(logits_RQV, ids_RQ, max_logprobs)

    def step(params: Any, cache: Any, batch: Any) -> tuple[Tensor | Drawn, Any]:
        logits_RQV, cache = forward(params, cache, batch)
        return draw(logits_RQV, batch), cache

    def adapted(params: Any, adapters: Any, cache: Any, batch: Any) -> tuple[Tensor | Drawn, Any]:
        logits_RQV, cache = lora.adapted(forward)(params, adapters, cache, batch)
        return draw(logits_RQV, batch), cache

    chosen = adapted if "adapters" in more else step
    chosen.__annotations__["batch"] = batch_type(*more)
    return chosen


def make_steps(
    forward: Forward, params: Any, cache: Any, policy: Policy, *more: str, modes: str,
    adapters: Any = None, progress: bool = True, vocab_size: int | None = None,
    max_len: int | None = None, stage: Stage = WHOLE, **options: Any,
) -> Steps:  # fmt: skip
    """`forward` and the draw, weights bound and graphs captured.

    Args:
        cache: of `init_cache`, with blocks of `policy.block_size`.
        more: what batches have: "sampling", without which steps are greedy; "logits", for
            penalties, biases, grammars, barred stops and logprobs; "states".
        adapters: `lora.slots(...)`.
        progress: show a progress bar for each function.
        vocab_size, max_len: tokens and positions of the model, beyond which a request fails; None:
            those of `params.config`, where it has them.
        stage: which part of a model `params` are; see `fngraph.models.serving.ranks.stages`.
        options: `fg.graphify`'s.

    Raises:
        TypeError: arguments of another kind.
        ValueError: what does not fit together, see `fngraph.models.serving.ability`.
    """
    check_made(forward, params, cache, policy, options)
    fg.core.text.expect(Stage, "stage_of(ranks)", TypeError, stage=stage)
    fg.core.text.expect(bool, "True or False", TypeError, progress=progress)
    modes = str(fg.Mode.parse(modes))
    check_many(policy, modes, stage.total)
    blocks = count_blocks(cache, policy)
    can = ability(params, policy, more, adapters, blocks, vocab_size, max_len)
    captured: dict[Case, Any] = {}
    halt = Halt(fg.core.trees.flatten(cache)[0][0].device) if policy.decode_many > 1 else None
    all_names, hidden = cases(policy, adapters, more), tuple[str, ...]()
    like_E = like_hidden(params) if stage.total > 1 else None
    if like_E is not None and not stage.first:
        hidden = (f"hidden {str(like_E.dtype).removeprefix('torch.')}",)
    for case, names in all_names.items():
        query_lens = tuple(q for q in policy.query_lens if (q > 1) == case.verify)
        query_lens = (max(query_lens),) if case.many else query_lens
        own: dict[str, Any] = {"modes": case.modes(modes), "query_lens": query_lens}
        if case.adapted:
            own["adapters"] = (can.adapters,)
        if case.shaped or case.many:
            field = MANY_FIELD if case.many else SHAPED_FIELD
            own["fields"] = (*options.get("fields", ()), field)
        step = case.forward(forward, policy, *names, *hidden, draws=stage.last)
        fast = fg.graphify(step, donate="cache", stage="batch", **{**options, **own})
        if captured:
            options["recorder"] = captured[PLAIN].recorder
        bound = fast.bind(*case.held(params, adapters, halt))
        label = f"capturing {case.text}" if progress else False
        width = len(like_E) if like_E is not None and hidden else None
        limits = limits_of(case.policy(policy), can.vocab_size if case.shaped else None, width)
        captured[case] = bound.capture(cache, limits, progress=label)
    functions = tuple(captured.values())
    if like_E is not None:
        return _staged(stage, captured, all_names, hidden, policy, can, like_E)
    if len(functions) == 1:
        (only,) = functions
        return Steps(only.host_batch, only, only.runs_as, functions, can)
    of = lambda spec: captured[case_of(spec)]  # noqa: E731
    return Steps(
        lambda spec: of(spec).host_batch(spec),
        lambda cache, batch, allowed=None: of(batch.spec)(cache, batch, allowed=allowed),
        lambda spec: of(spec).runs_as(spec),
        functions,
        can,
        _loader(captured),
        halt=halt,
    )


def _loader(captured: Mapping[Case, Any]) -> Callable[[int, Any, State], None]:
    """`load_slot` of functions, all of which hold the same slots."""
    if ADAPTED not in captured:
        return no_slots

    def load_slot(slot: int, adapter: Any, state: State) -> None:
        check_unused(slot, state)
        captured[ADAPTED].load_slot(slot, adapters=adapter)

    return load_slot


def _staged(
    stage: Stage, captured: Mapping[Case, Any], all_names: Mapping[Case, tuple[str, ...]],
    hidden: tuple[str, ...], policy: Policy, can: Ability, like_E: Tensor,
) -> Steps:  # fmt: skip
    """The steps of one stage: batches are those of the first one, and hidden states come beside."""

    def host_batch(spec: fg.BatchSpec) -> Any:
        case = case_of(spec)
        if stage.first:
            return captured[case].host_batch(spec)
        kind = batch_type(*all_names[case])
        return empty_batch(kind, case.policy(policy), spec, can.vocab_size)

    def run(cache: Any, batch: Any, allowed: Any = None) -> tuple[Any, Any]:
        case = case_of(batch.spec)
        kind = batch_type(*all_names[case], *hidden)
        return run_stage(stage, captured[case], cache, batch, allowed, kind, like_E)

    return Steps(
        host_batch,
        run,
        lambda spec: captured[case_of(spec)].runs_as(spec),
        tuple(captured.values()),
        can,
        _loader(captured),
    )


def bare_steps(
    forward: Forward, params: Any, policy: Policy, *more: str, adapters: Any = None,
    device: torch.device | str = "cpu", vocab_size: int | None = None, max_len: int | None = None,
) -> Steps:  # fmt: skip
    """Steps without fngraph: `forward` itself, eager, which all modes are held to."""
    check_made(forward, params, None, policy)
    halt = Halt(device) if policy.decode_many > 1 else None
    all_names = cases(policy, adapters, more)

    def host_batch(spec: fg.BatchSpec) -> Any:
        case = case_of(spec)
        kind = batch_type(*all_names[case])
        return empty_batch(kind, case.policy(policy), spec, can.vocab_size)

    def run(cache: Any, batch: Any, allowed: Any = None) -> tuple[Any, Any]:
        leaves = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in vars(batch).items()}
        case = case_of(batch.spec)
        step = case.forward(forward, policy, *all_names[case])
        return step(*case.held(params, adapters, halt), cache, type(batch)(**leaves))

    def dispatch(spec: fg.BatchSpec) -> fg.core.Dispatch:
        return fg.core.Dispatch(fg.Mode.NONE, spec.descriptor(), "bare forward")

    can = ability(params, policy, more, adapters, None, vocab_size, max_len)
    return Steps(host_batch, run, dispatch, can=can, halt=halt)


class Case(NamedTuple):
    """Which function serves a batch."""

    cascade: bool = False
    adapted: bool = False
    verify: bool = False
    shaped: bool = False
    many: bool = False

    @property
    def text(self) -> str:
        """In words."""
        named = zip(("cascade", "adapters", "verify", "logits", "many"), self)
        return " ".join(name for name, has in named if has) or "plain"

    def modes(self, asked: str) -> str:
        """The modes of its function: verify batches are uniform, so mixed ones have no keys, and
        those of "many"; whose turns have no place between graphs for attention."""
        if self.cascade:
            return "PIECEWISE" if asked in ("PIECEWISE", "FULL_AND_PIECEWISE") else "NONE"
        mixed = asked in ("FULL", "FULL_AND_PIECEWISE")
        return "FULL_DECODE_ONLY" if (self.verify or self.many) and mixed else asked

    def forward(
        self, forward: Forward, policy: Policy, *names: str, draws: bool = True
    ) -> Callable[..., tuple[Tensor | Drawn, Any]]:
        """The function that is captured for its batches, which have what is named."""
        if self.many:
            drafts = max(policy.query_lens) - 1 if self.verify else 0
            sizes = policy.decode_many, policy.block_size
            return many_forward(forward, *sizes, *names, drafts=drafts, ngram=policy.ngram)
        return served_forward(forward, *names, max_logprobs=policy.max_logprobs, draws=draws)

    def held(self, params: Any, adapters: Any, halt: Halt | None) -> tuple[Any, ...]:
        """What its function takes before the cache."""
        flag = (halt.leaf,) if self.many and halt is not None else ()
        return (params, adapters, *flag) if self.adapted else (params, *flag)

    def policy(self, whole: Policy) -> Policy:
        """The policy of its batches: only those with drafts draw more than one token a request."""
        return whole if self.verify else dataclasses.replace(whole, query_lens=(1,))


PLAIN, ADAPTED = Case(), Case(adapted=True)
SHAPED_FIELD, MANY_FIELD = (
    fg.core.Field(name, fg.core.Equal(), default=False)  # any value: see `Case`
    for name in ("logits", "many")
)


def case_of(spec: fg.BatchSpec) -> Case:
    """The case of a batch."""
    verify, shaped, many = (spec.query_len or 1) > 1, SHAPED[0] in spec.extra, MANY[0] in spec.extra
    return Case(spec.cascade, spec.adapters > 0, verify, shaped, many)


def cases(policy: Policy, adapters: Any, more: tuple[str, ...]) -> dict[Case, tuple[str, ...]]:
    """Every case that can come, with the names of what its batches have beside the paged fields."""
    check_names(more, policy)
    either = (False, True)
    always = tuple(name for name in more if name != "logits")
    found = {
        Case(cascade, adapted, verify, shaped): (
            ("cascade",) * cascade + ("adapters",) * adapted + ("logits",) * shaped + always
        )
        for shaped in either[: 1 + ("logits" in more)]
        for cascade in either[: 1 + bool(policy.cascade)]
        for adapted in either[: 1 + (adapters is not None)]
        for verify in either[: 1 + (max(policy.query_lens) > 1)]
    }
    if policy.decode_many > 1:
        found |= {
            Case(adapted=adapted, verify=verify, many=True): (
                ("adapters",) * adapted + ("many",) + ("lookup",) * verify + always
            )
            for adapted in either[: 1 + (adapters is not None)]
            for verify in either[: 1 + (max(policy.query_lens) > 1)]
        }
    return found


def ability(
    params: Any, policy: Policy, more: tuple[str, ...], adapters: Any, num_blocks: int | None,
    vocab_size: int | None, max_len: int | None,
) -> Ability:  # fmt: skip
    """What such steps can do; what is not said of the model is asked of `params.config`."""
    config = getattr(params, "config", None)
    if vocab_size is None:
        vocab_size = getattr(config, "vocab_size", None)
    if max_len is None:
        max_len = getattr(config, "max_len", None) or None
    for name, count in (("vocab_size", vocab_size), ("max_len", max_len)):
        if count is not None and whole(name, count) < 1:
            raise ValueError(f"{name}={count}: pass what the model has, 1 or more")
    if "logits" in more and vocab_size is None:
        raise ValueError('"logits" needs the size of the vocabulary: pass vocab_size=')
    if "logits" in more and (own := getattr(config, "vocab_size", vocab_size)) != vocab_size:
        raise ValueError(f"vocab_size={vocab_size}, but the model has {own} logits. Leave it out")
    most = unscaled(getattr(config, "rope_scaling", None))
    return Ability(policy, more, count_slots(adapters), num_blocks, vocab_size, max_len, most)


def count_slots(adapters: Any) -> int:
    """How many adapters there are slots for."""
    return 0 if adapters is None else lora.slot_count(adapters)
