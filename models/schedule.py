"""Continuous batching as pure functions: schedule(state) -> (state, batch), then advance(state).

A state is a value: who waits, who runs, who is done, and which blocks of the cache are free.
Requests join when a row and all the blocks that they will ever need are free, so none has to be
thrown out half-way. Every running decode gets its token first; prefills share what is left of
the token budget, in the order in which they came, in chunks.

| batch   | holds                                        | `spec.query_len` |
|---------|----------------------------------------------|------------------|
| decode  | only requests that are past their prompt     | 1                |
| mixed   | any other, a last chunk of one token as well | None             |

Shape letters: T tokens of the step, R requests of the step, B blocks per request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch

import fngraph as fg
from models.llama import Batch


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


def schedule(state: State, limits: fg.Limits) -> tuple[State, Batch]:
    """Admit what fits, hand out the token budget, and lay the step's batch out.

    Returns:
        The state, whose first R running requests are the batch's rows; and the batch, on the host.

    Raises:
        ValueError: nothing to do.
    """
    state = admit(state, limits)
    if not state.running:
        raise ValueError("no request is waiting or running; check state.live before scheduling")
    running = tuple(sorted(state.running, key=lambda request: not request.decoding))
    rows, left = [], limits.max_tokens
    for request in running:
        count = min(request.missing, left)
        left -= count
        if count:
            rows.append((request, count))
    return dataclasses.replace(state, running=running), lay_out(rows, limits["B"], state.block_size)


def admit(state: State, limits: fg.Limits) -> State:
    """Move requests from waiting to running, in order, while rows and blocks last."""
    waiting, running, free = list(state.waiting), list(state.running), state.free
    while waiting and len(running) < limits.max_reqs:
        first = waiting[0]
        needed = blocks_for(len(first.prompt) + first.max_new, state.block_size)
        if needed > len(free):
            break
        running.append(dataclasses.replace(waiting.pop(0), blocks=free[:needed]))
        free = free[needed:]
    return dataclasses.replace(state, waiting=tuple(waiting), running=tuple(running), free=free)


def lay_out(rows: Sequence[tuple[Request, int]], B: int, block_size: int) -> Batch:
    """The batch in which each request computes its next `count` tokens."""
    spans = [(request, range(request.computed, request.computed + n)) for request, n in rows]
    ends = list(accumulate(count for _, count in rows))
    decode = all(request.decoding for request, _ in rows)
    bounds = fg.HostBounds(
        max_query_len=max(len(span) for _, span in spans),
        max_seq_len=max(span.stop for _, span in spans),
    )
    return Batch(
        token_ids=torch.tensor([r.tokens[i] for r, span in spans for i in span]),
        positions=torch.tensor([i for _, span in spans for i in span]),
        slot_mapping=torch.tensor(
            [r.blocks[i // block_size] * block_size + i % block_size for r, s in spans for i in s]
        ),
        seq_lens=torch.tensor([span.stop for _, span in spans], dtype=torch.int32),
        query_start_loc=torch.tensor([0, *ends], dtype=torch.int32),
        block_tables=torch.tensor(
            [r.blocks + (0,) * (B - len(r.blocks)) for r, _ in rows], dtype=torch.int32
        ),
        logits_indices=torch.tensor(ends) - 1,
        spec=fg.BatchSpec(ends[-1], len(rows), query_len=1 if decode else None, host=bounds),
    )


def advance(state: State, batch: Batch, tokens: Iterable[int]) -> State:
    """The state after a step: `tokens` has the next token of each row of `batch`.

    A row still inside its prompt computed a chunk and its token is dropped. A request that has
    all its tokens leaves, and its blocks are free again.
    """
    counts = batch.query_start_loc.diff().tolist()
    stepped = [
        step(request, count, token) for request, count, token in zip(state.running, counts, tokens)
    ]
    done = [request for request in stepped if len(request.generated) == request.max_new]
    kept = [request for request in stepped if len(request.generated) < request.max_new]
    freed = (block for request in done for block in request.blocks)
    return dataclasses.replace(
        state,
        running=(*kept, *state.running[len(stepped) :]),
        finished=(*state.finished, *(dataclasses.replace(r, blocks=()) for r in done)),
        free=(*state.free, *freed),
    )


def step(request: Request, count: int, token: int) -> Request:
    """The request after `count` more of its tokens were computed, the last one yielding `token`."""
    new = (token,) if count == request.missing else ()
    return dataclasses.replace(
        request, computed=request.computed + count, generated=request.generated + new
    )


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)
