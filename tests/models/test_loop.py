"""The driver, its events, what is laid out for a step, and what a run is counted as."""

from __future__ import annotations

import contextlib
import warnings

import pytest
import torch

import fngraph as fg
from fngraph.models import (
    Policy,
    Settings,
    Tally,
    advance,
    bare_steps,
    cancel,
    gather,
    generate,
    llama,
    make_steps,
    serve,
    start,
    stream,
    submit,
)
from fngraph.models.serving.batches import batch_type, empty_batch, lay_out
from fngraph.models.serving.scheduling import plan
from fngraph.models.serving.steps import case_of
from tests.models.conftest import wide_params

POLICY = Policy(16, 3, 6, 8, query_lens=(1, 3), ngram=1)


def test_events_come_as_the_steps_do(params):
    cache = llama.init_cache(params.config, 12, block_size=8)
    state = submit(start(12, POLICY), POLICY, range(20), 6)
    state = submit(state, POLICY, (7, 8), 3)
    events = stream(serve(bare_steps(llama.forward, params, POLICY), cache, state, POLICY))
    first = next(events)  # before anything else is computed
    assert (first.id, len(first.tokens), first.end) == (1, 1, None) or first.id == 0
    rest = list(events)
    ends = [(event.id, event.end) for event in rest if event.end]
    assert sorted(ends) == [(0, "length"), (1, "length")]
    assert {id: len(text) for id, text in gather([first, *rest]).items()} == {0: 6, 1: 3}


def test_requests_are_cancelled_and_submitted_while_it_runs(params):
    cache = llama.init_cache(params.config, 12, block_size=8)
    number = iter(range(100))

    def inbox(state):
        at = next(number)
        state = cancel(state, 0) if at == 3 else state
        return submit(state, POLICY, (9,), 4) if at in (0, 2, 30) else state

    state = submit(start(12, POLICY), POLICY, (1, 2, 3), 30)
    steps = list(serve(bare_steps(llama.forward, params, POLICY), cache, state, POLICY, inbox))
    got = gather(stream(steps))
    assert 1 <= len(got[0]) < 30 and got[1] == got[2] and len(got[1]) == 4
    assert not steps[-1].state.live and len(steps[-1].state.pool.free) == 12


def test_a_verify_row_draws_at_each_of_its_places():
    policy = Policy(16, 3, 6, 4, query_lens=(1, 3), ngram=1)
    state = submit(start(12, policy), policy, (5, 6, 5, 6), 9)
    state, _ = advance(plan(state, policy), [[5]])
    state = plan(state, policy)
    batch = lay_out(state.rows, policy, lambda spec: empty_batch(batch_type(), policy, spec))
    assert batch.spec[:3] == (3, 1, 3)
    assert batch.token_ids.tolist() == [5, 6, 5] and batch.positions.tolist() == [4, 5, 6]
    assert batch.logits_indices.tolist() == [[0, 1, 2]]
    state, events = advance(state, [[6, 5, 9]])
    assert events[0].tokens == (6, 5, 9) and state.running[0].computed == 7


def test_other_rows_draw_at_their_last_place_alone():
    policy = Policy(16, 3, 6, 4, query_lens=(1, 3))
    state = start(12, policy)
    for prompt in ((1, 2, 3), (4,)):
        state = submit(state, policy, prompt, 9)
    state = plan(state, policy)
    batch = lay_out(state.rows, policy, lambda spec: empty_batch(batch_type(), policy, spec))
    assert batch.logits_indices.tolist() == [[2, 2, 2], [3, 3, 3]]
    assert batch.spec.query_len is None and batch.query_start_loc.tolist() == [0, 3, 4]


@pytest.mark.parametrize("make", [bare_steps, make_steps])
def test_only_a_verify_batch_draws_more_than_once_a_request(make, params):
    cache = llama.init_cache(params.config, 12, block_size=8)
    captured = {"modes": "FULL_AND_PIECEWISE", "sizes": (3,), "recorder": "tape"}
    if make is bare_steps:
        steps = bare_steps(llama.forward, params, POLICY)
    else:
        steps = make_steps(llama.forward, params, cache, POLICY, progress=False, **captured)
        plain, verify = ([key.query_len for _, key in step.replays] for step in steps.captured)
        assert (set(plain), verify) == ({None, 1}, [3])  # nothing is captured twice
    specs = [fg.BatchSpec(3, reqs, query_len=q) for q, reqs in ((None, 1), (1, 3), (3, 1))]
    assert [steps.host_batch(spec).logits_indices.shape[1] for spec in specs] == [1, 1, 3]


def test_one_draft_makes_a_verify_batch():
    """A mixed batch of as many tokens is none."""
    specs = [fg.BatchSpec(n, 1, query_len=q) for n, q in ((1, 1), (2, 2), (3, 3), (2, None))]
    assert [case_of(spec).verify for spec in specs] == [False, True, True, False]


def test_every_element_of_a_slot_is_filled():
    """A slot holds what was last in it."""
    kind = batch_type("sampling", "adapters", "cascade", "states")
    state = start(12, POLICY)
    for prompt in ((1, 2, 3), (4,)):
        state = submit(state, POLICY, prompt, 9)
    rows, batches = plan(state, POLICY).rows, []
    for old in (3, 5):

        def host_batch(spec, old=old):
            batch = empty_batch(kind, POLICY, spec)
            for name in fg.core.buffers_of(kind):
                getattr(batch, name).fill_(old)
            return batch

        batches.append(lay_out(rows, POLICY, host_batch))
    for name in fg.core.buffers_of(kind):
        assert torch.equal(*(getattr(batch, name) for batch in batches)), name


def test_settings_and_adapters_are_laid_out():
    policy = Policy(16, 3, 6, 4)
    state = submit(start(12, policy), policy, (1, 2, 3), 9, adapter=4)
    state = submit(state, policy, (4,), 9, settings=Settings(0.5, 7, 0.75, 0.25, seed=3))
    rows = plan(state, policy).rows
    kind = batch_type("sampling", "adapters", "cascade")
    batch = lay_out(rows, policy, lambda spec: empty_batch(kind, policy, spec))
    assert batch.adapter_ids.tolist() == [4, 4, 4, -1] and batch.spec.adapters == 1
    assert batch.temperature.tolist() == [0, 0.5] and batch.top_k.tolist() == [0, 7]
    assert batch.top_p.tolist() == [1, 0.75] and batch.min_p.tolist() == [0, 0.25]
    assert batch.keys[0] != batch.keys[1] and batch.prefix_len.tolist() == [0]
    with pytest.raises(ValueError, match="0 <= temperature"):
        submit(state, policy, (1,), 1, settings=Settings(-1.0))


def test_a_tally_counts_steps_tokens_and_padding(params):
    cache = llama.init_cache(params.config, 12, block_size=8)
    policy = Policy(16, 3, 6, 8)
    steps = make_steps(
        llama.forward, params, cache, policy, modes="FULL_AND_PIECEWISE", sizes=(2, 8),
        recorder="tape",
    )  # fmt: skip
    state = start(12, policy)
    for prompt in ((1, 2, 3), (4,), (5,)):
        state = submit(state, policy, prompt, 3)
    tally = Tally(serve(steps, cache, state, policy))
    assert [line[:2] for line in tally.lines] == [
        ("decode", fg.Mode.FULL), ("prefill", fg.Mode.PIECEWISE),
    ]  # fmt: skip
    decode, prefill = tally.lines
    assert decode[3:] == (2, 6, 0, 6, 0) and decode.key.num_reqs == 3
    assert prefill[3:] == (1, 5, 3, 3, 0)
    assert tally.share("FULL") == 2 / 3 and tally.share("FULL", "tokens") == 6 / 11
    assert tally.total("padding") == steps.captured[0].stats.padding == 3
    assert (
        tally.as_text().splitlines()[2].startswith("| decode  | FULL      | BatchDescriptor(3, 3")
    )


def test_a_tally_has_what_ran_and_not_what_was_meant(params):
    cache = llama.init_cache(params.config, 12, block_size=8)
    policy = Policy(16, 3, 6, 8)
    steps = make_steps(
        llama.forward, params, cache, policy, modes="FULL_AND_PIECEWISE", sizes=(2, 8),
        recorder="tape", on_failure="eager", memory_budget=1,
    )  # fmt: skip
    state = submit(submit(start(12, policy), policy, (1, 2, 3), 5), policy, (4,), 5)
    served = list(serve(steps, cache, state, policy))
    assert Tally(served).share("NONE") == steps.captured[0].stats.share("NONE") == 1
    assert Tally(served).total("padding") == 0
    assert {one.ran.reason for one in served} == set(steps.captured[0].stats.reasons)


def test_a_shared_prefix_is_read_once(params, monkeypatch):
    """Cascade batches, and no others, go through the cascade primitive, told how long it is."""
    seen, honest = [], fg.ops.cascade

    def spy(*args, **kwargs):
        seen.append(int(args[-1].prefix_len))
        return honest(*args, **kwargs)

    monkeypatch.setattr(fg.ops, "cascade", spy)
    policy = Policy(64, 3, 6, 8, cascade=16, cascade_reqs=3)
    state, want = start(18, policy), {}
    for i in range(3):
        prompt = (*range(20), i)
        want[i] = generate.reference(params, prompt, 3 + i)
        state = submit(state, policy, prompt, 3 + i)
    steps = bare_steps(llama.forward, params, policy)
    served = list(serve(steps, llama.init_cache(params.config, 18, block_size=8), state, policy))
    assert gather(stream(served)) == want
    cascades = [one.spec.cascade for one in served]
    assert cascades == [True, True, True, False, False]  # then fewer than three are left
    assert seen == [16] * 3 * params.config.num_layers


@contextlib.contextmanager
def waits_refused():
    """An op that waits for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls the mode a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_the_host_waits_for_tokens_alone(config):
    """What lies between two reads of tokens never waits for the device, in any mode."""
    policy = Policy(16, 3, 6, 8, query_lens=(1, 3), ngram=1, cascade=8)
    params = wide_params(config, device="cuda")
    for modes in ("NONE", "PIECEWISE", "FULL", "FULL_AND_PIECEWISE"):
        cache = llama.init_cache(config, 18, block_size=8, device="cuda")
        steps = make_steps(
            llama.forward, params, cache, policy, "sampling", modes=modes, sizes=(1, 2, 4, 8, 16)
        )

        def run(cache, batch, steps=steps):
            with waits_refused():
                return steps.run(cache, batch)

        def host_batch(spec, steps=steps):
            with waits_refused():
                return steps.host_batch(spec)

        for quiet in (steps, steps._replace(run=run, host_batch=host_batch)):  # the first compiles
            state = start(18, policy)
            for i in range(5):
                prompt = [*range(9), i, i, i]
                state = submit(state, policy, prompt, 12, settings=Settings(0.7, seed=i))
            assert list(serve(quiet, cache, state, policy))
