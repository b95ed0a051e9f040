"""Long runs leave memory flat: replays of all keys in random order, captures and releases."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
import steps
import toys

import fngraph as fg
from fngraph.core import BatchDescriptor

LIMITS = fg.Limits(max_tokens=20, max_reqs=4, B=toys.B)
MODES = {"FULL", "PIECEWISE", "NONE"}


def batches(device: Any) -> list[toys.Batch]:
    """For every key, and beyond the ladder (NONE); on the host and on the device."""
    likes = [toys.decode(n, past=past, seed=n) for n in range(1, 5) for past in (0, 5)]
    likes += [toys.batch(n, 2, seed=n) for n in range(1, 9)]
    likes += [
        *(toys.batch(n, seed=n) for n in (1, 2)),
        *(toys.batch(9, n, seed=n) for n in (1, 3, 7)),
    ]
    likes += [toys.batch(9, 5, n, seed=n) for n in (3, 5)]
    return [*likes, *(toys.on(like, device) for like in likes)]


def run(made: steps.Made, likes: list[toys.Batch], times: int, seed: int) -> None:
    """So many steps of random batches, one in three of them filled in a host batch."""
    draw = random.Random(seed)
    for _ in range(times):
        batch = draw.choice(likes)
        if draw.random() < 0.33:
            like = likes[likes.index(batch) % (len(likes) // 2)]  # on the host
            batch = toys.fill(made.step.host_batch(like.spec), like)
        made.step(made.state, batch)


def check_all(made: steps.Made, likes: list[toys.Batch], times: int) -> None:
    """Every mode and key ran, and each batch still gives what bare `forward` gives."""
    assert made.step.stats.steps >= times
    assert all(made.step.stats.share(name) > 0.05 for name in MODES)
    used = {made.step.dispatch(like.spec)[:2] for like in likes}
    assert set(made.step.table) <= used
    for like in likes:
        made.check(like)


@pytest.mark.gpu
def test_twenty_thousand_replays_leave_memory_flat(held):
    made = steps.make("cuda", "cuda", limits=LIMITS, lazy=False)
    likes = batches("cuda")
    run(made, likes, 1000, seed=1)
    before = held()
    assert before.graphs >= len(made.step)
    for part in range(20):
        run(made, likes, 1000, seed=2 + part)
        held().check_flat(before, slack=2 << 20)  # a segment of the allocator's
    check_all(made, likes, 21_000)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["FULL", "PIECEWISE"])
def test_cycles_over_all_keys_leave_memory_flat(mode: str, held):
    """Beside the 2,000 of one key in tests/step/test_keys.py: the pool is given back and taken."""
    made = steps.make("cuda", "cuda", modes=mode, limits=LIMITS)
    likes = batches("cuda")

    def cycle(times: int) -> Any:
        for i in range(times):
            made.step.release()
            made.step.capture_all()
            made.step(made.state, likes[i % len(likes)])
        return held()

    before = cycle(20)
    assert before.graphs >= len(made.step)
    cycle(200).check_flat(before)
    made.check(likes[0])


ONCE = 100_000  # bytes by which a dict of some 2,000 entries grows


@pytest.fixture
def flat() -> Iterator[Any]:
    """Calls a function twice to settle, then twice without more Python memory or objects.

    A test starts tracemalloc before anything is captured: what replaces an object that was not
    seen being made would count as more.
    """

    def check(fn: Any, slack: int) -> None:
        for _ in range(2):
            fn()
        gc.collect()
        objects, (first, _) = len(gc.get_objects()), tracemalloc.get_traced_memory()
        before = first
        for _ in range(3):  # an older dict may grow, say that of all finalizers, but once
            for _ in range(2):
                fn()
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
            if after - before <= slack and after - first <= slack + ONCE:
                break
            before = after
        else:
            raise AssertionError(f"{after - first} bytes more, {after - before} at the end")
        assert len(gc.get_objects()) - objects <= 20

    yield check
    tracemalloc.stop()


@pytest.mark.sampled(0)
def test_replays_leave_python_memory_flat(flat):
    made, likes = steps.make("tape", "cpu", limits=LIMITS), batches("cpu")
    tracemalloc.start()
    made.step.capture_all()
    for like in likes * 8:  # what is kept for each batch and slot of the ring
        made.step(made.state, toys.fill(made.step.host_batch(like.spec), like))
    flat(lambda: run(made, likes, 60, seed=1), slack=8 << 10)
    tracemalloc.stop()
    check_all(made, likes, 300)


@pytest.mark.sampled(0)
def test_cycles_leave_python_memory_flat(flat):
    made = steps.make("tape", "cpu", limits=LIMITS, sizes=(8,))
    key, like = BatchDescriptor(8), toys.batch(3, 2)
    tracemalloc.start()

    def cycles() -> None:
        for i in range(25):
            made.step.recapture(key)
            if i % 5 == 0:
                made.step.release()
                assert not made.keys
            made.step(made.state, like)

    flat(cycles, slack=32 << 10)
    assert made.keys and made.step.stats.captures[toys.PIECEWISE, key, False].times >= 50
    made.check(like)
