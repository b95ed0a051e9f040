"""The ring: a batch in each slot until the device has read it, and none after."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.core import Buffer, plan_buffers
from fngraph.core.buffers import parse_dims
from fngraph.graphs.staging.buffers import allocate
from fngraph.graphs.staging.ring import SLOTS, Ring, make_ring
from fngraph.graphs.staging.unpack import unpacker
from fngraph.step import capture


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


def test_a_leaf_that_is_read_in_place_is_not_copied(device):
    ring, buffer, unpack = kit(device)
    for _ in range(2 * SLOTS):
        leaf = torch.full((3,), 7, device=device)
        ring.put_in_place([3, 0, 0, 24], [leaf])
        leaf.fill_(8)
        unpack()
        assert buffer.tolist() == [8] * 3 + [-1] * 5


def test_which_leaves_a_graph_reads_where_they_are(device):
    ring, _, _ = kit(device)
    x = torch.arange(6, device=device)
    on_device = str(device) != "cpu"  # in host memory, all are copied
    assert ring.takes_in_place([x]) is on_device
    z = torch.zeros(3, dtype=torch.complex64, device=device)
    for other in (x[::2], z.conj(), z.conj().imag, x.cpu()):
        assert not ring.takes_in_place([x, other])


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


def attending(recorder_name: str, device: Any, **options: Any) -> Any:
    """A step over attention that captures when it is called, its arguments, and bare forward's."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    plain = toys.attention_cache(device=device)
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", sizes=toys.SIZES, recorder=recorder_name,
        **{"modes": "FULL", **options},
    )  # fmt: skip
    compiled = fast.trace(params, cache, limits=toys.LIMITS).split().lower().compile()
    return compiled.capture(params, cache, lazy=True, recorder=recorder_name), params, cache, plain


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_a_host_batch_is_filled_in_place(recorder_name, device, modes):
    step, params, cache, plain = attending(recorder_name, device, modes=modes)
    step.capture_all()
    batches = [toys.batch(3, 2, seed=1), toys.decode(2), toys.batch(1, seed=3), toys.batch(5, 4)]
    for like in 3 * batches:
        filled = toys.fill(step.host_batch(like.spec), like)
        assert filled.spec == like.spec
        for name in fg.core.buffers_of(toys.Batch):
            assert getattr(filled, name).is_pinned() is (str(device) != "cpu")
        got, cache = step(cache, filled)
        with torch.no_grad():
            want, plain = toys.attend(params, plain, toys.on(like, device))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


TURNS: dict[str, Callable[[Any], Any]] = {
    "unsqueeze_": lambda x: x.unsqueeze_(0), "as_strided_": lambda x: x.as_strided_((1,), (1,)),
    "data": lambda x: setattr(x, "data", x.clone()), "set_": lambda x: x.set_(),
}  # fmt: skip


@pytest.mark.parametrize("turn", TURNS)
@pytest.mark.parametrize("stepped", [False, True])
def test_what_is_made_of_a_host_batch_is_no_later_ones(recorder_name, device, turn, stepped):
    """The slot comes round again, and its memory is as it was."""
    step, params, cache, _ = attending(recorder_name, device)
    step.capture_all()
    like = toys.batch(3, 2, seed=1)
    spoilt = toys.fill(step.host_batch(like.spec), like)
    TURNS[turn](spoilt.token_ids)
    if stepped:
        with contextlib.suppress(fg.errors.TreeError):
            step(cache, spoilt)
    for _ in range(SLOTS + 1):
        filled = toys.fill(step.host_batch(like.spec), like)
        assert step.main.handed.is_in_place(step.main.ring.taken)
        want, after = toys.bare(toys.attend, params, cache, toys.on(like, device))
        got, _ = step(cache, filled)
        toys.assert_trees((got, cache), (want, after), **toys.CLOSE)


def test_a_host_batch_needs_a_spec():
    double = fg.graphify(lambda x: x * 2, stage="x", modes="FULL")
    step = double.bind().capture(batch=torch.ones(3), progress=False)
    with pytest.raises(fg.errors.TreeError, match="exact shapes"):
        step.host_batch(fg.BatchSpec(1, 1))


def test_a_capture_whose_first_node_fails_leaves_the_ring_in_step(monkeypatch):
    params, cache = toys.attention_params(), toys.attention_cache()
    fast = fg.graphify(
        toys.attend, modes="FULL", donate="cache", stage="batch", sizes=toys.SIZES,
        limits=toys.LIMITS,
    )  # fmt: skip
    batches = [toys.batch(2, seed=1), toys.batch(3, 1, seed=2)]
    fast(params, cache, batches[0])

    def broken(*args: Any) -> Any:
        def node() -> None:
            raise KeyboardInterrupt

        return node

    with monkeypatch.context() as patch:
        patch.setattr(capture, "unpacker", broken)
        with pytest.raises(KeyboardInterrupt):
            fast(params, cache, batches[1])
    for batch in (batches[1], batches[0]):
        want, _ = toys.bare(toys.attend, params, cache, batch)
        got, _ = fast(params, cache, batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
def test_a_host_batch_outlives_the_capture_of_its_own_key(recorder_name, device, modes):
    step, params, cache, plain = attending(recorder_name, device, modes=modes)
    for like in (toys.batch(3, 2, seed=1), toys.decode(2), toys.batch(1, seed=3)):
        got, cache = step(cache, toys.fill(step.host_batch(like.spec), like))
        with torch.no_grad():
            want, plain = toys.attend(params, plain, toys.on(like, device))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_a_host_batch_is_refused_after_its_step(recorder_name, device, modes):
    step, _, cache, _ = attending(recorder_name, device, modes=modes)
    like = toys.batch(3, 2, seed=1)
    first = toys.fill(step.host_batch(like.spec), like)
    second = toys.fill(step.host_batch(toys.decode(2).spec), toys.decode(2))  # overwrites the first
    with pytest.raises(fg.errors.TreeError, match="earlier host_batch"):
        step(cache, first)
    third = toys.fill(step.host_batch(like.spec), like)
    step(cache, third)
    for old in (first, second, third):
        with pytest.raises(fg.errors.TreeError, match="earlier host_batch"):
            step(cache, old)


def test_a_host_batch_that_fits_no_slot_has_memory_of_its_own(recorder_name, device):
    step, params, cache, _ = attending(recorder_name, device, modes="NONE")
    likes = [toys.batch(3, 2, seed=1), toys.batch(3, 2, seed=2)]
    filled = [toys.fill(step.host_batch(like.spec), like) for like in likes]
    for like, batch in zip(likes, filled):
        want, _ = toys.bare(toys.attend, params, cache, toys.on(like, device))
        got, cache = step(cache, batch)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


OTHERWISE = {
    "as it was": lambda x: x.clone(),
    "strided": lambda x: torch.stack([x, x], -1)[..., 0],
    "in host memory": lambda x: x.cpu(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "made in inference mode": torch.inference_mode()(torch.clone),
}


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE", "NONE"])
@pytest.mark.parametrize("anywhere", [False, True], ids=["as told", "as on CUDA"])
def test_leaves_that_lie_otherwise_than_those_before(
    recorder_name, device, modes, anywhere, monkeypatch
):
    """Those alike are not looked at again, and a graph on CUDA reads them where they are; the tape
    does so here as well, of leaves that are dense."""
    if anywhere:

        def dense(ring: Ring, batch: Any) -> bool:
            there = torch.device(device).type
            return all(x.is_contiguous() and x.device.type == there for x in batch)

        monkeypatch.setattr(Ring, "takes_in_place", dense)
    step, params, cache, plain = attending(recorder_name, device, modes=modes)
    for seed, lay in enumerate(2 * [*OTHERWISE.values()]):
        like = toys.on(toys.batch(3, 2, seed=seed), device)
        names = fg.core.buffers_of(toys.Batch)
        batch = dataclasses.replace(like, **{name: lay(getattr(like, name)) for name in names})
        got, cache = step(cache, batch)
        with torch.no_grad():
            want, plain = toys.attend(params, plain, like)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_handed_leaf_that_is_moved_is_followed(recorder_name, device):
    step, params, cache, plain = attending(recorder_name, device)
    like = toys.batch(3, 2, seed=1)
    for _ in range(2 * SLOTS):
        filled = toys.fill(step.host_batch(like.spec), like)
        filled.token_ids.data = like.token_ids.clone() * 0
        got, cache = step(cache, filled)
        with torch.no_grad():
            other = dataclasses.replace(like, token_ids=like.token_ids * 0)
            want, plain = toys.attend(params, plain, toys.on(other, device))
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_a_copy_of_a_handed_batch_is_refused(recorder_name, device):
    step, _, cache, _ = attending(recorder_name, device)
    like = toys.batch(3, 2, seed=1)
    filled = toys.fill(step.host_batch(like.spec), like)
    with pytest.raises(fg.errors.TreeError, match="or a copy of it"):
        step(cache, dataclasses.replace(filled, spec=like.spec))


def test_steps_from_several_threads_do_not_interleave(recorder_name, device):
    step, *_ = attending(recorder_name, device, modes="PIECEWISE")
    batches = [toys.batch(n, 2, seed=n) for n in range(2, 6)]
    cache = step.binding.containers[1]
    wanted = []
    for batch in batches:
        wanted.append(step(cache, batch)[0])
    wrong: list[Any] = []

    def work(k: int) -> None:
        for i in range(30):
            at = (i + k) % len(batches)
            got = step(cache, batches[at])[0]
            if not torch.equal(got, wanted[at]):
                wrong.append((k, i))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(3)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
