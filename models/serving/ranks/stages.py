"""Pipeline stages: each process has its own layers, and hidden states go from one to the next.

    ranks = make_ranks(fg.make_mesh(pp=2))
    stage = stage_of(ranks)
    own = stages_of(params, stage.total)[stage.number]
    steps = make_steps(llama.forward, own, cache, policy, modes=..., stage=stage)
    serve(over_ranks(steps, ranks), cache, state, policy)

A stage receives hidden states where its graph reads them (`step.static_buffer`), and sends what it
makes of them, between steps and not within graphs. The last one draws the tokens, which go back to
the leader. One batch is under way at a time: a stage waits while the others work.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor

import fngraph as fg
from fngraph.models.serving.logits import Drawn
from fngraph.models.serving.ranks.circles import Circle, Ranks, hear_one, tell_one
from fngraph.models.serving.ranks.losing import lost
from fngraph.models.weights import naming


class Stage(NamedTuple):
    """Which stage a process is, and who is before and behind it.

    Attributes:
        number: from 0.
        total: of stages.
        stride: places in the team from one stage to the next.
        team: all of them.
    """

    number: int = 0
    total: int = 1
    stride: int = 1
    team: Circle = Circle()

    @property
    def first(self) -> bool:
        """Whether it reads tokens; else hidden states."""
        return self.number == 0

    @property
    def last(self) -> bool:
        """Whether it draws tokens; else it gives hidden states."""
        return self.number == self.total - 1

    def receive(self, into: Tensor) -> None:
        """Hidden states of the stage before, (T, E), into memory on the device."""
        with self._of(self.team.rank - self.stride) as member:
            dist.recv(into, member)

    def send(self, hidden_TE: Tensor) -> None:
        """Hidden states, to the stage behind."""
        with self._of(self.team.rank + self.stride) as member:
            dist.send(hidden_TE.contiguous(), member)

    def give(self, drawn: Tensor | Drawn) -> None:
        """What was drawn, to the leader, by the first process of the last stage; it waits."""
        if self.team.rank == (self.total - 1) * self.stride:
            here = Drawn(*(x.cpu() for x in drawn)) if isinstance(drawn, Drawn) else drawn.cpu()
            with self._of(0):
                tell_one(self.team, 0, here)

    def take(self) -> Any:
        """What was drawn, on the host, by the leader; it waits. None for others."""
        if self.team.rank:
            return None
        last = (self.total - 1) * self.stride
        with self._of(last):
            return hear_one(self.team, last)

    @contextlib.contextmanager
    def _of(self, rank: int) -> Iterator[int]:
        """Within, something goes to or from another process; its number.

        Raises:
            RankError: that one, or another one of the team, is gone, or has not come in time.
        """
        try:
            yield self.team.members[rank]
        except RuntimeError as error:
            raise lost(self.team, f"the {self.total} stages of a model", error, rank) from error


WHOLE = Stage()  # a model that is not split


def stage_of(ranks: Ranks, name: str = "pp") -> Stage:
    """The stage of a process, by an axis of its team."""
    names = [axis.name for axis in ranks.axes]
    if name not in names:
        return WHOLE
    at = names.index(name)
    axis, inner = ranks.axes[at], ranks.axes[at + 1 :]
    return Stage(axis.rank, axis.size, math.prod(a.size for a in inner), ranks.team)


def like_hidden(params: Any) -> Tensor:
    """A vector as wide as hidden states between stages, of their dtype and on their device: the
    norm of what comes into a layer, which is its first weight."""
    first_E = next(iter(naming.named(params.layers[0]).values()))
    return first_E.float() if getattr(params.config, "wide_residual", False) else first_E


def run_stage(
    stage: Stage, step: Any, cache: Any, batch: Any, allowed: Any, kind: type, like_E: Tensor
) -> tuple[Any, Any]:  # fmt: skip
    """One step of a stage.

    Args:
        batch: without hidden states.
        allowed: what it runs as; None: as the step says.
        kind: of the batch that the step takes, with them where there is an earlier stage.
        like_E: any vector of the model's, as wide as hidden states, of their dtype and device.

    Returns:
        What was drawn, for the leader and the last stage; and the cache.
    """
    spec = batch.spec
    ran = allowed or step.runs_as(spec)
    if not stage.first:
        if ran.mode is fg.Mode.NONE:
            hidden_TE = like_E.new_empty(spec.num_tokens, len(like_E))
        else:  # where the graph reads them
            hidden_TE = step.static_buffer(ran.descriptor, "hidden")[: spec.num_tokens]
        stage.receive(hidden_TE)
        batch = kind(**vars(batch), hidden=hidden_TE)
    out, cache = step(cache, batch, allowed=ran)
    if not stage.last:
        stage.send(out)
        return stage.take(), cache
    stage.give(out)
    return out, cache
