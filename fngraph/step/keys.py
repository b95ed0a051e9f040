"""The verbs of a step's keys: look up, capture, release, recapture.

A step for another ambient state has keys of its own. What is captured ahead is of the state of now;
what is released, of all.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fngraph.core import BatchDescriptor, Mode
from fngraph.graphs.replay import Replay
from fngraph.step import budget
from fngraph.step.ahead import capture_ahead, check_ready, missing
from fngraph.step.ambient import family
from fngraph.step.book import Key
from fngraph.step.obtain import obtain

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def captured_replay(step: Captured, descriptor: BatchDescriptor) -> Replay:
    """The replay of a captured key.

    Raises:
        KeyError: it is not captured, or no key of the table.
    """
    for mode in (Mode.FULL, Mode.PIECEWISE):
        if (mode, descriptor) in step.replays:
            return step.replays[mode, descriptor]
    distance = lambda d: abs(d.num_tokens - descriptor.num_tokens)  # noqa: E731
    near = sorted((d for _, d in step.replays), key=distance)[:3]
    text = f"{descriptor} is not captured; the nearest that are: {near or 'none'}"
    check_key(step, descriptor, f"{text}. It")
    fix = "wake()" if step.book.asleep else f"recapture({descriptor})"
    raise KeyError(f"{text}. Capture it: step.{fix}")


def capture_all(step: Captured, progress: bool | str = False) -> None:
    """Capture every key of the table that is not yet, largest first, as far as the memory
    budget goes.

    Raises:
        CaptureError: what was captured before stays.
        SleepError: while it sleeps. AddressError: a bound leaf has moved.
    """
    with step.recorder.turn.taken():
        now = step.under_ambient()
        capture_ahead(now, missing(now), progress)


def capture_some(step: Captured, budget_ms: float) -> int:
    """Capture missing keys between two steps, largest first, until `budget_ms` milliseconds
    are used, but at least one; returns how many keys are missing still.

    Raises:
        CaptureError, SleepError, AddressError: as `capture_all`.
    """
    with step.recorder.turn.taken():
        now = step.under_ambient()
        check_ready(now)
        until = time.perf_counter() + budget_ms / 1000
        for key in missing(now):
            obtain(now, key)
            if key in now.replays and time.perf_counter() >= until:
                break
        return len(missing(now))


def release(step: Captured, /, *descriptors: BatchDescriptor) -> None:
    """Free the graphs of these keys (none: of all), once the device has done with them.

    A released key that is dispatched to is captured again, and counted in `stats.captures`.
    The pool keeps its memory while another key has a graph in it; with all of them it goes.

    Raises:
        KeyError: no key of the table.
    """
    with step.recorder.turn.taken():
        for one in family(step):
            _release(one, descriptors)


def recapture(step: Captured, /, *descriptors: BatchDescriptor) -> None:
    """Release these keys (none: all that are captured or failed) and capture them again.

    Raises:
        KeyError: no key of the table. CaptureError, SleepError, AddressError: as `capture_all`.
    """
    with step.recorder.turn.taken():
        now = step.under_ambient()
        for one in family(now):
            if one is not now:
                _release(one, descriptors)
        check_ready(now)
        keys = _release(now, descriptors)
        named = [key for key in now.table if key[1] in descriptors]
        capture_ahead(now, named if descriptors else keys)


def _release(step: Captured, descriptors: Sequence[BatchDescriptor]) -> list[Key]:
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


def check_key(step: Captured, descriptor: BatchDescriptor, subject: str = "") -> None:
    """Raise `KeyError` unless the table has this key."""
    if all(known != descriptor for _, known in step.table):
        raise KeyError(
            f"{subject or descriptor} is no key of {step.table!r}. Ask for the one that a batch "
            "runs as: step.dispatch(spec).descriptor"
        )
