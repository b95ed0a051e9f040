"""Requests and the state of serving as values: who waits, who runs, what is free."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

import fngraph as fg
from fngraph.models.serving.blocks import Pool, behind, new_pool, release, unname
from fngraph.models.serving.policy import Policy, whole
from fngraph.models.serving.sampling import Settings
from fngraph.models.serving.texts.detokenize import Reading
from fngraph.models.serving.texts.tokens import Tokens

GREEDY = Settings()


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What was asked for.

    Attributes:
        id: its number, in the order of submission.
        prompt: tokens to start from, at least one.
        max_new: tokens to generate, unless it stops before.
        stop: runs of tokens that end it, `((eos,), (13, 13))`; they are its last tokens then.
        adapter: number of its LoRA adapter; -1: none.
        settings: how its tokens are drawn.
        key: of its random numbers, made of the seed, or of `id` where none was given.
        min_tokens: tokens that it has before anything stops it.
        stop_strings: texts that end it; they are not part of its text.
        decode: tokens to text; None: events have no text.
        logprobs: how many of the likeliest tokens are reported at each place, beside the one that
            was drawn; None: nothing is.
        grammar: its new tokens so far -> the tokens that may be next; see `grammars`.
        priority: lower goes first.
        deadline: by the clock that `advance` is told; then it ends.
        shaped: whether its logits are changed or reported, by steps that are made with "logits".
    """

    id: int
    prompt: tuple[int, ...]
    max_new: int
    stop: tuple[tuple[int, ...], ...] = ()
    adapter: int = -1
    settings: Settings = GREEDY
    key: int = 0
    min_tokens: int = 0
    stop_strings: tuple[str, ...] = ()
    decode: Callable[[Sequence[int]], str] | None = None
    logprobs: int | None = None
    grammar: Callable[[tuple[int, ...]], Any] | None = None
    priority: int = 0
    deadline: float = math.inf
    shaped: bool = False


class Job(NamedTuple):
    """How far a request is.

    Attributes:
        tokens: the prompt and what was generated.
        computed: how many of them are in the cache.
        blocks: its blocks of the cache, in order; none unless it is running.
        slot: of its recurrent state; -1 where there is none.
        reading: how far its tokens are text, where it has `decode`.
    """

    request: Request
    tokens: Tokens
    computed: int
    blocks: Tokens
    slot: int
    reading: Reading = Reading()

    @property
    def id(self) -> int:
        """The request's number."""
        return self.request.id

    @property
    def rank(self) -> tuple[int, int]:
        """Who goes first: by priority, then first come first."""
        return self.request.priority, self.request.id

    @property
    def generated(self) -> tuple[int, ...]:
        """Tokens so far."""
        return tuple(self.tokens.view(len(self.request.prompt)).tolist())

    @property
    def missing(self) -> int:
        """Tokens that the next step would have to compute to reach a new one."""
        return len(self.tokens) - self.computed

    @property
    def decoding(self) -> bool:
        """Whether its prompt is in the cache, and a step of one token brings it further."""
        return len(self.tokens) - self.computed == 1 and self.computed >= len(self.request.prompt)


class Row(NamedTuple):
    """A job's part of a step: its next `new` tokens, then the drafts behind them."""

    job: Job
    new: int
    drafts: tuple[int, ...] = ()


class Logprob(NamedTuple):
    """How likely a token was, by the logits that the model gave.

    Attributes:
        logprob: natural logarithm of the probability of the token that was drawn.
        top: the likeliest tokens and theirs, likeliest first.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class Event(NamedTuple):
    """What a step did for one request.

    Attributes:
        id: the request's number.
        tokens: its new tokens.
        end: why these are its last: "stop", "length" or "time", or "failed: " and the reason; None:
            there will be more.
        text: what is new of its text and certain, where `submit` was given `decode`: all of them in
            a row are its text, up to what stopped it.
        logprobs: one for each token, where `submit` was asked for them.
    """

    id: int
    tokens: tuple[int, ...]
    end: str | None
    text: str = ""
    logprobs: tuple[Logprob, ...] = ()

    @property
    def failed(self) -> bool:
        """Whether it could not be run to its end; the others go on."""
        return self.end is not None and self.end.startswith("failed: ")


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything that scheduling depends on. Finished requests are not kept.

    Attributes:
        waiting: by priority, of one priority first come first.
        running: hold blocks; in the same order.
        rows: of the step under way.
        pool: the blocks.
        slots: of recurrent state that are free.
        submitted: how many requests ever were.
        faults: of the rows under way, by the request's number: why it fails at the end of the step.
        soonest: no deadline is before it.
        reused: tokens that requests which join in the step under way found computed.
        turns: tokens that each row of the step under way may draw, one after the other.
        single: why it is one, where `Policy(decode_many=...)` asks for more.
        vocab_size: tokens that the steps' model has; None: not known.
    """

    waiting: tuple[Job, ...]
    running: tuple[Job, ...]
    rows: tuple[Row, ...]
    pool: Pool
    slots: tuple[int, ...]
    submitted: int
    faults: Mapping[int, str] = dataclasses.field(default_factory=dict)
    soonest: float = math.inf
    reused: int = 0
    turns: int = 1
    single: str = ""
    vocab_size: int | None = None

    @property
    def live(self) -> bool:
        """Whether there is work left."""
        return bool(self.waiting or self.running)

    def __repr__(self) -> str:
        free = f"{len(self.pool.free)} of {self.pool.num_blocks} blocks free"
        rows = f"{len(self.rows)} rows under way"
        return f"State({len(self.waiting)} waiting, {len(self.running)} running, {rows}, {free})"


def start(num_blocks: int, policy: Policy) -> State:
    """A state without requests, over a cache of that many free blocks.

    A state goes with that cache from then on: what it keeps of texts that have ended is in there.

    Raises:
        TypeError: what is no policy, or no whole number. ValueError: a number that no cache has.
    """
    if not isinstance(policy, Policy):
        raise TypeError(f"start takes num_blocks, policy; the second is a {type(policy).__name__}")
    num_blocks = whole("num_blocks", num_blocks)
    if not 0 <= num_blocks < 2**31:
        raise ValueError(f"num_blocks={num_blocks}: pass as many as the cache has, below 2**31")
    pool = new_pool(num_blocks, policy.block_size if policy.share else 0)
    return State((), (), (), pool, tuple(range(policy.num_slots)), 0)


def check_state(state: Any) -> None:
    """Raise `TypeError` for what is no state."""
    fg.core.text.expect(State, "one of start, submit or advance", TypeError, state=state)


def no_blocks() -> Tokens:
    """The blocks of a job that waits."""
    return Tokens((), dtype=np.int32)


def cancel(state: State, id: int) -> State:
    """The state without a request; as it was where that one has ended by itself.

    A step under way may finish: `advance` drops what it did for the request.

    Raises:
        TypeError: what is no state, or no number. ValueError: a request that there never was.
    """
    check_state(state)
    if not 0 <= whole("id", id) < state.submitted:
        raise ValueError(
            f"cancel(state, {id}): no request has that number, of {state.submitted} submitted. "
            "Pass event.id"
        )
    for job in (*state.running, *state.waiting):
        if job.id == id:
            return drop(state, [job])
    return state


def drop(state: State, jobs: Sequence[Job]) -> State:
    """The state without these jobs; what they held is free again."""
    gone = {job.id for job in jobs}
    return dataclasses.replace(
        state,
        waiting=tuple(job for job in state.waiting if job.id not in gone),
        running=tuple(job for job in state.running if job.id not in gone),
        pool=release(state.pool, *(job.blocks for job in jobs)),
        slots=(*state.slots, *(job.slot for job in jobs if job.slot >= 0)),
    )


def forget(state: State, adapter: int | None = None) -> State:
    """The state without blocks kept of texts that have ended: no text finds what they hold.

    To be asked for where that is no longer so: weights are new, the cache was given back.

    Args:
        adapter: of texts under this one alone, which then may change.

    Raises:
        ValueError: a request still uses that adapter. TypeError: what is no state, or no number.
    """
    check_state(state)
    if adapter is None:
        return dataclasses.replace(state, pool=unname(state.pool, list(state.pool.names)))
    if job := user_of(state, whole("adapter", adapter)):
        raise ValueError(
            f"request {job.id} has adapter={adapter} and has not ended. Wait for its end, or "
            f"drop it: state = cancel(state, {job.id})"
        )
    return dataclasses.replace(state, pool=unname(state.pool, behind(state.pool, [(adapter,)])))


def user_of(state: State, adapter: int) -> Job | None:
    """The first request under an adapter that has not ended."""
    jobs = (*state.running, *state.waiting)
    return next((job for job in jobs if job.request.adapter == adapter), None)


def over(job: Job) -> Job:
    """A job that was thrown out, as it waits: its tokens are to be computed again."""
    return job._replace(computed=0, blocks=no_blocks(), slot=-1)


def start_over(state: State, num_blocks: int, policy: Policy) -> State:
    """The state over another cache, in which nothing is computed, of that many free blocks: all
    requests wait, with the tokens that they have, and go on from there.

    To be asked for where a cache is lost: some of the processes that shared it are gone.

    Raises:
        TypeError, ValueError: as `start`; or what is no state.
    """
    check_state(state)
    waiting = in_order(tuple(map(over, state.running)), state.waiting)
    own = start(num_blocks, policy)
    return dataclasses.replace(
        own, waiting=waiting, submitted=state.submitted, soonest=state.soonest
    )


def left_of(job: Job) -> int:
    """Tokens that a request may still get."""
    return job.request.max_new - (len(job.tokens) - len(job.request.prompt))


def in_order(some: tuple[Job, ...], others: tuple[Job, ...]) -> tuple[Job, ...]:
    """All of them by rank, as each lot is."""
    both = some + others
    ordered = not some or not others or some[-1].rank < others[0].rank
    return both if ordered else tuple(sorted(both, key=lambda job: job.rank))
