"""Whose memory results and donated leaves are: what a caller may do with them, and with a batch, in
every mode, on either recorder."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from toys import Model, model, steps

every_mode = pytest.mark.parametrize("modes", toys.MODES)


@pytest.mark.sampled(5)
@every_mode
def test_the_donated_container_comes_back_with_its_own_memory(recorder_name, device, toy, modes):
    fast = toy.graphify(modes=modes, recorder=recorder_name)
    seen = [(id(x), x.data_ptr()) for x in toys.leaves(toy.state)]
    for batch in steps(device):
        _, back = fast(toy.params, toy.state, batch)
        assert back is toy.state
        assert [(id(x), x.data_ptr()) for x in toys.leaves(back)] == seen


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_a_recording_holds_what_it_reads(recorder_name, device, toy: Model, modes: str):
    """Whatever has become of its step: the ring, which it reads by addresses, and the leaves."""
    traced = toy.graphify(modes=modes, sizes=(4,)).trace(toy.params, toy.state)
    step = traced.split().lower().compile().capture(toy.params, toy.state, recorder=recorder_name)
    step(toy.state, toys.on(toys.batch(3), device))
    ring = weakref.ref(step.main.ring)
    recordings = [call for call in step[next(iter(step))].calls if hasattr(call, "replay")]
    recorder = step.recorder
    del step
    gc.collect()
    assert ring() is not None
    before = int(ring().state[0])
    for recording in recordings:
        recording.replay()
    recorder.synchronize()
    assert int(ring().state[0]) == before + 1
    del recording, recordings
    gc.collect()
    assert ring() is None


@pytest.mark.sampled(5)
@every_mode
def test_owned_outputs_survive_the_next_calls(recorder_name, device, toy: Model, modes: str):
    fast = toy.graphify(modes=modes, recorder=recorder_name)
    kept = []
    for batch in steps(device):
        want, _ = toys.bare(*toy, batch)
        kept.append((fast(toy.params, toy.state, batch)[0], want))
    spans = [got.untyped_storage().data_ptr() for got, _ in kept]
    assert len(set(spans)) == len(spans)
    for got, want in kept:
        torch.testing.assert_close(got, want, **toys.CLOSE)


@pytest.mark.parametrize("modes", ["PIECEWISE", "FULL", "FULL_AND_PIECEWISE"])
def test_borrowed_outputs_are_views_that_the_next_call_overwrites(
    recorder_name, device, toy, modes
):
    fast = toy.graphify(modes=modes, recorder=recorder_name, outputs="borrow")
    batches = steps(device)
    first, _ = fast(toy.params, toy.state, batches[0])
    seen = first.clone()
    want, _ = toys.bare(*toy, batches[1])
    second, _ = fast(toy.params, toy.state, batches[1])
    assert second.data_ptr() == first.data_ptr()  # "its own" is what one might have expected
    torch.testing.assert_close(second, want, **toys.CLOSE)
    assert not torch.equal(first, seen)


@pytest.mark.parametrize("how", ["in place", "by a step", "recapture"])
def test_autograd_refuses_a_borrowed_result_that_was_written_since(recorder_name, device, toy, how):
    fast = toy.graphify(modes="FULL", recorder=recorder_name, outputs="borrow")
    step = fast.bind(toy.params).capture(toy.state, progress=False)
    batch = steps(device)[0]
    borrowed, _ = step(toy.state, batch)
    weight = torch.ones_like(borrowed, requires_grad=True)
    loss = (weight * borrowed).sum()
    if how == "recapture":
        step.recapture()
    else:
        borrowed, _ = step(toy.state, batch)
        if how == "in place":
            borrowed.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


CHANGED: dict[str, Callable[[Any], Any]] = {
    "t_": lambda y: y.t_(), "unsqueeze_": lambda y: y.unsqueeze_(0), "set_": lambda y: y.set_(),
    "as_strided_": lambda y: y.as_strided_((2,), (1,)), "data": lambda y: setattr(y, "data", y[:0]),
    "requires_grad_": lambda y: y.requires_grad_(), "a name": lambda y: setattr(y, "mine", True),
}  # fmt: skip
OUTPUTS = {"own": {}, "borrow": {"outputs": "borrow"},
           "guards": {"outputs": "borrow", "guards": True}}  # fmt: skip


@every_mode
@pytest.mark.parametrize("outputs", OUTPUTS)
def test_what_a_caller_makes_of_a_result_is_no_later_ones(recorder_name, device, modes, outputs):
    """Each is a tensor of its own, though its memory may be that of the one before."""
    toy = model("tally", device)
    fast = toy.graphify(modes=modes, recorder=recorder_name, **OUTPUTS[outputs])
    batch = steps(device)[0]
    for change in ("", *CHANGED):
        result = toy.check(fast, batch)
        assert not result.requires_grad and not hasattr(result, "mine"), change
        CHANGED.get(change, lambda y: y)(result)
    toy.check(fast, batch)


@pytest.mark.sampled(5)
@every_mode
def test_an_owned_output_can_be_written_without_harm(recorder_name, device, toy, modes: str):
    fast = toy.graphify(modes=modes, recorder=recorder_name)
    for batch in steps(device):
        _, after = toys.bare(*toy, batch)
        toy.check(fast, batch).fill_(float("nan"))
        toys.assert_trees(toy.state, after, **toys.CLOSE)


def test_the_batch_may_be_changed_and_dropped_after_the_call(recorder_name, device):
    toy = model("tally", device)
    fast = toy.graphify(recorder=recorder_name)
    batch = toys.on(toys.decode(3, 0), device)
    want, _ = toys.bare(*toy, batch)
    got, _ = fast(toy.params, toy.state, batch)
    batch.token_ids.zero_()
    del batch
    assert torch.equal(got, want)
