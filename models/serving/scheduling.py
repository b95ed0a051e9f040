"""Continuous batching as two pure functions: plan(state) -> state with rows, advance -> events.

Every running decode gets its token first; prefills share what is left of the token budget in
chunks. Requests go by priority, and of one priority in the order in which they came. One joins when
its tokens so far find blocks. Where a decode finds none, the last of those that run is thrown out:
it waits in front of its like, keeps its tokens, and computes again those whose blocks were taken.

| rows                                    | kind    | `query_len` |
|-----------------------------------------|---------|-------------|
| all past their prompt                   | decode  | 1           |
| the same, each with k tokens of drafts  | verify  | 1 + k       |
| none past its prompt                    | prefill | None        |
| any other                               | mixed   | None        |

Drafts are what followed the same few tokens before, in the request's own text (prompt lookup). All
rows of a verify batch bring 1 + k tokens, with the k of each step among those that are captured. A
row with fewer drafts repeats its last token: a draft is only a guess, and which guesses are made
never changes the text.

Source: Saxena, "Prompt Lookup Decoding", 2023; exact for sampled text too, since the token drawn
depends on its request and place alone.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

import fngraph as fg
from fngraph.models.serving import blocks
from fngraph.models.serving.blocks import Pool, blocks_for
from fngraph.models.serving.drawn import TOKENS, accept, drawn_of, tokens_of
from fngraph.models.serving.logits import Drawn
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.requests import (
    Event,
    Job,
    Logprob,
    Row,
    State,
    check_state,
    drop,
    in_order,
    over,
)
from fngraph.models.serving.sampling import FAILED
from fngraph.models.serving.texts.endings import cut, read_on, rest

NO_TOKEN = (
    "failed: no token is the likeliest, its logits are NaN, infinite, or -inf for all tokens. Look "
    "for weights or an adapter that are not finite, a dtype that its numbers leave, or a bias "
    "against all that its grammar allows"
)


def plan(
    state: State, policy: Policy, fault: Callable[[Job], str | None] = lambda job: None,
    joins: bool = True, vocab_size: int | None = None,
) -> State:  # fmt: skip
    """Decide what each request computes in the next step; `rows` of the new state say so.

    Args:
        fault: why a request that joins cannot be run; nobody shares what its row computes.
        joins: whether any that wait may join.
        vocab_size: tokens that the model has, for `advance` to refuse others; None: not known.

    Raises:
        ValueError: nothing to do.
    """
    if not state.live:
        raise ValueError("no request is waiting or running; check state.live before scheduling")
    state = undo(state) if state.rows else state
    kept, pool = make_room(state, policy)
    thrown, slots = state.running[len(kept) :], state.slots
    if thrown:
        slots = (*slots, *(job.slot for job in thrown if job.slot >= 0))
    waiting = in_order(tuple(map(over, thrown)), state.waiting)

    decoding = [job for job in kept if job.decoding][: policy.max_tokens]
    decoding, pool = grow(decoding, pool, policy)
    left = policy.max_tokens - len(decoding)
    late: list[Row] = []
    for job in kept:
        if left and not job.decoding:
            late.append(row := Row(job, min(job.missing, left)))
            left -= row.new
            pool = publish(job, job.computed + row.new, pool)
    joined: list[Job] = []
    faults: dict[int, str] = {}
    while joins and waiting and left and not thrown and len(kept) + len(joined) < policy.max_reqs:
        found = join(waiting[0], pool, slots, policy, len(kept) + len(joined))
        if found is None:
            break
        job, pool, slots = found
        waiting = waiting[1:]
        joined.append(job)
        late.append(row := Row(job, min(job.missing, left)))
        left -= row.new
        if reason := fault(job):
            faults[job.id] = reason
        else:
            pool = publish(job, job.computed + row.new, pool)
    drafts = [] if late else find_drafts(decoding, policy, len(pool.free))
    if drafts:
        decoding, pool = grow(decoding, pool, policy, len(drafts[0]))
    rows = [Row(job, 1, guess) for job, guess in zip(decoding, drafts or [()] * len(decoding))]
    grown = {job.id: job for job in decoding}
    running = in_order(tuple(grown.get(job.id, job) for job in kept), tuple(joined))
    reused = sum([job.computed for job in joined])
    now = (waiting, running, (*rows, *late), pool, slots)  # `replace` takes 2 us more
    soonest = state.soonest
    return State(*now, state.submitted, faults, soonest, reused, vocab_size=vocab_size)


def goes_on(state: State, policy: Policy) -> bool:
    """Whether the step behind the one under way has at most its rows, of one token each, as long as
    none joins: all of them draw now, nothing waits, and no step has drafts, or shares a prefix."""
    if state.waiting or max(policy.query_lens) > 1 or policy.cascade:
        return False
    draws = all(row.job.computed + row.new >= len(row.job.tokens) for row in state.rows)
    return draws and len(state.rows) == len(state.running)


def undo(state: State) -> State:
    """The state where the step under way has failed, and is not known to have written anything.

    Nobody shares what it would have computed, and who does already starts over.
    """
    size = state.pool.block_size
    if not size:  # blocks are written anew; a slot holds what came before, and so begins again
        stale = [job for job, *_ in state.rows if job.slot >= 0]
        state = drop(dataclasses.replace(state, rows=()), stale)
        waiting = in_order(tuple(map(over, stale)), state.waiting)
        return dataclasses.replace(state, waiting=waiting)
    done = lambda job: job.computed // size  # noqa: E731
    unwritten = {block for job, *_ in state.rows for block in job.blocks.view(done(job)).tolist()}
    stale = [
        job for job in state.running
        if not unwritten.isdisjoint(job.blocks.view(0, done(job)).tolist())
    ]  # fmt: skip
    pool = blocks.unname(state.pool, unwritten.union(blocks.behind(state.pool, unwritten)))
    state = drop(dataclasses.replace(state, pool=pool, rows=()), stale)
    waiting = in_order(tuple(map(over, stale)), state.waiting)
    return dataclasses.replace(state, waiting=waiting)


def make_room(state: State, policy: Policy) -> tuple[tuple[Job, ...], Pool]:
    """Running jobs but for the last ones, which must go so that all decodes find room."""
    size, pool, kept = policy.block_size, state.pool, state.running
    needed = [
        max(0, blocks_for(len(job.tokens), size) - len(job.blocks)) if job.decoding else 0
        for job in kept
    ]  # drafts may have left a job with more than it needs
    while sum(needed) > len(pool.free):
        pool = blocks.release(pool, kept[-1].blocks)
        kept, needed = kept[:-1], needed[:-1]
    return kept, pool


def grow(jobs: Sequence[Job], pool: Pool, policy: Policy, more: int = 0) -> tuple[list[Job], Pool]:
    """The jobs with blocks for all their tokens and so many more each."""
    size = policy.block_size
    lacking = [max(0, blocks_for(len(job.tokens) + more, size) - len(job.blocks)) for job in jobs]
    at, grown = 0, list(jobs)
    if not any(lacking):
        return grown, pool
    pool, new = blocks.take(pool, sum(lacking))
    for i, count in enumerate(lacking):
        if count:
            own = jobs[i].blocks.append(new[at : at + count])
            grown[i] = jobs[i]._replace(blocks=own)
            at += count
    return grown, pool


def join(
    job: Job, pool: Pool, slots: tuple[int, ...], policy: Policy, running: int
) -> tuple[Job, Pool, tuple[int, ...]] | None:
    """A waiting job with blocks for its tokens, shared ones first; None if there are too few."""
    if policy.num_slots and not slots:
        return None
    found: list[int] = []
    size = policy.block_size
    if policy.share:  # all but the last token, from which the next one is drawn
        shared = job.tokens.view(0, len(job.tokens) - 1)
        found = blocks.find_prefix(pool, shared, size, job.request.adapter)
    needed, reserved = blocks_for(len(job.tokens), size) - len(found), policy.reserve * running
    if needed + reserved > len(pool.free):
        return None
    if found:  # some of which may have been free
        pool = blocks.share(pool, found)
        if needed + reserved > len(pool.free):
            return None
    pool, new = blocks.take(pool, needed)
    job = job._replace(computed=len(found) * size, blocks=job.blocks.append([*found, *new]))
    return (job._replace(slot=slots[-1]), pool, slots[:-1]) if slots else (job, pool, slots)


def publish(job: Job, computed: int, pool: Pool) -> Pool:
    """Name the blocks that are full once so many tokens are computed.

    Rows that follow a prefill's may read its blocks at once, since a step writes all its keys
    before it reads any.
    """
    size = pool.block_size
    if not size or job.computed // size == computed // size:
        return pool
    text, held = job.tokens.view(0, computed // size * size), job.blocks.view()
    first, root = job.computed // size, job.request.adapter
    return blocks.give_names(pool, held, text, size, root, first)


def find_drafts(jobs: Sequence[Job], policy: Policy, free: int) -> list[tuple[int, ...]]:
    """The drafts of each job of a verify step; none at all where a decode step does as well.

    Args:
        free: blocks that the drafts may take.
    """
    longest = max(policy.query_lens) - 1
    if not longest or not jobs:
        return []
    found = [job.tokens.after_first(policy.ngram, longest) for job in jobs]
    query_len = choose([len(guess) for guess in found], policy.query_lens)
    while query_len > 1 and not fits(jobs, query_len, policy, free):
        query_len = max(q for q in policy.query_lens if q < query_len)
    k = query_len - 1
    if not k:
        return []
    return [(*guess, *[job.tokens.last] * k)[:k] for job, guess in zip(jobs, found)]


def choose(found: Sequence[int], query_lens: Sequence[int]) -> int:
    """The largest query length of which at least half of all draft places are filled."""
    filled = lambda k: sum(min(n, k) for n in found)  # noqa: E731
    return max(q for q in query_lens if 2 * filled(q - 1) >= len(found) * (q - 1))


def fits(jobs: Sequence[Job], query_len: int, policy: Policy, free: int) -> bool:
    """Whether such a step stays within the token budget, each table, and the free blocks."""
    if query_len * len(jobs) > policy.max_tokens:
        return False
    size = policy.block_size
    ends = [blocks_for(len(job.tokens) + query_len - 1, size) for job in jobs]
    extra = sum(max(0, end - len(job.blocks)) for job, end in zip(jobs, ends))
    return max(ends) <= policy.max_blocks and extra <= free


def advance(
    state: State, drawn: Sequence[Sequence[int]],
    logprobs: Sequence[Sequence[Logprob]] | None = None, *, now: float = -math.inf,
) -> tuple[State, tuple[Event, ...]]:  # fmt: skip
    """The state after a step, and what it did.

    Args:
        drawn: for each of `state.rows`, the tokens drawn at its last places, or one after the
            other (`state.turns`), up to UNDRAWN. A row inside its prompt computed a chunk, and what
            it drew is dropped. A request that drew FAILED, or is among `state.faults`, ends there,
            and no other with it.
        logprobs: of the same places; None: no request of the step wants them.
        now: requests whose deadline it has reached end, those that wait too.

    Raises:
        ValueError: another number of rows, as where a state has been advanced already; tokens that
            the model does not have.
        TypeError: what a step gave, as it is, which the next step may overwrite; what is no state,
            or no tokens.
    """
    if isinstance(drawn, Drawn | Tensor):
        raise TypeError(
            "advance got what a step gave; pass advance(state, *on_host(ids, state.rows))"
        )
    if not isinstance(state, State) or not hasattr(drawn, "__len__"):
        check_state(state)
        raise TypeError(f"{fg.core.text.what_is('drawn', drawn)}: pass {TOKENS}")
    if len(drawn) != len(state.rows):
        raise ValueError(
            f"advance got the tokens of {len(drawn)} rows, but {len(state.rows)} are under way. "
            "Take the state that schedule returned, once: state, events = advance(state, tokens)"
        )
    stepped: dict[int, Job] = {}
    events: list[Event] = []
    done: list[Job] = []
    pool, size = state.pool, state.pool.block_size
    live = {job.request.id for job in state.running}
    faults, below = state.faults, state.vocab_size or 2**31
    for at, ((job, count, drafts), tokens) in enumerate(zip(state.rows, drawn)):
        request, text, before, held, slot, reading = job
        id = request.id
        if id not in live:  # cancelled meanwhile
            continue
        if id in faults:
            events.append(Event(id, (), f"failed: {faults[id]}", rest(job)))
            done.append(job)
            continue
        computed = before + count
        if computed < len(text):
            stepped[id] = job._replace(computed=computed)
            continue
        try:
            if state.turns > 1:
                new = drawn_of(tokens)
            else:
                new = accept(drafts, tokens) if drafts else (tokens[0],)
            failed = new[-1] == FAILED
        except (TypeError, LookupError):
            raise TypeError(f"drawn[{at}]{fg.core.text.shown(tokens)}: pass {TOKENS}") from None
        if failed:  # behind others it is left to the next step, which draws it first
            new, failed = new[:-1], len(new) == 1
        for token in new:
            if type(token) is not int or not 0 <= token < below:
                new = tokens_of(new, at, below)
                break
        if request.decode is None:
            (new, end), said = cut(job, new), ""
        else:
            new, end, said, reading = read_on(job, new)
        computed += len(new) - 1
        text = text.append(new)
        if size and before // size != computed // size and before >= len(request.prompt):
            pool = publish(Job(request, text, before, held, slot), computed, pool)
        job = Job(request, text, computed, held, slot, reading)  # a prefill's have their names
        if failed and end is None:
            end, said = NO_TOKEN, said + rest(job)
        stepped[id] = job
        told = logprobs if logprobs and request.logprobs is not None else None
        events.append(Event(id, new, end, said, tuple(told[at][: len(new)]) if told else ()))
        if end is not None:
            done.append(job)
    running = tuple([stepped.get(job.request.id, job) for job in state.running])
    state = dataclasses.replace(state, running=running, rows=(), faults={}, pool=pool)
    if state.turns > 1 or state.single:
        state = dataclasses.replace(state, turns=1, single="")
    state = drop(state, done) if done else state
    return expire(state, events, now) if now >= state.soonest else (state, tuple(events))


def expire(state: State, events: Iterable[Event], now: float) -> tuple[State, tuple[Event, ...]]:
    """The state without requests whose deadline is past, and the events with their ends."""
    by_id = {event.id: event for event in events}
    jobs = (*state.running, *state.waiting)
    late = [job for job in jobs if job.request.deadline <= now]
    for job in late:
        event = by_id.get(job.id, Event(job.id, (), None))
        by_id[job.id] = event._replace(end="time", text=event.text + rest(job))
    ahead = (job.request.deadline for job in jobs if job.request.deadline > now)
    soonest = min(ahead, default=math.inf)
    return dataclasses.replace(drop(state, late), soonest=soonest), tuple(by_id.values())
