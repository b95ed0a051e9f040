"""The scheduler of `GraphifiedModel.serve` alone: pure Python over immutable values."""

from __future__ import annotations

import pytest

import fngraph as fg
from fngraph.errors import SpecError
from fngraph.integrations.serving import State, advance, lay_out, schedule, start

LIMITS = fg.Limits(8, 3, B=4)


def drive(prompts: list[list[int]], max_new: int, num_blocks: int = 12, stop: tuple[int, ...] = ()):
    """Every step as (rows, fields, state after); the token of a row is its request's length."""
    state = start(prompts, max_new, LIMITS, num_blocks, 4)
    while state.live:
        state, rows = schedule(state, LIMITS)
        fields = lay_out(rows, LIMITS, 4)
        state = advance(state, rows, [len(row.request.tokens) for row in rows], stop)
        yield rows, fields, state


PROMPTS = [[1] * 10, [2], [3] * 3, [4] * 6, [5]]


def test_every_request_gets_its_tokens_and_gives_its_blocks_back():
    *_, (_, _, state) = drive(PROMPTS, 5)
    done = {r.id: list(r.tokens) for r in state.finished}
    assert done == {i: p + [len(p) + j for j in range(5)] for i, p in enumerate(PROMPTS)}
    assert sorted(state.free) == list(range(12)) and not any(r.blocks for r in state.finished)


def test_steps_stay_within_the_limits_and_prompts_come_in_chunks():
    counts = []
    for rows, fields, _ in drive(PROMPTS, 5):
        assert sum(row.num_new for row in rows) == fields["spec"].num_tokens <= 8
        assert len(rows) == fields["spec"].num_reqs <= 3
        counts += [row.num_new for row in rows if row.request.id == 0]
    assert counts == [8, 2, 1, 1, 1, 1]


def test_only_steps_of_decodes_alone_are_uniform():
    for rows, fields, _ in drive(PROMPTS, 5):
        decodes = [row.request.computed >= row.request.prompt_len for row in rows]
        assert fields["spec"].query_len == (1 if all(decodes) else None)
        assert decodes == sorted(decodes, reverse=True)  # decodes first


def test_no_slot_is_written_twice_while_it_is_held():
    held: dict[int, int] = {}
    for rows, fields, state in drive(PROMPTS, 5):
        slots = iter(fields["slot_mapping"].tolist())
        for row in rows:
            for _ in range(row.num_new):
                assert held.setdefault(next(slots), row.request.id) == row.request.id
        free = {s for b in state.free for s in range(4 * b, 4 * b + 4)}
        held = {s: r for s, r in held.items() if s not in free}


def test_the_fields_say_where_everything_is():
    (_, fields, _), *_ = drive([[7, 8, 9], [6] * 9], 2)
    assert fields["token_ids"].tolist() == [7, 8, 9, 6, 6, 6, 6, 6]
    assert fields["positions"].tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert fields["slot_mapping"].tolist() == [0, 1, 2, 8, 9, 10, 11, 12]
    assert fields["seq_lens"].tolist() == [3, 5]
    assert fields["query_start_loc"].tolist() == [0, 3, 8]
    assert fields["block_tables"].tolist() == [[0, 1, 0, 0], [2, 3, 4, 0]]
    assert fields["logits_indices"].tolist() == [2, 7]
    assert fields["spec"].host == fg.HostBounds(max_query_len=5, max_seq_len=5)


def test_a_stop_token_ends_a_text_and_stays_in_it():
    *_, (_, _, state) = drive(PROMPTS, 5, stop=(3, 8))
    assert sorted(len(r.tokens) - r.prompt_len for r in state.finished) == [1, 3, 3, 3, 5]


def test_requests_wait_for_blocks():
    first = next(drive(PROMPTS, 5, num_blocks=4))
    assert len(first[0]) == 1 and isinstance(first[2], State)
    assert [r.id for r in first[2].waiting] == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "prompts, max_new, message",
    [([[1], []], 2, "prompt 1 has 0 tokens"), ([[1]], 0, "asks for 0 more"),
     ([[1] * 15], 2, r"takes 5 blocks of 4, and 4 are there. Pass Limits\(..., B=5\)")],
)  # fmt: skip
def test_what_could_never_run_is_refused(prompts, max_new, message):
    with pytest.raises(SpecError, match=message):
        start(prompts, max_new, LIMITS, 12, 4)
