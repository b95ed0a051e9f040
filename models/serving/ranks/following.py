"""Steps that several processes run together: one tells each batch, the others follow.

    steps = over_ranks(make_steps(...), make_ranks(mesh))
    for event in stream(serve(steps, cache, state, policy)): ...    # by all; followers get none

What is told is a batch: its counts, what it runs as, and its leaves as they lie in host memory. So
whatever a step can do, followers do, and they know nothing of requests. They take part in the
step's collectives, and read no tokens back: they wait for the next batch alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.serving.batches import SHAPED
from fngraph.models.serving.policy import Policy
from fngraph.models.serving.ranks.circles import (
    PATIENCE,
    Circle,
    Coming,
    Ranks,
    exchange,
    hear,
    tell,
    tell_each,
)
from fngraph.models.serving.ranks.joining import NOTHING, Wish, join, wish_of
from fngraph.models.serving.ranks.losing import lost
from fngraph.models.serving.requests import start
from fngraph.models.serving.steps import Steps

NO_REQUESTS = start(1, Policy(1, 1, 1))  # the leader has looked at its own
STEP, LOAD, END = "step", "load", "end"  # what a leader may tell


def over_ranks(
    steps: Steps, ranks: Ranks, part: Callable[[Any], Any] = lambda adapter: adapter
) -> Steps:
    """The steps of one process as those of all its team.

    Args:
        steps: of `make_steps`, which each process has called with its own shard of the weights and
            of the cache.
        part: of an adapter for `load_slot`, that of this process.

    Raises:
        ValueError: steps that draw several tokens a launch, which one process does by itself.
    """
    together = ranks.team.size > 1 or ranks.meet
    if together and steps.can is not None and steps.can.policy.decode_many > 1:
        raise ValueError(
            f"Policy(decode_many={steps.can.policy.decode_many}) is for one process: where several "
            "run each step together, they tell each other before each one. Leave it out"
        )

    def load_own(slot: int, adapter: Any, state: Any) -> None:
        steps.load_slot(slot, part(adapter), state)

    if not ranks.leads or (ranks.team.size == 1 and not ranks.agrees):
        return steps._replace(ranks=ranks, load_slot=load_own)

    def run(cache: Any, batch: Any, allowed: Any = None) -> tuple[Any, Any]:
        ran = allowed or steps.runs_as(batch.spec)
        with listened_to(ranks.team):
            sent = tell(ranks.team, (STEP, batch.spec, ran), leaves_of(batch))
        results = steps.run(cache, batch, allowed=ran)  # meanwhile it is sent
        with listened_to(ranks.team):
            sent.wait()
        return results

    def load_slot(slot: int, adapter: Any, state: Any) -> None:
        load_own(slot, adapter, state)  # which refuses what does not go
        with listened_to(ranks.team):
            tell(ranks.team, (LOAD, slot, adapter)).wait()

    return steps._replace(run=run, load_slot=load_slot, ranks=ranks)


@torch.no_grad()
def follow(steps: Steps, cache: Any) -> None:
    """Run what the leader of the team tells, until it tells the end. The cache is used up.

    Raises:
        RankError: it ended for an error, with which, or is gone.
        Exception: a step's own. The leader raises as soon as this process ends, or leaves the
            groups that they share; else when their timeout is over.
    """
    team = steps.ranks.team
    while True:
        (kind, *said), payload = heard(team)
        if kind == END:
            if said[0]:
                raise fg.errors.RankError(
                    f"rank {team.members[0]}, which leads, stopped: {said[0]}"
                )
            return
        if kind == LOAD:
            slot, adapter = said
            steps.load_slot(slot, adapter, NO_REQUESTS)
        else:
            spec, ran = said
            batch = filled(steps.host_batch(spec), payload)
            _, cache = steps.run(cache, batch, allowed=ran)


@contextlib.contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """What is done within is done for all of the team, which is told its end, and why.

    Other teams are told of an end that they have not agreed to.
    """
    try:
        yield
    except BaseException as error:
        reason = "" if isinstance(error, GeneratorExit) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # who does not listen any more
            tell(ranks.team, (END, reason), most=PATIENCE).wait(PATIENCE)
        with contextlib.suppress(RuntimeError):
            if ranks.agrees and ranks.leaders.board is not None:
                ranks.leaders.board.leave()
            elif ranks.agrees:
                left = error.members if isinstance(error, Left) else ()
                tell_each(ranks.leaders, NOTHING._replace(gone=1), left).wait(PATIENCE)
        raise
    with listened_to(ranks.team):
        tell(ranks.team, (END, "")).wait()


class Left(fg.errors.RankError):
    """Leaders of other teams that take part in nothing more.

    Attributes:
        members: their numbers.
    """

    def __init__(self, members: Sequence[int]) -> None:
        super().__init__(
            f"rank {members[0]} has left: its loop ended for an error, or was closed, before the "
            "requests of all ranks were done"
        )
        self.members = tuple(members)


def agree(ranks: Ranks, spec: fg.BatchSpec | None) -> fg.BatchSpec | None:
    """The counts that the batches of all teams have in the next step; None: no team has any.

    Args:
        spec: of this team's rows; None: it has none.

    Raises:
        RankError: a team has left (`Left`), or is gone.
    """
    with met(ranks):
        coming = exchange(ranks.leaders, NOTHING if spec is None else wish_of(spec))
    return join(_wishes(ranks, coming), SHAPED)


def agree_ahead(ranks: Ranks, promised: Wish) -> Coming:
    """Begin to agree on the next step while one runs."""
    with met(ranks):
        return exchange(ranks.leaders, promised)


def agreed_ahead(ranks: Ranks, coming: Coming | None) -> fg.BatchSpec | None:
    """What all teams are bound to in the next step; None: some are not, or no team has anything,
    and they `agree` as ever.

    Raises:
        RankError: as `agree`.
    """
    found = _wishes(ranks, coming) if coming is not None else []
    return join(found, SHAPED) if all(wish.bound for wish in found) else None


def numbers_of_all(ranks: Ranks, *own: int) -> list[tuple[int, ...]]:
    """Some numbers of every team, as many from each and fewer than a `Wish` has.

    Raises:
        RankError: as `agree`.
    """
    with met(ranks):
        coming = exchange(ranks.leaders, (*own, *NOTHING[len(own) :]))
    return [wish[: len(own)] for wish in _wishes(ranks, coming)]


def _wishes(ranks: Ranks, coming: Coming) -> list[Wish]:
    with met(ranks):
        try:
            found = [Wish(*one) for one in coming.wait()]
        except fg.errors.AbsentError as error:
            if not error.gave_up:
                raise
            found = [NOTHING] * ranks.leaders.size
            found[error.rank] = NOTHING._replace(gone=1)
    if left := [member for member, wish in zip(ranks.leaders.members, found) if wish.gone]:
        raise Left(left)
    return found


@contextlib.contextmanager
def met(ranks: Ranks) -> Iterator[None]:
    """Within, leaders tell each other something; RankError: one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        raise lost(ranks.leaders, "batches that meet", error) from error


@contextlib.contextmanager
def listened_to(team: Circle) -> Iterator[None]:
    """Within, followers are told something; RankError: one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        raise lost(team, "each step together", error) from error


def heard(team: Circle) -> tuple[Any, Tensor]:
    """What the leader tells.

    Raises:
        RankError: it is gone.
    """
    try:
        return hear(team)
    except RuntimeError as error:
        raise fg.errors.RankError(
            f"rank {team.members[0]}, which leads, is gone or has told nothing for the timeout of "
            f"make_ranks: {error}"
        ) from error


def leaves_of(batch: Any) -> list[Tensor]:
    """All leaves of a batch, in the order of its fields."""
    return [getattr(batch, name) for name in fg.core.buffers_of(type(batch))]


def filled(batch: Any, payload: Tensor) -> Any:
    """The batch with these bytes in its leaves."""
    data, at = payload.numpy(), 0
    for leaf in leaves_of(batch):
        size = leaf.nbytes
        leaf.numpy().reshape(-1).view("u1")[:] = data[at : at + size]
        at += size
    return batch
