"""The keys of a step: captured ahead of time or when first dispatched to, released, captured again.

Every change of what is captured goes through here, so that what calls have looked up is forgotten.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fngraph.core import BatchDescriptor, BatchSpec, Dispatch, Mode
from fngraph.errors import CaptureError
from fngraph.graphs.memory import preserved
from fngraph.step import budget
from fngraph.step.book import Key
from fngraph.step.obtain import as_captured, failure, obtain, refuse
from fngraph.step.ready import Ready
from fngraph.step.warm import cold, run_padding, written

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def check_ready(step: Captured) -> None:
    """Raise unless keys can be captured now: awake, and with every leaf where it was bound, or
    the new graphs would read other memory than the old ones.

    Raises:
        SleepError, AddressError
    """
    step.book.check_awake()
    step.binding.check()


def missing(step: Captured) -> list[Key]:
    """Keys that are neither captured nor known to fail, largest first."""
    return [key for key in step.table if key not in step.replays and key not in step.book.failed]


def capture_all(step: Captured, progress: bool | str = False) -> None:
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
    check_ready(step)
    until = time.perf_counter() + budget_ms / 1000
    for key in missing(step):
        obtain(step, key)
        if key in step.replays and time.perf_counter() >= until:
            break
    return len(missing(step))


def capture_ahead(step: Captured, keys: Sequence[Key], progress: bool | str = False) -> None:
    """Capture these keys in order: one warm-up for each kind, then one session of the recorder."""
    check_ready(step)
    warm_ahead(step, [key for key in keys if budget.fits(step, key)])
    shown: Iterable[Key] = keys
    if progress:
        from fngraph.report.progress import track

        label = progress if isinstance(progress, str) else f"capturing on {step.recorder.name}"
        shown = track(list(keys), label)
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
                        refuse(step, key, failure(key, error))
        except CaptureError:  # no memory for the copies, as each key will find for itself
            if step.book.rules.on_failure == "raise":
                raise


def find_replay(step: Captured, ready: Ready, spec: BatchSpec) -> None:
    """The replay of what a batch was dispatched to, captured now if it is not yet.

    Where it cannot be, the batch is one of mode NONE from now on, and the reason is counted.
    """
    step.book.check_awake()
    mode, descriptor, _ = ready.chosen
    key = (mode, descriptor)
    replay = step.replays.get(key) or obtain(step, key, in_step=True)
    if replay is None:
        ready.chosen = refused(step, key, spec)
        return
    ready.replay, ready.calls = replay, replay.bind(ready.true)
    ready.free = mode is Mode.FULL and step.borrow


def refused(step: Captured, key: Key, spec: BatchSpec) -> Dispatch:
    """What a batch runs as whose key cannot be captured."""
    return Dispatch(Mode.NONE, spec.descriptor(), f"capture failed: {step.book.failed[key]}")


def check_key(step: Captured, descriptor: BatchDescriptor, subject: str = "") -> None:
    """Raise `KeyError` unless the table has this key."""
    if all(known != descriptor for _, known in step.table):
        raise KeyError(
            f"{subject or descriptor} is no key of {step.table!r}. Ask for the one that a batch "
            "runs as: step.dispatch(spec).descriptor"
        )


def release(step: Captured, descriptors: Sequence[BatchDescriptor]) -> list[Key]:
    """Free the graphs of these keys, or of all; those that were captured, or had failed."""
    for descriptor in descriptors:
        check_key(step, descriptor)
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
    """Release and capture again, where they were bound; a key that failed is tried again."""
    check_ready(step)
    keys = release(step, descriptors)
    named = [key for key in step.table if key[1] in descriptors]
    capture_ahead(step, named if descriptors else keys)
