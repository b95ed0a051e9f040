"""Requests and the state of serving as values: who waits, who runs, who is done, what is free."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import fngraph as fg


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One text under way.

    Attributes:
        id: its number, in the order of submission.
        prompt: tokens to start from, at least one.
        max_new: tokens to generate.
        generated: tokens so far.
        computed: how many of `tokens` have their k and v in the cache.
        blocks: its blocks of the cache, in order; none unless it is running.
    """

    id: int
    prompt: tuple[int, ...]
    max_new: int
    generated: tuple[int, ...] = ()
    computed: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what was generated."""
        return self.prompt + self.generated

    @property
    def decoding(self) -> bool:
        """Whether its prompt is in the cache, so that each step brings it one token further."""
        return self.computed >= len(self.prompt)

    @property
    def missing(self) -> int:
        """Tokens that the next step would have to compute to reach a new one."""
        return len(self.prompt) + len(self.generated) - self.computed


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything that scheduling depends on.

    Attributes:
        waiting: not started, first come first.
        running: hold blocks; those of the step under way come first, row by row.
        finished: done, in the order in which they ended.
        free: blocks that nobody holds.
        block_size: tokens a block.
    """

    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    finished: tuple[Request, ...]
    free: tuple[int, ...]
    block_size: int

    @property
    def live(self) -> bool:
        """Whether there is work left."""
        return bool(self.waiting or self.running)

    @property
    def requests(self) -> tuple[Request, ...]:
        """All requests by number."""
        return tuple(
            sorted(self.waiting + self.running + self.finished, key=lambda request: request.id)
        )


class Served(NamedTuple):
    """One step as a serving loop reports it: the state after it, its spec and its wall time."""

    state: State
    spec: fg.BatchSpec
    seconds: float


def start(num_blocks: int, block_size: int) -> State:
    """A state without requests, over a cache of that many free blocks."""
    return State((), (), (), tuple(range(num_blocks)), block_size)


def submit(state: State, prompt: Sequence[int], max_new: int, limits: fg.Limits) -> State:
    """The state with one more request waiting.

    Raises:
        ValueError: a request that could never run, so that it would wait for ever.
    """
    if not prompt or max_new < 1:
        raise ValueError(
            f"a request needs a prompt token and max_new >= 1, got {len(prompt)} and {max_new}"
        )
    needed, most = blocks_for(len(prompt) + max_new, state.block_size), limits["B"]
    total = len(state.free) + sum(len(request.blocks) for request in state.running)
    if needed > min(most, total):
        raise ValueError(
            f"{len(prompt)} prompt tokens and {max_new} new ones take {needed} blocks of "
            f"{state.block_size}, but a request may have {most} and the cache has {total}. "
            f"Pass Limits(..., B={needed}) and a larger cache, or shorten the request"
        )
    request = Request(len(state.requests), tuple(prompt), max_new)
    return dataclasses.replace(state, waiting=(*state.waiting, request))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
