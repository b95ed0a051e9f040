"""One key captured: warmed if its kernels are cold, measured, kept to the budget; or refused."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fngraph.core import BatchDescriptor, BatchSpec, Dispatch, Mode
from fngraph.core.memory import Bytes
from fngraph.errors import CaptureError
from fngraph.fx.generators import preserved as undrawn
from fngraph.graphs.inside import key_name
from fngraph.graphs.memory import preserved
from fngraph.graphs.ranges import named_range
from fngraph.graphs.recorder import describe
from fngraph.graphs.replay import Replay, capture
from fngraph.step import budget
from fngraph.step.ambient import fixed_ambient
from fngraph.step.book import Key
from fngraph.step.prepared import Prepared
from fngraph.step.warm import cold, operands, run_padding, written

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def find_replay(step: Captured, prepared: Prepared, spec: BatchSpec) -> None:
    """The replay of what a batch was dispatched to, captured now if it is not yet.

    Where it cannot be, the batch is one of mode NONE from now on, and the reason is counted.
    """
    step.book.check_awake()
    mode, descriptor, _ = prepared.chosen
    key = (mode, descriptor)
    replay = step.replays.get(key) or obtain(step, key, in_step=True)
    if replay is None:
        prepared.chosen = refused(step, key, spec)
        return
    prepared.replay, prepared.calls = replay, replay.bind(prepared.true)
    prepared.ignores_grad_mode = mode is Mode.FULL and step.borrow


def refused(step: Captured, key: Key, spec: BatchSpec) -> Dispatch:
    """What a batch runs as whose key cannot be captured."""
    return Dispatch(Mode.NONE, spec.descriptor(), f"capture failed: {step.book.failed[key]}")


def obtain(step: Captured, key: Key, *, in_step: bool = False) -> Replay | None:
    """Capture a key; None where it fails and is served eagerly, or where no memory is left for it.

    Args:
        in_step: whether it is needed now, so that others are evicted for it.
    """
    if key in step.book.failed:
        return None
    began = time.perf_counter_ns()
    try:
        for _ in range(2):  # a second time in a new pool, where the old one was too large
            if not budget.make_room(step, key, evict=in_step):
                return None
            replay = capture_key(step, *key)
            if budget.settle(step, key, evict=in_step):
                break
            if not in_step:
                return None
    except CaptureError as error:
        refuse(step, key, error)
        return None
    us = (time.perf_counter_ns() - began) // 1000
    step.stats.observe_capture(*key, us, in_step)
    return replay


def capture_key(step: Captured, mode: Mode, descriptor: BatchDescriptor) -> Replay:
    """Capture one key on an all-padding batch, whose writes go to null slots.

    Raises:
        CaptureError: naming the key; pool and donated state are as they were.
    """
    key, book, recorder = (mode, descriptor), step.book, step.recorder
    watched = all(m is not mode for m, _ in step.replays)  # the first key of its mode
    named = named_range(f"capture {key_name(mode, descriptor)}")
    with as_captured(step), named:
        try:
            if cold(step, [key]):
                with preserved(written(step)):
                    run_padding(step, key)
            hoped = key not in book.warm.values()  # another of its kind has run, which mostly does
            with recorder.recording():
                before = recorder.usage()
                try:
                    replay = _record(step, mode, descriptor, watched)
                except CaptureError:
                    if not (hoped and recorder.lazy_kernels):
                        raise
                    with preserved(written(step)):
                        run_padding(step, key)
                    replay = _record(step, mode, descriptor, watched=True)
                finally:
                    after = recorder.usage()
                    grown = max(after.pool - before.pool, 0)
                    book.pool += grown
        except Exception as error:  # whatever a backend or an op raises
            raise failure(key, error) from error
    estimate = step.compiled.lowered.estimate
    graphs = after.graphs_since(before, lambda: estimate(*key).graph)
    book.measured[key] = Bytes(grown, graphs)
    step.replays[key] = replay
    return replay


@contextlib.contextmanager
def as_captured(step: Captured) -> Iterator[None]:
    """The state of torch that keys are run and captured under; nothing is drawn from generators."""
    generators = step.compiled.lowered.split.traced.options.generators
    with fixed_ambient(step), undrawn(generators):
        yield


def _record(step: Captured, mode: Mode, descriptor: BatchDescriptor, watched: bool) -> Replay:
    generators = step.compiled.lowered.split.traced.options.generators
    sizes, host, inputs, first = operands(step, (mode, descriptor))
    program, compiled = step.compiled.lowered.split.program, step.compiled
    return capture(
        step.recorder, program, compiled.fns, compiled.rows, inputs, mode, descriptor,
        sizes, host, tuple(step.cut(step.outputs, sizes)), first, generators, watched,
    )  # fmt: skip


def failure(key: Key, error: Exception) -> CaptureError:
    """`error` as the key's."""
    made = CaptureError(f"{_named(key)}{describe(error)}")
    made.__cause__ = error
    return made


def refuse(step: Captured, key: Key, error: CaptureError) -> None:
    """Raise `error`, or keep it as the reason why the key is served eagerly.

    Raises:
        CaptureError: by `on_failure="raise"`.
    """
    if step.book.rules.on_failure == "raise":
        raise error
    step.book.failed[key] = _why(key, error)


def _why(key: Key, error: Any) -> str:
    return str(error).removeprefix(_named(key))


def _named(key: Key) -> str:
    return f"{key[0]} {key[1]}: "
