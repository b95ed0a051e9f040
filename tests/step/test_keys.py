"""Keys come and go: release, recapture, captured in a step, captured in between, counted."""

from __future__ import annotations

import weakref

import pytest
import steps
import torch
import toys
from toys import FULL, NONE, PIECEWISE

import fngraph as fg
from fngraph.core import BatchDescriptor
from fngraph.errors import AddressError
from fngraph.graphs.replay import EagerCall
from fngraph.step import keys as keys_module

MIXED, UNIFORM = toys.batch(3, 2, seed=1), toys.decode(3, 2, seed=2)


def test_a_released_key_is_captured_again_when_it_is_needed_and_counted(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    everything = made.keys
    made.check(MIXED)
    made.step.release(BatchDescriptor(8))
    assert made.keys == [k for k in everything if k != (PIECEWISE, BatchDescriptor(8))]
    with pytest.raises(KeyError, match="not captured"):
        made.step[BatchDescriptor(8)]
    before = made.step.stats.copy()
    for batch in (UNIFORM, MIXED, MIXED):
        made.check(batch)
    new = made.step.stats - before
    ((key, took),) = new.captures.items()
    assert key == (PIECEWISE, BatchDescriptor(8), True)
    assert took.times == 1 and 0 < took.ms < 60_000
    assert set(made.keys) == set(everything)


def test_counts_beyond_those_that_are_kept(recorder_name, device, monkeypatch):
    monkeypatch.setattr(keys_module, "MOST_PREPARED", 3)
    made = steps.make(recorder_name, device, lazy=False)
    for seed, n in enumerate((1, 2, 3, 4, 5, 1, 2, 6, 3, 3, 7)):
        made.check(toys.batch(n, seed=seed))
        assert 1 <= len(made.step.main.prepared) <= 3
    assert made.step.stats.steps == 11


def test_release_of_all_and_recapture(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    keys = made.keys
    made.check(UNIFORM)
    made.step.release()
    assert len(made.step) == 0 and not made.step.memory.total
    made.check(UNIFORM)
    assert made.keys == [(FULL, BatchDescriptor(4, 4, query_len=1))]
    made.step.capture_all()
    assert set(made.keys) == set(keys)
    old = dict(made.step.replays)
    made.step.recapture(BatchDescriptor(4))
    changed = [key for key in keys if made.step.replays[key] is not old[key]]
    assert changed == [(PIECEWISE, BatchDescriptor(4))]
    made.step.recapture()
    assert all(made.step.replays[key] is not old[key] for key in keys)
    for batch in (MIXED, UNIFORM):
        made.check(batch)


def test_release_of_what_is_no_key(recorder_name, device):
    made = steps.make(recorder_name, device)
    with pytest.raises(KeyError, match=r"BatchDescriptor\(5\) is no key"):
        made.step.release(BatchDescriptor(5))
    made.step.release(BatchDescriptor(4))  # a key, not captured: nothing to do


def test_nothing_keeps_a_released_graph(recorder_name, device):
    """Not the lookups of calls, nor a batch that was handed out before."""
    made = steps.make(recorder_name, device, lazy=False, outputs="borrow")
    made.check(MIXED)
    handed = made.step.host_batch(MIXED.spec)
    for name in fg.core.buffers_of(toys.Batch):
        getattr(handed, name).copy_(getattr(MIXED, name))
    alive = [
        weakref.ref(c if made.step.recorder.name == "tape" else c.graph)
        for replay in made.step.replays.values()
        for c in replay.calls
        if not isinstance(c, EagerCall)
    ]
    made.step.release()
    assert len(alive) > 8 and [x for x in alive if x() is not None] == []
    want, _ = toys.bare(made.fn, made.params, made.state, toys.on(MIXED, device))
    got, _ = made.step(made.state, handed)
    torch.testing.assert_close(got, want, **toys.CLOSE)


def test_a_key_that_is_lost_in_a_step_runs_without_the_callers_gradients(recorder_name, device):
    """As before a step where processes agree, one of which cannot run it."""
    made = steps.make(recorder_name, device, toys.tally, outputs="borrow")
    made.params["w"].requires_grad_()
    batch = toys.on(UNIFORM, device)
    assert not made.step(made.state, batch)[0].requires_grad
    (prepared,) = made.step.main.prepared.values()
    made.step.main.failed[prepared.chosen.key] = "it has failed elsewhere"
    del made.step.main.replays[prepared.chosen.key]
    prepared.replay = None
    assert not made.step(made.state, batch)[0].requires_grad and prepared.chosen.mode is NONE


def test_capture_some_makes_progress_largest_first_until_its_time_is_used(recorder_name, device):
    made = steps.make(recorder_name, device)
    total = len(made.step.table)
    assert made.step.capture_some(0) == total - 1
    assert made.keys == [next(iter(made.step.table))]
    assert made.step.capture_some(0) == total - 2
    assert made.step.capture_some(1e6) == 0
    assert made.keys == list(made.step.table)
    assert made.step.capture_some(0) == 0
    assert {in_step for *_, in_step in made.step.stats.captures} == {False}


def test_captures_are_shown_with_their_ms(recorder_name, device):
    made = steps.make(recorder_name, device)
    made.check(MIXED)
    made.step.capture_some(0)
    text = made.step.stats.as_text()
    assert "in a step" in text and "ahead" in text and "BatchDescriptor(8)" in text


def test_lazily_captured_by_a_bound_function(recorder_name, device):
    fast = fg.graphify(
        toys.tally_, donate="state", stage="batch", limits=toys.LIMITS, sizes=toys.SIZES,
        recorder=recorder_name,
    )  # fmt: skip
    params, state = toys.tally_params(device), toys.tally_state(device)
    step = fast.bind(params).capture(state, progress=False, lazy=True)
    assert len(step) == 0
    step(state, toys.on(MIXED, device))
    assert len(step) == 1


def test_many_cycles_leave_memory_flat(recorder_name, device):
    made = steps.make(recorder_name, device, sizes=(8,))
    recorder = made.step.recorder
    for _ in range(3):
        made.check(MIXED)
        made.step.release()
    before = recorder.usage()
    for _ in range(30):
        made.check(MIXED)
        made.step.release()
    assert recorder.usage().pool <= before.pool
    if recorder.name == "tape":
        assert recorder.usage() == before


@pytest.mark.gpu
def test_two_thousand_cycles_leave_memory_flat(held):
    made = steps.make("cuda", "cuda", sizes=(8,))
    step, key = made.step, BatchDescriptor(8)
    for _ in range(100):
        step.recapture(key)
    before = held()
    assert before.graphs >= len(step)
    for _ in range(2000):
        step.recapture(key)
    held().check_flat(before)
    made.check(MIXED)


@pytest.mark.parametrize("how", ["capture_all", "capture_some", "recapture"])
def test_a_leaf_that_is_away_for_a_while_is_not_captured_there(recorder_name, device, how: str):
    made = steps.make(recorder_name, device)
    made.check(toys.batch(3, 2))
    head, keys = made.params["head"], made.keys
    home, away = head.data, head.data * 3  # other weights for an evaluation
    head.data = away
    with pytest.raises(AddressError, match="head"):
        getattr(made.step, how)(*[1000] * (how == "capture_some"))
    assert made.keys == keys
    head.data = home
    for batch in (toys.batch(3, 2), toys.decode(2), toys.batch(9)):
        made.check(batch)
