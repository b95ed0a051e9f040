"""One stream of requests for several teams: each goes to the one with the least still to do.

    inbox = spread(steps.ranks, policy, take)
    for one in serve(steps, cache, start(num_blocks, policy), policy, inbox): ...

The first process takes requests; every leader calls its `inbox` before each step, and so all know
of all of them, and agree on who has which without asking. Requests have the same numbers on all
ranks, and so the same random numbers as in one process. Each leader yields the events of its own.
"""

from __future__ import annotations

import dataclasses
import pickle
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import Ranks, hear, tell
from fngraph.models.serving.ranks.following import met, numbers_of_all
from fngraph.models.serving.requests import State
from fngraph.models.serving.submitting import submit

Take = Callable[[State], Sequence[Mapping[str, Any]]]


def spread(
    ranks: Ranks, policy: Policy, take: Take, clock: Callable[[], float] = time.monotonic
) -> Callable[[State], State]:
    """The inbox of a leader, for teams that meet: before each step, all leaders are there.

    It costs an exchange of numbers each step, and a message of the first process where requests
    have come. A request that no team could run, or that the team which has it cannot, ends alone,
    with a warning that says why; one of the first kind has no number.

    Args:
        take: called by the first process alone, with its own state: what is to be submitted now,
            as `submit` takes it, {"prompt": ..., "max_new": ...}; pickle takes all of it. While it
            waits, all wait; where it returns none, and nobody has anything to do, the loops end.
            Whichever team has a request, its `adapter` is one slot: load it in all teams.
        clock: of deadlines, as of `serve`. What is told is how long each has left, since another
            host's clock has another beginning.

    Raises:
        ValueError: teams that do not meet.
        RankError: while it serves: another team has left (`Left`), or is gone.
    """
    leaders = ranks.leaders
    if leaders.size > 1 and not ranks.meet:
        raise ValueError(
            "teams that do not meet take no step together, so that one stream cannot be spread "
            "while they serve. Pass make_ranks(..., meet=True), or share requests out before"
        )

    def inbox(state: State) -> State:
        asked = list(take(state) or ()) if leaders.rank == 0 else []
        asked = [dict(one) for one in asked if can_run(state, policy, one)]
        told = numbers_of_all(ranks, len(asked), outstanding(state))
        if not told[0][0]:
            return state
        with met(ranks):
            if leaders.rank == 0:
                now = clock()
                packed = [
                    (tokens_of(one), one.get("n", 1), pickle.dumps(moved(one, -now)))
                    for one in asked
                ]
                tell(leaders, packed).wait()
            else:
                packed, _ = hear(leaders)
                now = clock()
        to = assign([load for _, load in told], [tokens for tokens, *_ in packed])
        for team, (_, n, pickled) in zip(to, packed):
            own = unpickled(pickled, now) if team == leaders.rank else None
            if own is not None and can_run(state, policy, own):
                state = submit(state, policy, **own)
            else:  # it has its number nevertheless
                state = dataclasses.replace(state, submitted=state.submitted + n)
        return state

    return inbox


def moved(asked: Mapping[str, Any], by: float) -> dict[str, Any]:
    """A request whose deadline, if it has one, is by another clock."""
    if "deadline" not in asked:
        return dict(asked)
    return {**asked, "deadline": asked["deadline"] + by}


def unpickled(pickled: bytes, now: float) -> dict[str, Any] | None:
    """A request, by this process's clock; None, with a warning, where it lacks what that is made
    of."""
    try:
        return moved(pickle.loads(pickled), now)
    except Exception as error:  # of whatever it is made
        warnings.warn(f"a request is not served: {type(error).__name__}: {error}", stacklevel=2)
        return None


def can_run(state: State, policy: Policy, asked: Mapping[str, Any]) -> bool:
    """Whether `submit` takes a request, and pickle; if not, a warning says why not."""
    try:
        submit(state, policy, **asked)
        pickle.dumps(asked)
        tokens_of(asked)
    except Exception as error:  # of whatever it is made
        warnings.warn(f"a request is not served: {error}", stacklevel=2)
        return False
    return True


def assign(loads: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Which team has each request: the one with the least tokens outstanding, the first of equals.

    Args:
        loads: tokens that each team has outstanding.
        sizes: tokens of each request.

    >>> assign([3, 0], [2, 2, 2])
    [1, 1, 0]
    """
    left, to = list(loads), []
    for size in sizes:
        to.append(left.index(min(left)))
        left[to[-1]] += size
    return to


def tokens_of(asked: Mapping[str, Any]) -> int:
    """Tokens that a request may come to, over all its texts."""
    return (len(asked["prompt"]) + asked["max_new"]) * asked.get("n", 1)


def outstanding(state: State) -> int:
    """Tokens that the requests of a state may still take."""
    jobs = (*state.running, *state.waiting)
    return sum(len(job.request.prompt) + job.request.max_new - job.computed for job in jobs)
