"""Sleep gives device memory back; wake captures exactly what was captured."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

import pytest
import steps
import torch
import toys

import fngraph as fg
from fngraph.core import BatchDescriptor
from fngraph.errors import AddressError, CaptureError, SleepError, TreeError

MIXED, UNIFORM = toys.batch(3, 2, seed=1), toys.decode(3, 2, seed=2)


def held(made: steps.Made) -> int:
    """Bytes of static buffers and outputs."""
    tensors = [*made.step.main.static.tensors, *made.step.main.outputs]
    return sum(x.untyped_storage().nbytes() for x in tensors)


def test_sleep_and_wake(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    made.step.release(BatchDescriptor(2))
    keys, bytes_held = made.keys, held(made)
    made.check(MIXED)
    made.step.sleep()
    assert held(made) == 0 and not made.keys
    if recorder_name == "tape":
        assert made.step.recorder.usage() == (0, 0)
    made.step.wake()
    assert made.keys == keys and held(made) == bytes_held
    for batch in (MIXED, UNIFORM, toys.batch(2)):
        made.check(batch)  # the cache is as it was


def test_a_cache_that_was_given_back_holds_zeros_in_the_same_tensors(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    leaves = toys.leaves(made.state)
    made.step.sleep(cache=True)
    assert all(x.untyped_storage().nbytes() == 0 for x in leaves)
    made.step.wake()
    assert toys.leaves(made.state) == leaves and all(not x.any() for x in leaves)
    for batch in (MIXED, UNIFORM):
        made.check(batch)
    leaves[0].data = leaves[0].clone()  # the new addresses are watched like the old ones
    with pytest.raises(AddressError):
        made.step(made.state, toys.on(MIXED, device))


@pytest.mark.parametrize("cache", [False, True])
def test_a_call_while_asleep_says_what_to_do(recorder_name, device, cache: bool):
    made = steps.make(recorder_name, device)
    for batch in (MIXED, UNIFORM):
        made.check(batch)
    handed = made.step.host_batch(MIXED.spec)
    made.step.sleep(cache)
    for what in (
        lambda: made.step(made.state, toys.on(MIXED, device)),
        lambda: made.step(made.state, toys.on(toys.batch(9), device)),
        lambda: made.step(made.state, handed),
        lambda: made.step.host_batch(MIXED.spec),
        lambda: made.step.static_buffer(made.step.dispatch(MIXED.spec).descriptor, "token_ids"),
        made.step.capture_all,
        made.step.recapture,
        lambda: made.step.capture_some(1),
    ):
        with pytest.raises(SleepError, match=r"step\.wake\(\)"):
            what()
    with torch.autocast(made.device.type, torch.bfloat16), pytest.raises(SleepError):
        made.step(made.state, toys.on(MIXED, device))
    made.step.wake()
    assert len(made.step) == 2
    made.check(MIXED)


def test_a_handed_batch_that_would_run_eagerly_does_not_run_asleep(recorder_name, device):
    limits = fg.Limits(max_tokens=16, max_reqs=4, B=toys.B)
    made = steps.make(recorder_name, device, sizes=(1, 2), limits=limits)
    made.check(toys.batch(9))
    handed = made.step.host_batch(toys.batch(9).spec)
    made.step.sleep(cache=True)
    with pytest.raises(SleepError):
        made.step(made.state, handed)


def test_sleep_twice_and_wake_twice(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    keys = made.keys
    made.step.sleep()
    made.step.sleep(cache=True)
    made.step.sleep(cache=True)
    made.step.wake()
    made.step.wake()
    assert made.keys == keys
    made.check(MIXED)


def test_what_is_released_before_sleep_is_not_captured_by_wake(recorder_name, device):
    made = steps.make(recorder_name, device)
    made.check(MIXED)
    made.check(UNIFORM)
    made.step.release(BatchDescriptor(8))
    made.step.sleep()
    made.step.wake()
    assert made.keys == [k for k in made.keys if k[1].query_len == 1] and len(made.keys) == 1


def test_memory_that_torch_does_not_own_is_refused_and_nothing_is_lost(device):
    import numpy as np

    made = steps.make("tape", "cpu")
    params, state = made.params, toys.attention_cache()
    state = ((torch.from_numpy(np.zeros_like(state[0][0].numpy())), state[0][1]), *state[1:])
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=toys.SIZES)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False, lazy=True)
    step(state, MIXED)
    with pytest.raises(CaptureError, match="not torch's own"):
        step.sleep(cache=True)
    assert len(step) == 1
    step(state, MIXED)


def test_too_little_memory_to_wake_up_and_a_second_try(recorder_name, device, monkeypatch):
    made = steps.make(recorder_name, device, lazy=False)
    keys = made.keys
    made.step.sleep(cache=True)
    resize, tries = torch.UntypedStorage.resize_, []

    def full(storage: Any, size: int) -> Any:
        tries.append(size)
        if len(tries) == 3:
            raise torch.OutOfMemoryError("no memory")
        return resize(storage, size)

    with monkeypatch.context() as patch:
        patch.setattr(torch.UntypedStorage, "resize_", full)
        with pytest.raises(CaptureError, match="no memory to wake up"):
            made.step.wake()
    with pytest.raises(SleepError):
        made.step(made.state, toys.on(MIXED, device))
    made.step.wake()
    assert made.keys == keys
    made.check(MIXED)


def test_an_ambient_state_of_its_own_sleeps_too(recorder_name, device):
    made = steps.make(recorder_name, device)
    made.check(MIXED)
    with torch.autocast(made.device.type, torch.bfloat16):
        made.step(made.state, toys.on(MIXED, device))
    assert len(set(map(id, made.step.by_ambient.values()))) == 2
    made.step.sleep()
    for keys in made.step.by_ambient.values():
        assert not keys.replays and not keys.outputs[0].untyped_storage().nbytes()
    made.step.wake()
    assert len(made.step) == 1
    with torch.autocast(made.device.type, torch.bfloat16):
        made.step(made.state, toys.on(MIXED, device))
    made.check(MIXED)


@pytest.mark.gpu
def test_device_memory_is_back_within_a_percent():
    width = 1 << 20

    def forward(params: Any, cache: Any, batch: toys.Batch) -> Any:
        return params[batch.token_ids] * 2 + 1, cache

    reserved = torch.cuda.memory_reserved  # of this process; what is free is also others' doing
    params = torch.ones(toys.V, width, device="cuda")
    cache = torch.zeros(1 << 28, device="cuda")
    batch = toys.on(MIXED, "cuda")
    gc.collect()  # what earlier tests have left would go in between
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = reserved()
    fast = fg.graphify(
        forward, modes="FULL", donate="cache", stage="batch", limits=toys.LIMITS, sizes=toys.SIZES
    )
    step = fast.bind(params).capture(cache, progress=False)
    want = step(cache, batch)[0].cpu()
    torch.cuda.empty_cache()  # of what the warm-up took
    awake = reserved()
    assert awake - before > 64 << 20
    step.sleep()
    asleep = reserved()
    assert asleep - before <= max((awake - before) // 100, 8 << 20)  # segments of small things
    step.sleep(cache=True)
    assert asleep - reserved() >= 0.99 * (1 << 30)
    step.wake()
    torch.cuda.empty_cache()
    assert abs(reserved() - awake) <= max(awake // 100, 32 << 20)
    assert torch.equal(step(cache, batch)[0].cpu(), want) and not cache.any()


def test_weights_are_written_while_asleep_but_not_replaced(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    made.step.sleep()
    assert "asleep" in repr(made.step)
    new = toys.trees.map_leaves(lambda x: x * 2, made.params)
    made.step.rebind(params=new)
    longer = toys.trees.map_leaves(lambda x: torch.cat([x, x]), new)
    with pytest.raises(SleepError):
        made.step.rebind(params=longer)
    toys.assert_trees(made.params, new)  # nothing of it was written
    made.step.wake()
    assert "asleep" not in repr(made.step)
    made.check(MIXED)


def test_what_is_asked_of_a_key_while_asleep_says_to_wake_it(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    key = made.step.dispatch(MIXED.spec).descriptor
    made.step.sleep()
    with pytest.raises(SleepError):
        made.step.static_buffer(key, "token_ids")
    with pytest.raises(KeyError, match=r"step\.wake\(\)"):
        made.step[key]


def test_weights_that_move_while_asleep_are_taken_where_they_are(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    made.step.sleep()
    for leaf in toys.leaves(made.params):
        leaf.data = leaf.clone()
    made.step.rebind(params=made.params)
    assert held(made) == 0  # nothing is taken before it wakes
    made.step.wake()
    made.check(MIXED)


def test_weights_of_another_dtype_do_not_wake(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    made.step.sleep()
    leaf = toys.leaves(made.params)[0]
    old = leaf.data
    leaf.data = old.double()
    with pytest.raises(TreeError, match="traced as float32"):
        made.step.wake()
    assert held(made) == 0
    leaf.data = old
    made.step.wake()
    made.check(MIXED)


def test_a_cache_that_another_function_gave_back_is_its_to_bring(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", sizes=toys.SIZES, limits=toys.LIMITS
    )
    other = fast.bind(made.params).capture(
        made.state, toys.LIMITS, recorder=made.step.recorder, progress=False
    )
    made.step.sleep(cache=True)
    other.sleep(cache=True)
    with pytest.raises(SleepError, match=r"cache\[0\]\[0\] has no memory"):
        other.wake()
    with pytest.raises(SleepError, match=r"step\.wake\(\)"):  # it sleeps on
        other(made.state, toys.on(MIXED, device))
    made.step.wake()
    other.wake()
    made.check(MIXED)
    dataclasses.replace(made, step=other).check(UNIFORM)


def test_a_shape_that_needs_new_graphs_is_refused_asleep_before_a_write(recorder_name, device):
    made = steps.make(recorder_name, device, lazy=False)
    keys, head = made.keys, made.params["head"].clone()
    made.step.sleep()
    wider = torch.randn(toys.E, 2 * toys.V, device=device)
    with pytest.raises(SleepError, match=r"step\.wake\(\)"):
        made.step.rebind(params={"params['head']": wider})
    assert torch.equal(made.params["head"], head) and held(made) == 0
    made.step.rebind(params={"params['head']": head * 2})  # of the same shape, it is but written
    made.step.wake()
    assert made.keys == keys
    made.check(MIXED)
    made.step.rebind(params={"params['head']": wider})
    made.check(MIXED)
