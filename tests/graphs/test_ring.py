"""The ring: a batch in each slot until the device has read it, and none after."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.core import Buffer, plan_buffers
from fngraph.core.buffers import parse_dims
from fngraph.graphs.ring import SLOTS, make_ring
from fngraph.graphs.staging import allocate
from fngraph.graphs.unpack import unpacker
from fngraph.step import warm


def kit(device: Any) -> Any:
    """A ring of one leaf of up to 8 tokens, its buffer, and the node of a key of 8."""
    plan = plan_buffers({"x": Buffer(parse_dims("T"), "int64", -1)}, {"T": 8, "R": 8})
    static, ring = allocate(plan, torch.device(device)), make_ring(plan, torch.device(device))
    return ring, static.tensors[0], unpacker(static, ring, {"T": 8, "R": 8})


def test_each_step_reads_its_own_slot(device):
    ring, buffer, unpack = kit(device)
    for step in range(3 * SLOTS):
        leaf = torch.full((3,), step)
        ring.put([3, 0, 0, 24], [leaf])
        leaf.fill_(99)  # it was copied
        unpack()
        assert buffer.tolist() == [step] * 3 + [-1] * 5


def test_several_batches_wait_for_their_steps(device):
    ring, buffer, unpack = kit(device)
    for step in range(SLOTS):
        ring.put([2, 0, 0, 16], [torch.full((2,), step)])
    for step in range(SLOTS):
        unpack()
        assert buffer[:2].tolist() == [step] * 2


def test_a_slot_that_is_not_read_yet_is_waited_for():
    ring, buffer, unpack = kit("cpu")
    for step in range(SLOTS):
        ring.put([1, 0, 0, 8], [torch.tensor([step])])
    waiting = threading.Thread(target=ring.put, args=([1, 0, 0, 8], [torch.tensor([77])]))
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive()
    unpack()
    waiting.join(5)
    assert not waiting.is_alive() and buffer[0] == 0


def test_after_a_step_that_failed_the_ring_goes_on_from_the_devices_count(device):
    ring, buffer, unpack = kit(device)
    ring.put([1, 0, 0, 8], [torch.tensor([1])])  # nothing reads it
    ring.resume()
    ring.put([1, 0, 0, 8], [torch.tensor([2])])
    unpack()
    assert buffer[0] == 2
    ring.put([1, 0, 0, 8], [torch.tensor([3])])
    unpack()  # read, and failed behind it
    ring.resume()
    ring.put([1, 0, 0, 8], [torch.tensor([4])])
    unpack()
    assert buffer[0] == 4


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_a_host_batch_is_filled_in_place(recorder_name, device, modes):
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    plain = toys.attention_cache(device=device)
    fast = fg.graphify(
        toys.attend, modes=modes, donate="cache", stage="batch", sizes=toys.SIZES,
        recorder=recorder_name,
    )  # fmt: skip
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    batches = [toys.batch(3, 2, seed=1), toys.decode(2), toys.batch(1, seed=3), toys.batch(5, 4)]
    for like in 3 * batches:
        filled = step.host_batch(like.spec)
        assert filled.spec == like.spec
        for name in fg.core.buffers_of(toys.Batch):
            getattr(filled, name).copy_(getattr(like, name))
            assert getattr(filled, name).is_pinned() is (str(device) != "cpu")
        got, cache = step(cache, filled)
        with torch.no_grad():
            want, plain = toys.attend(params, plain, toys.on(like, device))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_host_batch_needs_a_spec():
    @fg.graphify(stage="x", modes="FULL")
    def double(x: Any) -> Any:
        return x * 2

    assert double(torch.ones(3)).tolist() == [2.0] * 3
    (step,) = double._captured.values()
    with pytest.raises(fg.errors.TreeError, match="exact shapes"):
        step.host_batch(fg.BatchSpec(1, 1))


def test_a_capture_whose_first_node_fails_leaves_the_ring_in_step(monkeypatch):
    params, cache = toys.attention_params(), toys.attention_cache()
    fast = fg.graphify(
        toys.attend,
        modes="FULL",
        donate="cache",
        stage="batch",
        sizes=toys.SIZES,
        limits=toys.LIMITS,
    )  # fmt: skip
    batches = [toys.batch(2, seed=1), toys.batch(3, 1, seed=2)]
    fast(params, cache, batches[0])

    def broken(*args: Any) -> Any:
        def node() -> None:
            raise KeyboardInterrupt

        return node

    with monkeypatch.context() as patch:
        patch.setattr(warm, "unpacker", broken)
        with pytest.raises(KeyboardInterrupt):
            fast(params, cache, batches[1])
    for batch in (batches[1], batches[0]):
        want, _ = toys.bare(toys.attend, params, cache, batch)
        got, _ = fast(params, cache, batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
