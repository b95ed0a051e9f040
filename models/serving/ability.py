"""What steps were made for, and the requests, policies and caches that they refuse.

A batch has a field only if its steps were made with it, so that what a request asks for beyond
that would be left out without a word. A token or a position that the model does not have would be
read out of its tables' bounds. Such requests fail, each by itself; policies and caches that do not
fit are errors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import fngraph as fg
from fngraph.models.serving.blocks import behind
from fngraph.models.serving.logits import edits
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import Job, Request, State, user_of
from fngraph.models.serving.sampling import COLD
from fngraph.models.weights import naming


class Ability(NamedTuple):
    """What steps can do.

    Attributes:
        policy: that they were made for; a loop's own may have lower budgets.
        more: "sampling", "logits", "states".
        adapters: slots.
        num_blocks: of the cache; None: not known.
        vocab_size: tokens that the model has; None: not known.
        max_len: positions that it was made for; None: not known.
        max_prompt: tokens of a prompt, beyond which its rope would go by all of it, and not by the
            text up to each token; None: any. See `fngraph.models.families.rope`.
    """

    policy: Policy
    more: tuple[str, ...] = ()
    adapters: int = 0
    num_blocks: int | None = None
    vocab_size: int | None = None
    max_len: int | None = None
    max_prompt: int | None = None

    def __str__(self) -> str:
        drawn = "sampling" if "sampling" in self.more else "greedy"
        drawn += ", logits" * ("logits" in self.more)
        sizes = f"max_tokens={self.policy.max_tokens}, max_reqs={self.policy.max_reqs}"
        return f"{drawn}, {self.adapters} adapters, {sizes}"

    def check(self, state: State, policy: Policy) -> None:
        """Refuse a policy or a pool that the steps were not made for.

        Raises:
            ValueError: what does not fit, and what to pass to `make_steps`.
        """
        if policy is not self.policy and not _serves(self.policy, policy, "logits" in self.more):
            raise ValueError(f"the loop has {policy}, but make_steps had {self.policy}; pass one")
        if self.num_blocks is not None and state.pool.num_blocks > self.num_blocks:
            raise ValueError(
                f"start({state.pool.num_blocks}, policy) has more blocks than the cache of "
                f"make_steps, {self.num_blocks}. Pass start({self.num_blocks}, policy)"
            )

    def fault(self, job: Job) -> str | None:
        """Why a request cannot be run; None: it can. To be asked when it joins."""
        asked = job.request
        if asked.adapter >= self.adapters:
            has = f"{self.adapters} slots for adapters, counted from 0" if self.adapters else "none"
            fix = f"lora.slots(params, count={asked.adapter + 1}, rank=16)"
            return (
                f"adapter={asked.adapter}, but these steps have {has}. Pass make_steps(..., "
                f"adapters={fix})"
            )
        if "sampling" not in self.more and asked.settings.temperature >= COLD:
            fix = 'make_steps(..., "sampling"), or leave settings= out of submit'
            return f"these steps are greedy, given {asked.settings}. Pass {fix}"
        if asked.shaped and (reason := self._unshaped(asked)):
            return reason
        last = len(asked.prompt) + asked.max_new - 1  # the last token drawn has no position
        if self.max_len is not None and last > self.max_len:
            return (
                f"{len(asked.prompt)} prompt tokens and {asked.max_new} new ones go beyond the "
                f"model's {self.max_len} positions"
            )
        if self.max_prompt is not None and len(asked.prompt) > self.max_prompt:
            return (
                f"a prompt of {len(asked.prompt)} tokens, but the model's rope is rescaled for "
                f"prompts of more than {self.max_prompt}: shorten it, or use a model whose "
                "rope_type is linear, llama3 or yarn"
            )
        if self.vocab_size is not None and (top := int(job.tokens.view().max())) >= self.vocab_size:
            at = asked.prompt.index(top)
            return f"prompt[{at}]={top}, but the model's tokens are below {self.vocab_size}"
        return None

    def _unshaped(self, asked: Request) -> str | None:
        """Why its logits cannot be changed or reported as it asks."""
        if "logits" not in self.more:
            return (
                "these steps change no logits and report none (penalties, logit_bias, grammar, "
                'min_tokens before a stop, logprobs). Pass make_steps(..., "logits")'
            )
        if (asked.logprobs or 0) > (most := self.policy.max_logprobs):
            return f"logprobs={asked.logprobs}, beyond {most}. Pass Policy(max_logprobs=...)"
        named = edits(asked)
        if len(named) > (most := self.policy.max_bias):
            return (
                f"logit_bias and barred stops name {len(named)} tokens, beyond {most}. Pass "
                f"Policy(max_bias={len(named)})"
            )
        assert self.vocab_size is not None, "steps with logits know their vocabulary"
        if (top := max((token for token, *_ in named), default=0)) >= self.vocab_size:
            return f"token {top} of its logit_bias or stops is not below {self.vocab_size}"
        return None


def _serves(made: Policy, policy: Policy, shaped: bool) -> bool:
    """Whether steps for one policy have the shapes and functions that another one needs."""
    same = ["max_blocks", "block_size", "num_slots"]
    same += ["max_bias", "max_logprobs"] * shaped
    return (
        all(getattr(made, name) == getattr(policy, name) for name in same)
        and (policy.max_tokens <= made.max_tokens and policy.max_reqs <= made.max_reqs)
        and max(policy.query_lens) <= max(made.query_lens)
        and policy.decode_many <= made.decode_many
        and (bool(made.cascade) or not policy.cascade)
    )


DECIDED = {
    "limits": "Policy(max_tokens=..., max_reqs=..., max_blocks=...)",
    "query_lens": "Policy(query_lens=...)",
    "donate": "nothing: the cache is donated",
}
"""Options of `fg.graphify` that steps have by their policy, and what to pass."""


def check_made(
    forward: Any, params: Any, cache: Any, policy: Any, options: Iterable[str] = ()
) -> None:
    """Refuse what steps cannot be made of.

    Raises:
        TypeError: arguments of another kind, or swapped; an option that the policy decides.
    """
    expect = fg.core.text.expect
    own = getattr(forward, "forward", None) if inspect.ismodule(forward) else None
    name = f"{forward.__name__.rsplit('.', 1)[-1]}.forward" if own else "a function, llama.forward"
    expect(Callable, name, TypeError, forward=forward)
    expect(Policy, "Policy(max_tokens=..., max_reqs=..., max_blocks=...)", TypeError, policy=policy)
    if hasattr(cache, "config") and not hasattr(params, "config"):
        raise TypeError(
            f"cache is {fg.core.text.a(type(cache).__name__)}, with a config: pass params, then "
            "the cache, make_steps(forward, params, cache, policy)"
        )
    for name in options:
        if name in DECIDED:
            raise TypeError(f"{name}= is not for make_steps. Pass {DECIDED[name]}")


def count_blocks(cache: Any, policy: Policy) -> int | None:
    """How many blocks a cache has; None where that cannot be seen, as among states of slots.

    Raises:
        ValueError: a leaf of 3 or 4 dims that is not (num_blocks, policy.block_size, ...).
    """
    if policy.num_slots:
        return None
    counts = set()
    paged = {path: x for path, x in naming.named(cache).items() if x.dim() in (3, 4)}
    for path, leaf in paged.items():
        if leaf.shape[1] != policy.block_size:
            raise ValueError(
                f"cache leaf {path} is {list(leaf.shape)}, not (num_blocks, {policy.block_size}, "
                "...), as the policy's block_size says. Pass init_cache(..., "
                f"block_size={policy.block_size}), or Policy(block_size=...)"
            )
        counts.add(len(leaf))
    return min(counts, default=None)


def check_many(policy: Policy, modes: str, stages: int) -> None:
    """Refuse `Policy(decode_many=...)` where several tokens have no launch of their own.

    Raises:
        ValueError: modes without FULL decodes but with PIECEWISE ones; a stage of several.
    """
    asked = f"Policy(decode_many={policy.decode_many})"
    if policy.decode_many > 1 and modes == "PIECEWISE":
        raise ValueError(
            f'{asked} takes its turns inside one graph, and modes="PIECEWISE" has none that holds '
            'a whole step. Pass modes="FULL_AND_PIECEWISE", or leave decode_many out'
        )
    if policy.decode_many > 1 and stages > 1:
        raise ValueError(
            f"{asked} takes its turns on one device, and these are {stages} pipeline stages. Leave "
            "it out"
        )


def check_unused(slot: int, state: State) -> None:
    """Refuse to load an adapter over one that a request still uses.

    Its text would be of both, and so would that of requests that share blocks which were computed
    under the old one, of requests that have ended too.

    Raises:
        ValueError: the first such request; blocks that are kept of such texts.
    """
    if job := user_of(state, slot):
        raise ValueError(
            f"slot {slot}: request {job.id} has adapter={slot} and has not ended. Load another "
            f"slot, wait for its end, or drop it: state = cancel(state, {job.id})"
        )
    if kept := len(behind(state.pool, [(slot,)])):
        raise ValueError(
            f"slot {slot}: {kept} blocks are kept of texts under its adapter. Drop them first: "
            f"state = forget(state, {slot})"
        )


def check_names(more: tuple[str, ...], policy: Policy) -> None:
    """Refuse names that steps cannot be made with.

    Raises:
        ValueError: a name that is none; "states" without slots for them, or slots without.
    """
    for name in more:
        if name not in ("sampling", "logits", "states"):
            raise ValueError(
                f'{name!r} is no name of what steps may have, "sampling", "logits" or "states". '
                "Adapters come with adapters=lora.slots(...), cascade batches with "
                "Policy(cascade=512)"
            )
    if ("states" in more) != bool(policy.num_slots):
        raise ValueError(
            f'"states" goes with slots for them: {more} and num_slots={policy.num_slots}. Pass '
            f'make_steps(..., "states") and Policy(num_slots={policy.max_reqs}, share=False)'
        )
