"""Serving without a model: what a token is, is a function of all tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fngraph.models import Event, Policy, State, advance
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.scheduling import plan


class Step(NamedTuple):
    """One step: the state before it, with its rows; the batch; the state after it."""

    before: State
    batch: Any
    after: State
    events: tuple[Event, ...]


def next_token(text: Sequence[int], adapter: int = -1) -> int:
    """The token after a text: of few kinds, so that texts repeat themselves at times."""
    return zlib.crc32(bytes(text[-5:])) % 3 if adapter < 0 else (sum(text) + adapter) % 5


def generate(
    prompt: Sequence[int], max_new: int, stop: Sequence[Sequence[int]] = (), adapter: int = -1
) -> tuple[int, ...]:
    """What a request must get."""
    text: list[int] = list(prompt)
    for _ in range(max_new):
        text.append(next_token(text, adapter))
        new = tuple(text[len(prompt) :])
        if any(new[-len(run) :] == tuple(run) for run in stop):
            break
    return tuple(text[len(prompt) :])


def simulate(
    state: State, policy: Policy, inbox: Callable[[State], State] = lambda state: state
) -> Iterator[Step]:
    """Serve with a cache that holds, for each slot, the whole text up to its token.

    A row's tokens go to their slots first; then each place that it draws from looks up every slot
    of its own text. So a slot that was lost, or written by someone else, is an error.
    """
    slots: dict[int, tuple[int, ...]] = {}
    while (state := inbox(state)).live:
        before = plan(state, policy)
        batch = lay_out(
            before.rows, policy, lambda spec: empty_batch(batch_type("adapters"), policy, spec)
        )
        policy.limits.check(batch.spec)
        starts = batch.query_start_loc.tolist()
        tokens, where = batch.token_ids.tolist(), batch.slot_mapping.tolist()
        texts: list[tuple[int, ...]] = []
        for row, (job, new, drafts) in enumerate(before.rows):
            text = tuple(job.tokens)[: job.computed]
            for at in range(starts[row], starts[row + 1]):
                assert batch.positions[at] == len(text)
                text = (*text, tokens[at])
                texts.append(text)
                slots[where[at]] = (job.request.adapter, *text)
            assert text[: len(text) - len(drafts)] == tuple(job.tokens)[: job.computed + new]
            assert batch.seq_lens[row] == len(text)
        drawn = []
        for row, (job, _, _) in enumerate(before.rows):
            ids = []
            for at in batch.logits_indices[row].tolist():
                assert starts[row] <= at < starts[row + 1]
                text = texts[at]
                for position in range(len(text)):
                    block = int(batch.block_tables[row, position // policy.block_size])
                    slot = block * policy.block_size + position % policy.block_size
                    assert slots[slot] == (job.request.adapter, *text[: position + 1])
                ids.append(next_token(text, job.request.adapter))
            drawn.append(ids)
        state, events = advance(before, drawn)
        yield Step(before, batch, state, events)
