"""Who goes first, who is thrown out, and who has had its time."""

from __future__ import annotations

import random

import pytest

from fngraph.models import Policy, advance, bare_steps, cancel, gather, llama, serve, start, submit
from fngraph.models.serving.scheduling import plan
from tests.models.conftest import wide_params
from tests.models.traffic import generate, simulate

SIZE = 4
POLICY = Policy(32, 2, 8, SIZE)


def test_waiting_goes_by_priority_and_of_one_priority_by_number():
    state = start(40, POLICY)
    for priority in (0, 5, -1, 0, 5, -1):
        state = submit(state, POLICY, (1, 2), 3, priority=priority)
    assert [job.id for job in state.waiting] == [2, 5, 0, 3, 1, 4]
    order = []
    for step in simulate(state, POLICY):
        order += [job.id for job in step.before.running if job.id not in order]
    assert order == [2, 5, 0, 3, 1, 4]


def test_the_least_urgent_is_thrown_out_and_waits_in_its_place():
    policy = Policy(32, 4, 8, SIZE, reserve=0)
    state, rng = start(9, policy), random.Random(0)
    priorities = [1, 0, 2, 0, 1, -1, 0, 2]
    thrown, last, events = [], set(), []
    left = list(enumerate(priorities))

    def inbox(state):
        if left and (rng.random() < 0.4 or not state.live):
            _, priority = left.pop(0)
            state = submit(state, policy, (state.submitted, 1, 2), 16, priority=priority)
        return state

    for step in simulate(state, policy, inbox):
        for jobs in (step.before.running, step.before.waiting, step.after.running):
            assert [job.rank for job in jobs] == sorted(job.rank for job in jobs)
        now = {job.id for job in step.before.running}
        ids = {job.id for job in step.before.waiting}
        for id in last & ids:
            thrown.append(id)
            assert all(priorities[id] >= priorities[other] for other in now)
        last = {job.id for job in step.after.running}
        events += step.events
    assert thrown and gather(events) == {i: generate((i, 1, 2), 16) for i in range(8)}


def test_who_has_had_its_time_ends_waiting_in_its_prompt_or_running():
    policy = Policy(4, 2, 8, SIZE)
    state = submit(start(40, policy), policy, (1, 2), 9, deadline=3.0)
    state = submit(state, policy, range(12), 9, deadline=3.0)  # in its prompt by then
    state = submit(state, policy, (5,), 9, deadline=2.0)  # waits for a place
    state = submit(state, policy, (6,), 9)
    ended, now = {}, 0.0
    texts = {}
    while state.live:
        now += 1.0
        state = plan(state, policy)
        state, events = advance(state, [[7]] * len(state.rows), now=now)
        assert len({event.id for event in events}) == len(events)
        for event in events:
            texts[event.id] = texts.get(event.id, ()) + event.tokens
            if event.end:
                ended[event.id] = (event.end, now)
    assert ended == {0: ("time", 3.0), 1: ("time", 3.0), 2: ("time", 2.0), 3: ("length", 12.0)}
    assert texts == {0: (7,) * 3, 1: (), 2: (), 3: (7,) * 9}
    assert len(state.pool.free) == 40 and state.soonest == float("inf")


def test_a_text_that_ends_in_time_ends_as_it_does():
    policy = Policy(4, 2, 8, SIZE)
    state = submit(start(40, policy), policy, (1, 2), 1, deadline=1.0)
    _, (event,) = advance(plan(state, policy), [[7]], now=1.0)
    assert (event.tokens, event.end) == ((7,), "length")


def test_a_deadline_of_one_that_is_gone_costs_nobody_anything():
    policy = Policy(8, 2, 8, SIZE)
    state = submit(start(40, policy), policy, (1, 2), 9, deadline=1.0)
    state = submit(state, policy, (1, 2), 3)
    state = cancel(state, 0)
    state, events = advance(plan(state, policy), [[7]], now=5.0)
    assert [event.end for event in events] == [None] and state.soonest == float("inf")


@pytest.mark.parametrize("after", [3, 6])
def test_serve_reads_its_clock_once_a_step(after):
    config = llama.Config(50, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4, dim=8,
                          mlp_dim=12)  # fmt: skip
    params, cache = wide_params(config), llama.init_cache(config, 40, block_size=SIZE)
    steps = bare_steps(llama.forward, params, POLICY)
    state = submit(start(40, POLICY), POLICY, (1, 2), 20, deadline=float(after))
    state = submit(state, POLICY, (1, 2), 20)
    ticks = iter(range(1, 100))
    events = [
        event
        for one in serve(steps, cache, state, POLICY, clock=lambda: float(next(ticks)))
        for event in one.events
    ]
    texts = gather(events)
    assert len(texts[0]) == after and texts[1][:after] == texts[0] and len(texts[1]) == 20
    assert [(e.id, e.end) for e in events if e.end] == [(0, "time"), (1, "length")]
