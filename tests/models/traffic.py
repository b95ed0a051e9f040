"""Serving without a model: what a token is, is a function of all tokens before it."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from fngraph.models import Event, Policy, State, advance
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.many import take_ahead
from fngraph.models.serving.sampling import UNDRAWN
from fngraph.models.serving.scheduling import plan
from fngraph.models.serving.texts.tokens import Tokens


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


def look(
    slots: dict[int, tuple[int, ...]], table: Any, text: Sequence[int], adapter: int, policy: Policy
) -> None:
    """Assert that each slot of a text holds what it should."""
    for position in range(len(text)):
        slot = slot_of(table, position, policy)
        assert slots[slot] == (adapter, *text[: position + 1])


def slot_of(table: Any, position: int, policy: Policy) -> int:
    """Where a token is."""
    block, offset = divmod(position, policy.block_size)
    return int(table[block]) * policy.block_size + offset


def go_on(
    slots: dict[int, tuple[int, ...]], before: State, batch: Any,
    texts: Sequence[tuple[int, ...]], drawn: Sequence[list[int]], policy: Policy,
) -> list[list[int]]:  # fmt: skip
    """The turns behind the first one, all rows side by side, as the device takes them."""
    ids, now = [list(x) for x in drawn], list(texts)
    for turn in range(1, before.turns):
        for row, (job, _, _) in enumerate(before.rows):
            adapter, table = job.request.adapter, batch.block_tables[row]
            stops = {UNDRAWN, *batch.stop_ids[row].tolist()}
            if turn >= batch.left[row] or ids[row][-1] in stops:
                ids[row].append(UNDRAWN)
                continue
            now[row] = (*now[row], ids[row][-1])
            slots[slot_of(table, len(now[row]) - 1, policy)] = (adapter, *now[row])
            look(slots, table, now[row], adapter, policy)
            ids[row].append(next_token(now[row], adapter))
    return ids


def verify_on(
    slots: dict[int, tuple[int, ...]], before: State, batch: Any, policy: Policy
) -> list[list[int]]:
    """All turns of a launch that verifies drafts, all rows side by side, as the device takes them:
    each turn writes the last token and the drafts behind it, and keeps what it drew itself."""
    rows, drafts = range(len(before.rows)), len(before.rows[0].drafts)
    first = [len(row.job.tokens) for row in before.rows]
    now = [tuple(row.job.tokens) for row in before.rows]
    over = [left < 1 for left in batch.left.tolist()]
    for _ in range(before.turns):
        fed: dict[int, tuple[int, ...]] = {}
        for row in rows:
            if over[row]:
                continue
            guess = Tokens(now[row]).after_first(policy.ngram, drafts)
            fed[row] = (*now[row], *(guess + [now[row][-1]] * drafts)[:drafts])
            adapter = before.rows[row].job.request.adapter
            for end in range(len(now[row]), len(fed[row]) + 1):
                assert (end - 1) // policy.block_size < len(before.rows[row].job.blocks)
                slot = slot_of(batch.block_tables[row], end - 1, policy)
                slots[slot] = (adapter, *fed[row][:end])
        for row, text in fed.items():
            adapter, table = before.rows[row].job.request.adapter, batch.block_tables[row]
            for end in range(len(now[row]), len(text) + 1):
                look(slots, table, text[:end], adapter, policy)
                now[row] = (*text[:end], next_token(text[:end], adapter))
                over[row] = (
                    len(now[row]) - first[row] == batch.left[row]
                    or now[row][-1] in batch.stop_ids[row].tolist()
                )
                if over[row] or end == len(text) or now[row][-1] != text[end]:
                    break
    assert all(over)
    drawn = [list(now[row][first[row] :]) for row in rows]
    return [ids + [UNDRAWN] * (before.turns - len(ids)) for ids in drawn]


def simulate(
    state: State, policy: Policy, inbox: Callable[[State], State] = lambda state: state
) -> Iterator[Step]:
    """Serve with a cache that holds, for each slot, the whole text up to its token.

    A row's tokens go to their slots first; then each place that it draws from looks up every slot
    of its own text. So a slot that was lost, or written by someone else, is an error.
    """
    slots: dict[int, tuple[int, ...]] = {}
    while (state := inbox(state)).live:
        before = take_ahead(plan(state, policy), policy)
        several = before.turns > 1
        looked_up = several and len(before.rows[0].drafts) > 0
        kind = batch_type(*["many"] * several, *["lookup"] * looked_up, "adapters")
        batch = lay_out(
            before.rows, policy, lambda spec, kind=kind: empty_batch(kind, policy, spec),
            turns=before.turns,
        )  # fmt: skip
        policy.limits.check(batch.spec)
        starts = batch.query_start_loc.tolist()
        tokens, where, positions = (
            x.reshape(-1).tolist() for x in (batch.token_ids, batch.slot_mapping, batch.positions)
        )
        texts: list[tuple[int, ...]] = []
        for row, (job, new, drafts) in enumerate(before.rows):
            text = tuple(job.tokens)[: job.computed]
            for at in range(starts[row], starts[row + 1]):
                assert positions[at] == len(text)
                text = (*text, tokens[at])
                texts.append(text)
                slots[where[at]] = (job.request.adapter, *text)
            assert text[: len(text) - len(drafts)] == tuple(job.tokens)[: job.computed + new]
            assert batch.seq_lens[row] == len(text)
        drawn = []
        for row, (job, _, _) in enumerate(before.rows):
            ids = []
            for at in batch.logits_indices[row].reshape(-1).tolist():
                assert starts[row] <= at < starts[row + 1]
                ids.append(next_token(texts[at], job.request.adapter))
                look(slots, batch.block_tables[row], texts[at], job.request.adapter, policy)
            drawn.append(ids)
        if looked_up:
            drawn = verify_on(slots, before, batch, policy)
        elif several:
            drawn = go_on(slots, before, batch, texts, drawn, policy)
        state, events = advance(before, drawn)
        yield Step(before, batch, state, events)
