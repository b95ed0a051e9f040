"""Continuous batching as pure functions: schedule(state) -> (state, batch), then advance(state).

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
from models.requests import Request, State, blocks_for


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
        token_ids=torch.tensor([token for r, s in spans for token in r.tokens[s.start : s.stop]]),
        positions=torch.tensor([i for _, s in spans for i in s]),
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
