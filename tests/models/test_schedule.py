"""Scheduling as properties: whatever arrives, nothing is leaked, shared, skipped or run twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings, strategies as st

import fngraph as fg
from models.requests import State, blocks_for, start, submit
from models.schedule import advance, schedule

BLOCK_SIZE = 4
Arrival = tuple[int, int, int]  # step of arrival, prompt length, max_new

arrivals = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12
)
unhurried = settings(deadline=None)  # a shared machine stalls now and then
limit_values = st.tuples(st.integers(1, 5), st.integers(0, 20), st.integers(11, 30))


def next_token(position: int, request: int) -> int:
    """A stand-in for the model: what it says depends on place and request alone."""
    return (position * 31 + request * 7 + 1) % 251


def simulate(coming: list[Arrival], limits: fg.Limits, num_blocks: int):
    """Yield (state before, batch, state after) for every step; checks the blocks on the way."""
    state, step, coming = start(num_blocks, BLOCK_SIZE), 0, sorted(coming)
    while coming or state.live:
        while coming and (coming[0][0] <= step or not state.live):
            _, length, max_new = coming.pop(0)
            state = submit(state, range(length), max_new, limits)
        before, batch = schedule(state, limits)
        ends = batch.seq_lens.tolist()
        tokens = [next_token(end, r.id) for end, r in zip(ends, before.running)]
        state = advance(before, batch, tokens)
        for moment in (before, state):
            check_blocks(moment, num_blocks)
        yield before, batch, state
        step += 1


def check_blocks(state: State, num_blocks: int) -> None:
    """Every block is free once, or held by one running request."""
    held = [block for request in state.running for block in request.blocks]
    assert sorted([*held, *state.free]) == list(range(num_blocks))
    assert not any(request.blocks for request in (*state.waiting, *state.finished))


@unhurried
@given(coming=arrivals, numbers=limit_values)
def test_every_token_runs_once_in_its_place(coming, numbers):
    max_reqs, spare_tokens, num_blocks = numbers
    limits = fg.Limits(max_reqs + spare_tokens, max_reqs, B=11)
    contents: dict[int, tuple[int, int]] = {}  # slot -> request and position it holds
    positions: dict[int, list[int]] = {}  # request -> positions computed, in order
    state = start(num_blocks, BLOCK_SIZE)
    for before, batch, state in simulate(coming, limits, num_blocks):  # noqa: B007
        starts = batch.query_start_loc.tolist()
        num_reqs = len(starts) - 1
        rows = before.running[:num_reqs]

        assert 1 <= batch.spec.num_tokens == len(batch.token_ids) <= limits.max_tokens
        assert 1 <= batch.spec.num_reqs == num_reqs <= limits.max_reqs
        assert batch.block_tables.shape == (num_reqs, limits["B"])
        assert batch.logits_indices.tolist() == [end - 1 for end in starts[1:]]
        limits.check(batch.spec)

        for row, request in enumerate(rows):
            span = slice(starts[row], starts[row + 1])
            own = batch.positions[span].tolist()
            assert own, "a row without tokens"
            assert own[-1] + 1 == batch.seq_lens[row]
            assert batch.token_ids[span].tolist() == [request.tokens[i] for i in own]
            for position, slot in zip(own, batch.slot_mapping[span].tolist()):
                block = batch.block_tables[row, position // BLOCK_SIZE]
                assert slot == block * BLOCK_SIZE + position % BLOCK_SIZE
                assert slot // BLOCK_SIZE in request.blocks
                contents[slot] = (request.id, position)
            positions.setdefault(request.id, []).extend(own)
            # all that it will look at is still there
            for position in range(own[-1] + 1):
                block = int(batch.block_tables[row, position // BLOCK_SIZE])
                slot = block * BLOCK_SIZE + position % BLOCK_SIZE
                assert contents[slot] == (request.id, position)

    assert not state.live and len(state.finished) == len(coming)
    for request in state.finished:
        assert len(request.generated) == request.max_new
        first = len(request.prompt)
        ends = range(first, first + request.max_new)
        assert list(request.generated) == [next_token(end, request.id) for end in ends]
        assert positions[request.id] == list(range(first + request.max_new - 1))


@unhurried
@given(coming=arrivals, numbers=limit_values)
def test_a_batch_is_uniform_exactly_when_every_row_decodes(coming, numbers):
    max_reqs, spare_tokens, num_blocks = numbers
    limits = fg.Limits(max_reqs + spare_tokens, max_reqs, B=11)
    for before, batch, _ in simulate(coming, limits, num_blocks):
        rows = before.running[: batch.spec.num_reqs]
        lens = batch.query_start_loc.diff().tolist()
        past_prompt = all(r.computed >= len(r.prompt) for r in rows)
        assert (batch.spec.query_len == 1) == past_prompt
        assert batch.spec.query_len in (None, 1)
        assert batch.spec.host == fg.HostBounds(max(lens), int(batch.seq_lens.max()))


@unhurried
@given(coming=arrivals, numbers=limit_values)
def test_decodes_never_wait_and_the_budget_is_used(coming, numbers):
    max_reqs, spare_tokens, num_blocks = numbers
    limits = fg.Limits(max_reqs + spare_tokens, max_reqs, B=11)
    for before, batch, _ in simulate(coming, limits, num_blocks):
        left_out = before.running[batch.spec.num_reqs :]
        assert not any(request.decoding for request in left_out)
        wanted = sum(request.missing for request in before.running)
        assert batch.spec.num_tokens == min(wanted, limits.max_tokens)
        if before.waiting and len(before.running) < limits.max_reqs:
            first = before.waiting[0]
            needed = blocks_for(len(first.prompt) + first.max_new, BLOCK_SIZE)
            assert needed > len(before.free), "room for it, yet it waits"


def test_prefill_mixed_and_decode_batches_all_occur():
    coming = [(0, 3, 6), (0, 25, 6), (4, 9, 6)]
    kinds = set()
    for before, batch, _ in simulate(coming, fg.Limits(8, 2, B=11), 24):
        rows = before.running[: batch.spec.num_reqs]
        kinds.add((len(rows), frozenset(request.decoding for request in rows)))
    prefill, decode, both = frozenset({False}), frozenset({True}), frozenset({True, False})
    assert kinds >= {(2, prefill), (2, both), (2, decode), (1, decode)}


def test_a_last_chunk_of_one_token_is_no_decode():
    limits = fg.Limits(4, 1, B=4)
    state = submit(start(4, BLOCK_SIZE), range(5), 2, limits)
    specs = []
    while state.live:
        state, batch = schedule(state, limits)
        state = advance(state, batch, [7])
        specs.append((batch.spec.num_tokens, batch.spec.query_len))
    assert specs == [(4, None), (1, None), (1, 1)]


def test_states_are_values():
    limits = fg.Limits(8, 2, B=4)
    state = submit(start(8, BLOCK_SIZE), (1, 2, 3), 2, limits)
    first, batch = schedule(state, limits)
    again, same = schedule(state, limits)
    assert first == again and state.waiting and not state.running
    assert torch.equal(batch.slot_mapping, same.slot_mapping)
    assert advance(first, batch, [9]) == advance(first, batch, [9])
    assert first.running[0].computed == 0


@pytest.mark.parametrize(
    "prompt, max_new, says",
    [
        (range(9), 8, r"take 5 blocks of 4, but a request may have 4 .* B=5"),
        ((), 1, "needs a prompt token"),
        ((1,), 0, "max_new >= 1"),
    ],
)
def test_a_request_that_could_never_run_is_refused(prompt, max_new, says):
    state = start(8, BLOCK_SIZE)
    with pytest.raises(ValueError, match=says):
        submit(state, prompt, max_new, fg.Limits(8, 2, B=4))
    assert not state.live


def test_nothing_to_schedule_is_said():
    with pytest.raises(ValueError, match=r"state\.live"):
        schedule(start(8, BLOCK_SIZE), fg.Limits(8, 2, B=4))
