"""Who of a team is lost, for errors; and a wait for the device that ends where one is.

A graph that has been launched waits for its peers in the kernel, and for as long as it takes. So a
leader that reads its tokens looks at the board of its team meanwhile, and is told.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.serving.logits import Drawn
from fngraph.models.serving.ranks.circles import Circle

LOOK_S = 0.01  # how often it is looked whether one has ended
WATCHING_S = 1e-3  # a wait as short as this is not slept in


def lost(circle: Circle, what: str, why: object, rank: int | None = None) -> fg.errors.RankError:
    """The error of those of a circle that have ended, as far as is known; else of the one that was
    spoken with.

    Args:
        what: they do together: "the 2 stages of a model".
        rank: of that one, in the circle; None: any of the others.
    """
    members, gone = circle.members, circle.board.absent() if circle.board is not None else []
    if isinstance(why, fg.errors.AbsentError):
        gone = [why.rank]
    if gone:
        who = f"{_named([members[i] for i in gone])} gone, or in no step any more"
    elif rank is not None:
        who = f"rank {members[rank]} is gone, or has done nothing for the timeout"
    else:
        others = [member for i, member in enumerate(members) if i != circle.rank]
        which = f"rank {others[0]}" if len(others) == 1 else f"one of ranks {others}"
        who = f"{which} is gone, or has done nothing for the timeout"
    return fg.errors.RankError(f"{who}, of ranks {list(members)}, which run {what}: {why}")


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} is" if len(ranks) == 1 else f"ranks {list(ranks)} are"


def landed(team: Circle, drawn: Tensor | Drawn) -> None:
    """Wait until the device has made what was drawn.

    Raises:
        RankError: another process of the team has ended, or the team's timeout is over. The device
            is not free before this process ends.
    """
    ids = drawn.ids if isinstance(drawn, Drawn) else drawn
    if team.size == 1 or not ids.is_cuda:
        return
    done = torch.cuda.Event()
    done.record()
    wait_until(done.query, team)


def wait_until(done: Callable[[], bool], team: Circle) -> None:
    """Wait until something is done; see `landed`."""
    began = looked = time.monotonic()
    while not done():
        now, board = time.monotonic(), team.board
        if now - looked > LOOK_S:
            looked = now
            late = now - began > team.timeout_s
            if late or (board is not None and board.absent()):
                if done():
                    return
                why = f"it was launched {now - began:.1f} s ago, and is not done. End this process"
                raise lost(team, "this step", why)
        if now - began > WATCHING_S:
            time.sleep(min((now - began) / 100, 1e-4))
