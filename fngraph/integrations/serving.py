"""Continuous batching with chunked prefill, as pure functions over one immutable state.

    state, rows = schedule(state, limits)      # which requests compute how many tokens
    state = advance(state, rows, new_tokens)   # after the step

A request is admitted when a row and all the blocks that it may ever need are free, so none is
thrown out half-way. Decodes come first, one token each; prefills share the rest of the step.
It comes with the package, for the check of other people's models; `models/serving/loop.py`, which shares
prefixes, throws out and drafts, is the one to serve with.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch

from fngraph.core import BatchSpec, HostBounds, Limits
from fngraph.errors import SpecError


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """One text under way.

    Attributes:
        tokens: the prompt and what was generated.
        prompt_len: how many of them are the prompt.
        end: the number of tokens at which it is done.
        computed: how many of them are in the cache.
        blocks: its blocks of the cache, in order; none unless it is running.
    """

    id: int
    tokens: tuple[int, ...]
    prompt_len: int
    end: int
    computed: int = 0
    blocks: tuple[int, ...] = ()

    @property
    def decoding(self) -> bool:
        """Whether its prompt is in the cache."""
        return self.computed >= self.prompt_len


class Row(NamedTuple):
    """A request's part in one step: its next `num_new` tokens."""

    request: Request
    num_new: int


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """Everything that scheduling depends on; `free` are the blocks that nobody holds."""

    waiting: tuple[Request, ...]
    running: tuple[Request, ...]
    finished: tuple[Request, ...]
    free: tuple[int, ...]
    block_size: int

    @property
    def live(self) -> bool:
        """Whether there is work left."""
        return bool(self.waiting or self.running)


def start(
    prompts: Sequence[Sequence[int]], max_new: int, limits: Limits, num_blocks: int, block_size: int
) -> State:
    """A state in which every prompt waits, over a cache of free blocks.

    Raises:
        SpecError: a request that could never run.
    """
    waiting = []
    for i, prompt in enumerate(prompts):
        end = len(prompt) + max_new
        needed, most = -(-end // block_size), min(limits["B"], num_blocks)
        if not len(prompt) or max_new < 1:
            raise SpecError(
                f"prompt {i} has {len(prompt)} tokens and asks for {max_new} more. Pass at least 1 "
                "of each"
            )
        if needed > most:
            raise SpecError(
                f"prompt {i} has {len(prompt)} tokens; with {max_new} new ones it takes {needed} "
                f"blocks of {block_size}, and {most} are there. Pass Limits(..., B={needed}) and "
                f"num_blocks={needed} or more, or shorten it"
            )
        waiting.append(Request(i, tuple(map(int, prompt)), len(prompt), end))
    return State(tuple(waiting), (), (), tuple(range(num_blocks)), block_size)


def schedule(state: State, limits: Limits) -> tuple[State, tuple[Row, ...]]:
    """Admit what fits and hand out the tokens of one step."""
    waiting, running, free = list(state.waiting), list(state.running), state.free
    while waiting and len(running) < limits.max_reqs:
        needed = -(-waiting[0].end // state.block_size)
        if needed > len(free):
            break
        running.append(dataclasses.replace(waiting.pop(0), blocks=free[:needed]))
        free = free[needed:]
    rows, left = [], limits.max_tokens
    for request in sorted(running, key=lambda request: not request.decoding):
        count = min(len(request.tokens) - request.computed, left)
        left -= count
        if count:
            rows.append(Row(request, count))
    state = dataclasses.replace(state, waiting=tuple(waiting), running=tuple(running), free=free)
    return state, tuple(rows)


def lay_out(rows: Sequence[Row], limits: Limits, block_size: int) -> dict[str, Any]:
    """The fields of the batch in which `rows` compute their tokens, on the host."""
    spans = [(r, range(r.computed, r.computed + count)) for r, count in rows]
    ends = list(accumulate(count for _, count in rows))
    decode = all(request.decoding for request, _ in rows)
    bounds = HostBounds(max(count for _, count in rows), max(span.stop for _, span in spans))
    slots = [
        r.blocks[i // block_size] * block_size + i % block_size for r, span in spans for i in span
    ]
    return {
        "token_ids": torch.tensor([t for r, s in spans for t in r.tokens[s.start : s.stop]]),
        "positions": torch.tensor([i for _, span in spans for i in span]),
        "slot_mapping": torch.tensor(slots),
        "seq_lens": torch.tensor([span.stop for _, span in spans], dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *ends], dtype=torch.int32),
        "block_tables": torch.tensor(
            [r.blocks + (0,) * (limits["B"] - len(r.blocks)) for r, _ in rows], dtype=torch.int32
        ),
        "logits_indices": torch.tensor(ends) - 1,
        "spec": BatchSpec(ends[-1], len(rows), query_len=1 if decode else None, host=bounds),
    }


def advance(
    state: State, rows: Sequence[Row], tokens: Iterable[int], stop: Collection[int] = ()
) -> State:
    """The state after a step that gave `tokens`, one a row.

    A row that is still inside its prompt drops its token. A request that has all its tokens, or
    one of `stop`, is finished and its blocks are free again.
    """
    stepped: dict[int, Request] = {}
    done: set[int] = set()
    for (request, count), token in zip(rows, tokens):
        computed = request.computed + count
        text = request.tokens
        if computed == len(text):
            text = (*text, token)
            if len(text) == request.end or token in stop:
                done.add(request.id)
        stepped[request.id] = dataclasses.replace(request, tokens=text, computed=computed)
    current = [stepped.get(request.id, request) for request in state.running]
    finished = [r for r in current if r.id in done]
    return dataclasses.replace(
        state,
        running=tuple(r for r in current if r.id not in done),
        finished=(*state.finished, *(dataclasses.replace(r, blocks=()) for r in finished)),
        free=(*state.free, *(block for r in finished for block in r.blocks)),
    )
