"""The loop that feeds a model: schedule(state, ...) -> (state, batch), the step, advance.

    steps = make_steps(llama.forward, params, cache, policy, modes="FULL_AND_PIECEWISE")
    state = submit(start(num_blocks, policy), policy, prompt, max_new)
    for event in stream(serve(steps, cache, state, policy)):
        print(event.id, event.tokens, event.end or "")

The host waits for a step's tokens and for nothing else.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import torch

import fngraph as fg
from fngraph.models.serving.batches import lay_out, own_spec, padding
from fngraph.models.serving.grammars import ask
from fngraph.models.serving.logits import first_rows, on_host
from fngraph.models.serving.many import take_ahead
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import Coming
from fngraph.models.serving.ranks.following import (
    agree,
    agree_ahead,
    agreed_ahead,
    follow,
    leading,
)
from fngraph.models.serving.ranks.joining import promise
from fngraph.models.serving.ranks.losing import landed
from fngraph.models.serving.requests import Event, Row, State, check_state
from fngraph.models.serving.scheduling import advance, goes_on, plan
from fngraph.models.serving.steps import Steps

T = TypeVar("T")


class Served(NamedTuple):
    """One step as it is reported.

    Attributes:
        state: after it.
        spec: of its batch.
        kind: decode, verify, prefill or mixed.
        ran: mode, key and why; NONE where graphs were meant and their capture failed.
        events: what it did for its requests.
        seconds: of wall time, scheduling included.
        reused: tokens that requests which joined found computed by others.
        turns: tokens that each request drew at most, one after the other.
        single: why it was one, where `Policy(decode_many=...)` asks for more.
    """

    state: State
    spec: fg.BatchSpec
    kind: str
    ran: fg.core.Dispatch
    events: tuple[Event, ...]
    seconds: float
    reused: int = 0
    turns: int = 1
    single: str = ""


def schedule(
    state: State, policy: Policy, steps: Steps, ahead: Coming | None = None
) -> tuple[State, Any]:
    """Decide the next step's rows, and lay them out in the batch that `steps` hand out.

    A request that the steps cannot run has a row in which nothing of it is; `advance` ends it, with
    the reason, and the others go on.

    Where teams meet (`Ranks.meet`), it is of the size that all of them agree on, of padding alone
    where this one has nothing to do, and None where no team has.

    Args:
        ahead: what teams have begun to agree on in the step before; see `agree_ahead`.

    Raises:
        TypeError: arguments of another kind.
        ValueError: nothing to do; a policy or a pool that the steps were not made for.
        RankError: another team is gone.
    """
    check_loop(steps, state, policy)
    can, agrees = steps.can, steps.ranks.agrees
    if can is not None:
        can.check(state, policy)
    joint = agreed_ahead(steps.ranks, ahead) if ahead is not None else None
    if state.live or not agrees:
        fault = (lambda job: None) if can is None else can.fault
        size = None if can is None else can.vocab_size
        state = plan(state, policy, fault, joint is None, size)
        state = take_ahead(state, policy, None if can is None else max(can.policy.query_lens) - 1)
    else:
        state = dataclasses.replace(state, rows=())
    if agrees:
        own = own_spec(state.rows, policy, state.faults) if state.rows else None
        if joint is None:
            joint = agree(steps.ranks, own)
        if joint is None or own is None:
            return state, joint and padding(joint, steps.host_batch)
        if joint.query_len != own.query_len:
            rows = tuple(row._replace(drafts=()) for row in state.rows)
            state = dataclasses.replace(state, rows=rows)
    allowed, faults = ask(state.rows, state.faults, can.vocab_size) if can else ({}, {})
    batch = lay_out(state.rows, policy, steps.host_batch, state.faults, allowed, joint, state.turns)
    return dataclasses.replace(state, faults={**state.faults, **faults}) if faults else state, batch


def check_loop(steps: Any, state: Any, policy: Any) -> None:
    """Raise `TypeError` for what is not what the loop takes."""
    if isinstance(steps, Steps) and isinstance(state, State) and isinstance(policy, Policy):
        return
    expect = fg.core.text.expect
    expect(Steps, "what make_steps gives: serve(steps, cache, ...)", TypeError, steps=steps)
    check_state(state)
    expect(Policy, "the Policy of make_steps, behind the state", TypeError, policy=policy)


def serve(
    steps: Steps, cache: Any, state: State, policy: Policy,
    inbox: Callable[[State], State] = lambda state: state,
    clock: Callable[[], float] = time.monotonic,
    pending: Callable[[], bool] | None = None,
) -> Iterator[Served]:  # fmt: skip
    """Run until nothing is waiting or running, a step at a time. The cache is used up.

    A request that cannot be run, or whose logits are no numbers, fails alone: see `Event.end`. What
    is served next from the last state goes on with the same cache, which holds what is kept.

    Over ranks, all processes call this. The leader of a team has the requests; for those that
    follow it nothing is yielded, and `state` and `inbox` are not looked at. See
    `fngraph.models.serving.ranks.following`.

    Args:
        inbox: called before each step; its state is gone on with. Submit and cancel there.
        clock: of deadlines, in seconds; read once a step.
        pending: whether `inbox` would submit or cancel something. Asked without a pause while a
            launch of several tokens runs (`Policy(decode_many=...)`), which ends at its next token
            where it says so; None: such launches run to their end. Not asked on a CPU, where a
            launch is a call.

    Raises:
        TypeError: arguments of another kind; while it serves: an inbox that gives no state.
        RankError: while it serves: another process has failed, or is gone.
    """
    if not isinstance(steps, Steps) or steps.ranks.leads:
        check_loop(steps, state, policy)
        expect = fg.core.text.expect
        expect(Callable, "a function of a state, which gives the next", TypeError, inbox=inbox)
        expect(Callable, "a function, time.monotonic", TypeError, clock=clock)
        if pending is not None:
            expect(Callable, "a function that gives True or False", TypeError, pending=pending)
    return _serve(steps, cache, state, policy, inbox, clock, pending)


@torch.no_grad()
def _serve(
    steps: Steps, cache: Any, state: State, policy: Policy, inbox: Callable[[State], State],
    clock: Callable[[], float], pending: Callable[[], bool] | None,
) -> Iterator[Served]:  # fmt: skip
    if not steps.ranks.leads:
        return follow(steps, cache)
    with leading(steps.ranks):
        ahead = None
        while (state := _answered(inbox, state)).live or steps.ranks.agrees:
            began = time.perf_counter()
            state, batch = schedule(state, policy, steps, ahead)
            if batch is None:
                return
            drawn, cache = steps.run(cache, batch)
            if pending is not None and steps.halt is not None and state.turns > 1:
                steps.halt.wait(drawn, pending)
            if steps.ranks.agrees and steps.ranks.ahead:  # while the device runs
                own = own_spec(state.rows, policy, state.faults) if state.rows else None
                ahead = agree_ahead(steps.ranks, promise(own, goes_on(state, policy)))
            if not state.rows:  # it was for the others
                continue
            landed(steps.ranks.team, drawn)
            kind, spec, planned = kind_of(state.rows), batch.spec, state
            if steps.ranks.agrees:  # without what others bring
                spec = own_spec(state.rows, policy, state.faults)
                drawn = first_rows(drawn, len(state.rows))
            state, events = advance(state, *on_host(drawn, state.rows), now=clock())
            seconds = time.perf_counter() - began
            more = planned.reused, planned.turns, planned.single
            yield Served(state, spec, kind, steps.runs_as(batch.spec), events, seconds, *more)


def _answered(inbox: Callable[[State], State], state: State) -> State:
    found = inbox(state)
    if not isinstance(found, State):
        kind = type(found).__name__
        raise TypeError(f"inbox gave a {kind}: return its state, as it is where nothing came")
    return found


def stream(served: Iterable[Served]) -> Iterator[Event]:
    """What the steps did, event by event.

    Raises:
        TypeError: what are no steps of `serve`.
    """
    how = "pass stream(serve(steps, cache, ...))"
    return (event for one in each(Served, served, "stream", how) for event in one.events)


def gather(events: Iterable[Event]) -> dict[int, tuple[int, ...]]:
    """The tokens that each request got, by its number; of one that failed, those up to there.

    A dict has no place for why: a warning names those that failed, with the reason. Who goes on by
    it reads `event.end` of each event.

    Raises:
        TypeError: what are no events.
    """
    texts: dict[int, tuple[int, ...]] = {}
    failed: list[str] = []
    for event in each(Event, events, "gather", "pass gather(stream(serve(...)))"):
        texts[event.id] = texts.get(event.id, ()) + event.tokens
        if event.failed:
            failed.append(f"request {event.id} {event.end}")
    if failed:
        more = [f"and {len(failed) - NAMED} more"] if len(failed) > NAMED else []
        said = "\n".join([f"{len(failed)} of {len(texts)} failed:", *failed[:NAMED], *more])
        warnings.warn(said, stacklevel=2)
    return texts


NAMED = 8  # requests that a warning names


def each(kind: type[T], given: Iterable[T], verb: str, how: str) -> Iterator[T]:
    """What is given, one after the other, each of that kind.

    Raises:
        TypeError: it is not, or nothing that can be gone through; with how to ask.
    """
    if not hasattr(given, "__iter__"):
        raise TypeError(f"{verb} got {fg.core.text.a(type(given).__name__)}: {how}")
    for one in given:
        if not isinstance(one, kind):
            raise TypeError(f"{verb} got {fg.core.text.a(type(one).__name__)}: {how}")
        yield one


def kind_of(rows: tuple[Row, ...]) -> str:
    """What a step is called, by the table in `fngraph.models.serving.scheduling`."""
    past = [row.job.decoding for row in rows]
    if all(past):
        return "verify" if rows[0].drafts else "decode"
    return "mixed" if any(past) else "prefill"
