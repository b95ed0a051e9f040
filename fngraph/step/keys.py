"""The keys of a step: captured ahead of time or when first dispatched to, released, captured again.

Every change of what is captured goes through here, so that what calls have looked up is forgotten.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from fngraph.core import BatchDescriptor, BatchSpec, Dispatch, Mode
from fngraph.core.memory import Bytes
from fngraph.errors import CaptureError
from fngraph.fx.generators import preserved as undrawn
from fngraph.graphs.capture import Replay, capture
from fngraph.graphs.inside import key_name
from fngraph.graphs.memory import preserved
from fngraph.graphs.ranges import named_range
from fngraph.graphs.recorder import current, describe
from fngraph.step import budget
from fngraph.step.book import Key
from fngraph.step.ready import Ready
from fngraph.step.warm import cold, given, run_padding, written

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def missing(step: Captured) -> list[Key]:
    """Keys that are neither captured nor known to fail, largest first."""
    return [key for key in step.table if key not in step.replays and key not in step.book.failed]


def capture_all(step: Captured, progress: bool = False) -> None:
    """Capture every key of the table that is not yet, largest first, as far as the budget goes.

    Raises:
        CaptureError: what was captured before stays.
    """
    capture_ahead(step, missing(step), progress)


def capture_some(step: Captured, budget_ms: float) -> int:
    """Capture missing keys, largest first, until the time is used; at least one that fits.

    Returns:
        How many keys are missing still.
    """
    step.book.check_awake()
    until = time.perf_counter() + budget_ms / 1000
    for key in missing(step):
        obtain(step, key)
        if key in step.replays and time.perf_counter() >= until:
            break
    return len(missing(step))


def capture_ahead(step: Captured, keys: Sequence[Key], progress: bool = False) -> None:
    """Capture these keys in order: one warm-up for each kind, then one session of the recorder."""
    step.book.check_awake()
    warm_ahead(step, [key for key in keys if budget.fits(step, key)])
    shown: Iterable[Key] = keys
    if progress:
        from fngraph.report.progress import track

        shown = track(list(keys), f"capturing on {step.recorder.name}")
    with step.recorder.recording():
        for key in shown:
            obtain(step, key)


def warm_ahead(step: Captured, keys: list[Key]) -> None:
    """Warm one key of each kind that is cold, saving donated leaves once for all of them."""
    firsts = cold(step, keys)
    if not firsts:
        return
    with as_captured(step):
        try:
            with preserved(written(step)):
                for key in firsts:
                    try:
                        run_padding(step, key)
                    except Exception as error:
                        _refuse(step, key, _failure(key, error))
        except CaptureError:  # no memory for the copies, as each key will find for itself
            if step.book.rules.on_failure == "raise":
                raise


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
        _refuse(step, key, error)
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
            raise _failure(key, error) from error
    book.measured[key] = Bytes(grown, max(after.other - before.other, 0))
    step.replays[key] = replay
    return replay


@contextlib.contextmanager
def as_captured(step: Captured) -> Iterator[None]:
    """The state of torch that keys are run and captured under; nothing is drawn from generators."""
    generators = step.compiled.lowered.split.traced.options.generators
    with current(step.recorder.device), step.fixed_ambient(), undrawn(generators):
        yield


def _record(step: Captured, mode: Mode, descriptor: BatchDescriptor, watched: bool) -> Replay:
    generators = step.compiled.lowered.split.traced.options.generators
    sizes, host, inputs, first = given(step, descriptor)
    program, compiled = step.compiled.lowered.split.program, step.compiled
    return capture(
        step.recorder, program, compiled.fns, compiled.rows, inputs, mode, descriptor,
        sizes, host, tuple(step.cut(step.outputs, sizes)), first, generators, watched,
    )  # fmt: skip


def find_replay(step: Captured, ready: Ready, spec: BatchSpec) -> None:
    """The replay of what a batch was dispatched to, captured now if it is not yet.

    Where it cannot be, the batch is one of mode NONE from now on, and the reason is counted.
    """
    step.book.check_awake()
    mode, descriptor, _ = ready.chosen
    key = (mode, descriptor)
    replay = step.replays.get(key) or obtain(step, key, in_step=True)
    if replay is None:
        reason = f"capture failed: {step.book.failed[key]}"
        ready.chosen = Dispatch(Mode.NONE, spec.descriptor(), reason)
        return
    ready.replay, ready.calls = replay, replay.bind(ready.true)
    ready.free = mode is Mode.FULL and step.borrow


def release(step: Captured, descriptors: Sequence[BatchDescriptor]) -> list[Key]:
    """Free the graphs of these keys, or of all; those that were captured, or had failed."""
    known = {descriptor for _, descriptor in step.table}
    for descriptor in descriptors:
        if descriptor not in known:
            raise KeyError(f"{descriptor} is no key of {step.table!r}")
    wanted = [key for key in step.table if not descriptors or key[1] in descriptors]
    found = [key for key in wanted if key in step.replays or key in step.book.failed]
    for key in found:
        step.book.failed.pop(key, None)
    if descriptors:
        budget.free(step, found)
    else:
        budget.begin_again(step)
    return found


def recapture(step: Captured, descriptors: Sequence[BatchDescriptor]) -> None:
    """Release and capture again, at the addresses of now; a key that failed is tried again."""
    step.book.check_awake()
    keys = release(step, descriptors)
    named = [key for key in step.table if key[1] in descriptors]
    capture_ahead(step, named if descriptors else keys)


def _failure(key: Key, error: Exception) -> CaptureError:
    made = CaptureError(f"{_named(key)}{describe(error)}")
    made.__cause__ = error
    return made


def _refuse(step: Captured, key: Key, error: CaptureError) -> None:
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
