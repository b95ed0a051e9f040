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
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import Ranks, exchange, hear, tell
from fngraph.models.serving.requests import State
from fngraph.models.serving.submitting import submit

Take = Callable[[State], Sequence[Mapping[str, Any]]]


def spread(ranks: Ranks, policy: Policy, take: Take) -> Callable[[State], State]:
    """The inbox of a leader, for teams that meet: before each step, all leaders are there.

    It costs a message of the first process each step, and an exchange where requests have come. A
    request that no team could run ends alone, with a warning that says why, and has no number.

    Args:
        take: called by the first process alone, with its own state: what is to be submitted now,
            as `submit` takes it, {"prompt": ..., "max_new": ...}; pickle takes all of it. While it
            waits, all wait; where it returns none, and nobody has anything to do, the loops end.

    Raises:
        ValueError: teams that do not meet.
    """
    peers = ranks.peers
    if peers.size > 1 and not ranks.meet:
        raise ValueError(
            "teams that do not meet take no step together, so that one stream cannot be spread "
            "while they serve. Pass make_ranks(..., meet=True), or share requests out before"
        )

    def inbox(state: State) -> State:
        if peers.rank == 0:
            asked = [dict(one) for one in take(state)]
            asked = [one for one in asked if can_run(state, policy, one)]
            sent = tell(peers, asked)
            sent.wait()
        else:
            asked, _ = hear(peers)
        if not asked:
            return state
        loads = [load for load, _ in exchange(peers, (outstanding(state), 0)).wait()]
        for one, to in zip(asked, assign(loads, list(map(tokens_of, asked)))):
            if to == peers.rank:
                state = submit(state, policy, **one)
            else:  # it has its number nevertheless
                state = dataclasses.replace(state, submitted=state.submitted + one.get("n", 1))
        return state

    return inbox


def can_run(state: State, policy: Policy, asked: Mapping[str, Any]) -> bool:
    """Whether `submit` takes a request, and pickle; if not, a warning says why not."""
    try:
        submit(state, policy, **asked)
        pickle.dumps(asked)
    except (ValueError, TypeError, AttributeError, pickle.PicklingError) as error:
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
