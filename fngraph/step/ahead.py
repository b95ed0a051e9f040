"""Keys captured ahead of the calls that need them: warmed first, then one after the other."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from fngraph.errors import CaptureError
from fngraph.graphs.memory import preserved
from fngraph.step import budget
from fngraph.step.book import Key
from fngraph.step.obtain import as_captured, failure, obtain, refuse
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
