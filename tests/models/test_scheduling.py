"""Scheduling as properties: whatever arrives, nothing is leaked, shared, skipped or run twice."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

import fngraph as fg
from fngraph.models import Policy, Settings, State, advance, cancel, gather, start, submit
from fngraph.models.serving import blocks
from fngraph.models.serving.batches import MANY
from fngraph.models.serving.blocks import blocks_for
from fngraph.models.serving.loop import kind_of
from fngraph.models.serving.scheduling import plan
from tests.models.traffic import Step, generate, next_token, simulate

SIZE, MOST = 4, 10  # tokens a block, blocks a request
HEAD = (9, 8, 7, 6, 5, 4, 3, 2, 1)  # many prompts begin with some of it
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


@st.composite
def requests(draw) -> tuple:
    """(step of arrival, prompt, max_new, stop, adapter, step at which it is cancelled or None)."""
    prompt = HEAD[: draw(st.integers(0, 9))] + tuple(draw(st.lists(st.integers(0, 2), max_size=9)))
    run = st.lists(st.integers(0, 2), min_size=2, max_size=3).map(tuple)
    return (
        draw(st.integers(0, 3) | st.integers(0, 12)), prompt or (0,), draw(st.integers(1, 20)),
        tuple(draw(st.just([]) | st.lists(run, max_size=3))), draw(st.sampled_from([-1, -1, 0, 3])),
        draw(st.none() | st.none() | st.integers(0, 20)),
    )  # fmt: skip


@st.composite
def traffic(draw) -> tuple[list[tuple], Policy, int]:
    """What arrives, the policy, and blocks: often hardly more than the longest request takes."""
    count = draw(st.integers(1, 12))
    coming = draw(st.lists(requests(), min_size=count, max_size=count))
    alike = draw(st.integers(0, 2)) == 2  # or cascades would hardly occur
    if alike:
        coming = [(at % 2, HEAD + prompt[-3:], n, stop, -1, end)
                  for at, prompt, n, stop, _, end in coming]  # fmt: skip
    longest = max(blocks_for(len(prompt) + max_new, SIZE) for _, prompt, max_new, *_ in coming)
    policy = Policy(
        draw(st.integers(1, 3) | st.integers(4, 25)), draw(st.integers(1, 6)), longest, SIZE,
        query_lens=draw(st.sampled_from([(1,), (1, 3), (1, 2, 4)])),
        ngram=draw(st.integers(1, 2)), share=alike or draw(st.booleans()),
        cascade=draw(st.sampled_from([4, 8] if alike else [0, 4, 8])),
        reserve=draw(st.integers(0, 1)), decode_many=draw(st.sampled_from([1, 2, 5])),
    )  # fmt: skip
    if not policy.share and policy.query_lens == (1,):  # with states, of which there may be fewer
        policy = dataclasses.replace(policy, num_slots=max(1, policy.max_reqs - policy.reserve))
    return coming, policy, longest + draw(st.sampled_from([0, 0, 1, 1, 2, 4, 20]))


def run(coming: list[tuple], policy: Policy, num_blocks: int):
    """Every step of serving what comes, the requests by number, who was cancelled, and the states
    that were planned from."""
    coming = sorted(coming, key=lambda one: one[0])
    number, asked, gone, planned = -1, {}, set(), []

    def inbox(state: State) -> State:
        nonlocal number
        number += 1
        while coming and (coming[0][0] <= number or not state.live):
            _, prompt, max_new, stop, adapter, end = coming.pop(0)
            asked[state.submitted] = prompt, max_new, stop, adapter, end
            state = submit(state, policy, prompt, max_new, stop=stop, adapter=adapter)
        for id, (*_, end) in asked.items():
            if end is not None and end <= number and id not in gone:
                gone.add(id)
                state = cancel(state, id)
        planned.append(state)
        return state

    return simulate(start(num_blocks, policy), policy, inbox), asked, gone, planned


def check_blocks(state: State, num_slots: int = 0) -> None:
    """Every block is free once, or held by as many running requests as the pool says; every slot is
    free once, or one running request's."""
    pool = state.pool
    slots = [job.slot for job in state.running] if num_slots else []
    assert sorted([*slots, *state.slots]) == list(range(num_slots))
    assert all(job.slot == -1 for job in state.waiting)
    held = Counter(block for job in state.running for block in job.blocks)
    assert sorted([*held, *pool.free.tolist()]) == list(range(pool.num_blocks))
    assert {block: n for block, n in held.items() if n > 1} == dict(pool.holders)
    assert not any(len(job.blocks) or job.computed for job in state.waiting)
    order = [job.id for job in (*state.running, *state.waiting)]
    assert order == sorted(order)  # who was thrown out is before all who came later
    assert {name: block for block, name in pool.names.items()} == dict(pool.named)
    assert all(type(before) is tuple or before in pool.names for before, _ in pool.named)


@pytest.mark.sampled(0)
@unhurried
@given(traffic())
def test_each_request_gets_its_tokens_whatever_else_happens(case):
    """And every step on the way is as the functions below say."""
    steps, asked, gone, planned = run(*case)
    events = []
    for step in steps:
        events += step.events
        check_blocks(step.before, case[1].num_slots)
        check_blocks(step.after, case[1].num_slots)
        no_full_shared_block_is_written(step, planned[-1])
        specs_say_what_the_rows_are(step, case[1])
        decodes_never_wait_and_the_budget_is_used(step, planned[-1], case[1])
    got, ended = gather(events), [event.id for event in events if event.end]
    assert len(set(ended)) == len(ended)
    for id, (prompt, max_new, stop, adapter, _) in asked.items():
        want = generate(prompt, max_new, stop, adapter)
        if id in ended:
            assert got[id] == want
        else:
            assert id in gone
            assert got.get(id, ()) == want[: len(got.get(id, ()))]
    last = planned[-1]  # some were submitted and cancelled after the last step
    assert last.submitted == len(asked) and not last.live
    assert len(last.pool.free) == case[2]


def no_full_shared_block_is_written(step: Step, planned: State) -> None:
    slots = step.batch.slot_mapping.reshape(-1).tolist()
    assert len(set(slots)) == len(slots)
    written = {slot // SIZE for slot in slots}
    full = set(planned.pool.names.items()) & set(step.before.pool.names.items())
    filled = set(step.before.pool.names) - {block for block, _ in full}  # in this step
    free = set(planned.pool.free.tolist())  # who takes one may write there what was there before
    assert written.isdisjoint({block for block, _ in full} - free)
    assert written.isdisjoint(set(step.before.pool.holders) - filled)


def specs_say_what_the_rows_are(step: Step, policy: Policy) -> None:
    rows, spec, batch = step.before.rows, step.batch.spec, step.batch
    lens = batch.query_start_loc.diff().tolist()
    kind = kind_of(rows)
    assert (spec.num_tokens, spec.num_reqs) == (sum(lens), len(rows))
    assert 1 <= spec.num_reqs <= policy.max_reqs and spec.num_tokens <= policy.max_tokens
    longest = batch.seq_lens if step.before.turns == 1 else batch.seq_lens + batch.left - 1
    assert spec.host == fg.HostBounds(max(lens), int(longest.max()))
    assert (spec.extra == MANY) == (step.before.turns > 1) and (spec.extra in ((), MANY))
    past = all(
        row.job.computed >= len(row.job.request.prompt) and row.job.missing == 1 for row in rows
    )
    assert (spec.query_len is not None) == past == (kind in ("decode", "verify"))
    if past:
        assert set(lens) == {spec.query_len} and spec.query_len in policy.query_lens
        assert (spec.query_len > 1) == (kind == "verify")
    used = {row.job.request.adapter for row in rows} - {-1}
    assert spec.adapters == len(used)
    alike = [len(set(column)) == 1 for column in zip(*(row.job.blocks for row in rows))]
    shared = SIZE * (alike.index(False) if False in alike else len(alike))
    many = len(rows) >= max(2, policy.cascade_reqs)
    assert spec.cascade == bool(policy.cascade and many and shared >= policy.cascade)
    if spec.cascade:
        prefixes = {tuple(row.job.tokens)[: policy.cascade] for row in rows}
        assert len(prefixes) == 1


def decodes_never_wait_and_the_budget_is_used(step: Step, planned: State, policy: Policy) -> None:
    state = step.before
    computed = {job.id: job.computed for job in planned.running}
    now = {job.id: job.computed for job in state.running}
    if computed.keys() - now.keys():  # thrown out: nobody joins in the same step
        assert now.keys() <= computed.keys()
    assert all(now[id] >= computed.get(id, 0) for id in now)
    in_step = {row.job.id for row in state.rows}
    assert not any(job.decoding and job.id not in in_step for job in state.running)
    wanted = sum(job.missing for job in state.running)
    drafts = sum(len(row.drafts) for row in state.rows)
    assert step.batch.spec.num_tokens == min(wanted, policy.max_tokens) + drafts


@pytest.mark.sampled(0)
def test_what_is_hard_occurs_often():
    """Or the properties above would say little."""
    seen: Counter[str] = Counter()

    @settings(unhurried, derandomize=True, database=None, max_examples=400)
    @given(traffic())
    def look(case):
        steps, asked, _, planned = run(*case)
        policy, kinds = case[1], set()
        for step in steps:
            running = [job.id for job in step.before.running]
            gone = {job.id for job in planned[-1].running} - set(running)
            if gone:
                kinds.add("thrown out")
                if len(step.before.waiting) > len(gone):
                    kinds.add("thrown out while others wait")
            if step.batch.spec.cascade:
                kinds.add("a cascade")
            if step.before.turns > 1 and len({len(event.tokens) for event in step.events}) > 1:
                kinds.add("several at once, of some more than of others")
            if step.before.turns > 1 and step.before.rows[0].drafts:
                kinds.add("several at once, with drafts")
            if len(running) == policy.max_tokens < policy.max_reqs:
                kinds.add("more may run than tokens")
            if any(event.end == "stop" and len(asked[event.id][2]) > 1 for event in step.events):
                kinds.add("one of several stops")
        seen.update(kinds)

    look()
    assert len(seen) == 7 and min(seen.values()) >= 6, seen


def test_who_is_thrown_out_goes_before_those_who_never_ran():
    policy = Policy(16, 3, 9, 1, reserve=0)
    state = start(12, policy)
    for _ in range(5):
        state = submit(state, policy, (1, 2, 3), 6)
    thrown = set()
    while state.live:
        before = {job.id for job in state.running}
        state = plan(state, policy)
        thrown |= before - {job.id for job in state.running}
        ids = [job.id for job in state.waiting]
        assert ids == sorted(ids)
        state, _ = advance(state, [[0]] * len(state.rows))
    assert thrown


def test_who_joined_last_is_thrown_out_and_goes_first():
    policy = Policy(16, 3, 4, SIZE)
    state = start(5, policy)
    for prompt in ((1,) * 7, (2,) * 3, (3,)):
        state = submit(state, policy, prompt, 8)
    seen, thrown = [], []
    for step in simulate(state, policy):
        now = [job.id for job in step.before.running]
        thrown += [id for id in (seen[-1] if seen else []) if id not in now]
        seen.append(now)
    assert seen[0] == [0, 1]  # the third would leave too little room for them
    assert 1 in thrown and 0 not in thrown[: thrown.index(1)]


def test_prompts_that_begin_alike_share_blocks_in_the_very_same_step():
    policy = Policy(64, 4, MOST, SIZE)
    state = start(30, policy)
    for tail in (1, 2, 3):
        state = submit(state, policy, (*HEAD, tail), 2)
    state = submit(state, policy, (*HEAD, 1), 2, adapter=0)
    state = plan(state, policy)
    first, second, third, other = (list(job.blocks) for job in state.running)
    assert first[:2] == second[:2] == third[:2] and first[2] != second[2] != third[2]
    assert not set(other) & {*first, *second, *third}
    assert [row.new for row in state.rows] == [10, 2, 2, 10]


def test_a_prefix_ends_where_a_block_of_it_is_missing():
    pool, held = blocks.take(blocks.new_pool(8), 2)
    text = np.array([1, 2, 5, 6])
    pool = blocks.give_names(pool, np.array(held), text, 2, -1, 0)
    assert blocks.find_prefix(pool, text, 2, -1) == held
    assert blocks.find_prefix(pool, np.array([1, 2, 9, 9, 5, 6]), 2, -1) == held[:1]


def test_of_two_blocks_alike_the_first_has_the_name():
    pool = blocks.new_pool(8)
    text, alike = np.array([1, 2]), []
    for _ in range(2):
        pool, held = blocks.take(pool, 1)
        pool = blocks.give_names(pool, np.array(held), text, 2, -1, 0)
        alike.append(held)
    assert blocks.find_prefix(pool, text, 2, -1) == alike[0]
    pool = blocks.release(pool, alike[0], alike[1])
    assert blocks.find_prefix(pool, text, 2, -1) == alike[0] and list(pool.names) == alike[0]
    assert pool.kept == 1


def test_all_of_a_prompt_is_never_shared():
    """The last token is computed in any case, or there would be nothing to draw from."""
    policy = Policy(64, 4, MOST, SIZE)
    state = start(30, policy)
    for _ in range(2):
        state = submit(state, policy, HEAD[:8], 2)
    assert [row.new for row in plan(state, policy).rows] == [8, 4]


def test_prefill_mixed_decode_verify_and_cascade_all_occur():
    policy = Policy(12, 3, MOST, SIZE, query_lens=(1, 3), ngram=1, cascade=8)
    state = start(40, policy)
    for tail in (1, 2):
        state = submit(state, policy, (*HEAD, *(tail,) * 9), 12)
    steps = list(simulate(state, policy))
    kinds = {(kind_of(step.before.rows), step.batch.spec.cascade) for step in steps}
    assert kinds >= {("prefill", False), ("mixed", True), ("decode", True), ("verify", True)}


def test_a_last_chunk_of_one_token_is_no_decode():
    policy = Policy(4, 1, 4, SIZE)
    state = submit(start(4, policy), policy, range(5), 2)
    specs = [step.batch.spec for step in simulate(state, policy)]
    assert [(spec.num_tokens, spec.query_len) for spec in specs] == [(4, None), (1, None), (1, 1)]


def test_states_are_values():
    policy = Policy(8, 2, 4, SIZE)
    state = submit(start(8, policy), policy, (1, 2, 3), 3)
    first, again = plan(state, policy), plan(state, policy)
    assert first.rows == again.rows and state.waiting and not state.running
    one, _ = advance(first, [[9]])
    other, _ = advance(first, [[5]])
    assert tuple(one.running[0].tokens) == (1, 2, 3, 9)
    assert tuple(other.running[0].tokens) == (1, 2, 3, 5)
    assert tuple(first.running[0].tokens) == (1, 2, 3) and first.running[0].computed == 0


@pytest.mark.parametrize("num_blocks", [30, 3])
def test_recurrent_states_have_a_slot_each_and_give_it_back(num_blocks: int):
    """When they end, and when they are thrown out for want of blocks."""
    policy = Policy(8, 3, 4, SIZE, share=False, num_slots=2, reserve=0)
    state = start(num_blocks, policy)
    for _ in range(4):
        state = submit(state, policy, (1, 2, 3), 4)
    running: list[set[int]] = [set()]
    for step in simulate(state, policy):
        for after in (step.before, step.after):
            check_blocks(after, policy.num_slots)
        running.append({job.id for job in step.before.running})
    assert max(map(len, running)) == 2 and len(step.after.slots) == 2
    joined = sum(len(now - before) for before, now in pairwise(running))
    assert (joined > 4) == (num_blocks == 3)


def test_a_cancel_during_a_step_is_heeded():
    policy = Policy(8, 2, 4, SIZE)
    state = start(8, policy)
    for _ in range(2):
        state = submit(state, policy, (1, 2, 3), 4)
    state = cancel(plan(state, policy), 0)
    state, events = advance(state, [[7], [8]])
    assert [event.id for event in events] == [1]
    assert [job.id for job in state.running] == [1]
    assert cancel(state, 0) is state
    check_blocks(state)


@pytest.mark.parametrize(
    "stop, want, end",
    [((), 6, "length"), (((1,),), None, "stop"), (((2, 0), (0, 0, 0)), None, "stop")],
)
def test_a_request_ends_with_its_stop_or_its_length(stop, want, end):
    for query_lens in ((1,), (1, 4)):
        policy = Policy(16, 2, 8, SIZE, query_lens=query_lens, ngram=1)
        state = submit(start(8, policy), policy, (1, 0, 2, 0, 1, 0), 20 if stop else 6, stop=stop)
        events = [event for step in simulate(state, policy) for event in step.events]
        got = gather(events)[0]
        assert events[-1].end == end and not any(event.end for event in events[:-1])
        if stop:
            assert len(got) < 20 and any(got[-len(run) :] == run for run in stop)
            assert got == generate((1, 0, 2, 0, 1, 0), 20, stop)
        else:
            assert len(got) == want


def test_every_stop_ends_a_request():
    policy = Policy(16, 3, 8, SIZE)
    state = submit(start(8, policy), policy, (1,), 9, stop=((5,), (6, 7)))
    got = []
    for token in (4, 6, 7):
        state, events = advance(plan(state, policy), [[token]])
        got += [(event.tokens, event.end) for event in events]
    assert got == [((4,), None), ((6,), None), ((7,), "stop")] and not state.live


def test_a_stop_does_not_begin_in_the_prompt():
    policy = Policy(16, 1, 8, SIZE)
    token = next_token((1, 2))
    state = submit(start(8, policy), policy, (1, 2), 3, stop=((2, token),))
    (*_, last) = simulate(state, policy)
    assert last.events[0].end == "length"


@pytest.mark.parametrize(
    "prompt, max_new, stop, says",
    [
        (range(9), 8, (), r"take 5 blocks of 4, but a request may have 4 .*max_blocks=5"),
        ((), 1, (), "needs a prompt token"),
        ((1,), 0, (), "max_new >= 1"),
        ((1,), 1, ((),), "no empty stop"),
        ((3, -1), 1, (), r"prompt\[1\]=-1 is no token"),
        ((3, 2**31), 1, (), r"prompt\[1\]=2147483648 is no token"),
        ((3, 1.9), 1, (), r"prompt\[1\]=1\.9 is a float: pass a whole number"),
        (("3",), 1, (), r"prompt\[0\]='3' is a str"),
        ((1,), 2.5, (), r"max_new=2\.5 is a float"),
        ((1,), 1, ((1, 2.5),), r"stop=2\.5 is a float"),
    ],
)
def test_a_request_that_could_never_run_is_refused(prompt, max_new, stop, says):
    policy = Policy(8, 2, 4, SIZE)
    with pytest.raises((TypeError, ValueError), match=says):
        submit(start(8, policy), policy, prompt, max_new, stop=stop)


def test_tokens_of_other_types_are_tokens():
    policy = Policy(8, 2, 4, SIZE)
    for prompt in (np.array([3, 4]), torch.tensor([3, 4]), b"\3\4", iter((3, 4))):
        stop = [np.int64(5), torch.tensor([6, 7])]
        (job,) = submit(start(8, policy), policy, prompt, np.int32(2), stop=stop).waiting
        assert (job.request.prompt, job.request.stop) == ((3, 4), ((5,), (6, 7)))


def test_a_request_that_a_small_pool_never_holds_is_refused():
    """It would wait for ever, though a request may have that many blocks."""
    policy = Policy(8, 2, 8, SIZE)
    with pytest.raises(ValueError, match=r"take 4 blocks of 4, .* have 8 and the cache has 3"):
        submit(start(3, policy), policy, range(9), 7)
    state = submit(start(3, policy), policy, (1, 2, 0, 1, 1), 7)
    texts = gather(event for step in simulate(state, policy) for event in step.events)
    assert texts[0] == generate((1, 2, 0, 1, 1), 7)


def test_equal_prompts_prefilled_side_by_side_hold_blocks_of_their_own():
    """The last block of each is its own, and has one name: whoever ends first takes none along."""
    policy, prompt = Policy(64, 4, MOST, SIZE), HEAD[:8]
    for first, second in ((2, 9), (9, 2)):
        state = start(30, policy)
        for max_new in (first, second):
            state = submit(state, policy, prompt, max_new)
        late, events = [], []

        def inbox(state: State, late: list = late) -> State:
            late.append(None)
            return submit(state, policy, prompt, 4) if len(late) == 5 else state

        for step in simulate(state, policy, inbox):
            check_blocks(step.before)
            check_blocks(step.after)
            events += step.events
        assert gather(events) == {i: generate(prompt, n) for i, n in enumerate((first, second, 4))}


def test_seeds_are_of_requests_unless_given():
    """By their numbers, so that a state says what will be drawn; equal seeds are equal keys."""
    policy = Policy(8, 8, 4, SIZE)

    def keys(*seeds: int | None) -> list[int]:
        state = start(8, policy)
        for seed in seeds:
            state = submit(state, policy, (1,), 1, settings=Settings(1.0, seed=seed))
        return [job.request.key for job in state.waiting]

    assert keys(None, None, None) == keys(0, 1, 2) and len(set(keys(*[None] * 8))) == 8
    assert len(set(keys(5, 5, 0))) == 2


def test_nothing_to_schedule_is_said():
    policy = Policy(8, 2, 4, SIZE)
    with pytest.raises(ValueError, match=r"state\.live"):
        plan(start(8, policy), policy)


def test_a_policy_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="lacks 1"):
        Policy(8, 2, 4, query_lens=(3,))
    with pytest.raises(ValueError, match="cannot be shared"):
        Policy(8, 2, 4, num_slots=2)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"ngram": 0}, "ngram=0: pass ngram=1 or more"),
        ({"query_lens": (1, 1.5)}, r"query_lens=1\.5 is a float"),
        ({"query_lens": (1, 0)}, "or goes below it"),
        ({"query_lens": ()}, "lacks 1"),
        ({"max_tokens": 8.0}, r"max_tokens=8\.0 is a float"),
        ({"reserve": -1}, "reserve=-1: pass reserve=0 or more"),
        ({"cascade": -8}, "cascade=-8"),
        ({"num_slots": 1.5, "share": False}, "num_slots=1.5 is a float"),
    ],
    ids=str,
)
def test_a_number_that_no_policy_has_is_refused(options, says):
    with pytest.raises((TypeError, ValueError), match=says):
        Policy(**{"max_tokens": 8, "max_reqs": 2, "max_blocks": 4, **options})
