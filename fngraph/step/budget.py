"""Memory of keys: how much each takes, and which go when a budget is used up.

Releasing a key frees its graphs at once. Its pool's memory stays with the pool, for the keys that
share it, and comes back to the device only when the pool has no graph left; so where the pool
itself is over the budget, all keys are released and a new pool is begun.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fngraph.core.memory import Bytes, KeyMemory, MemoryTable
from fngraph.errors import CaptureError
from fngraph.step.book import Key
from fngraph.step.prepared import forget

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def memory(step: Captured) -> MemoryTable:
    """Every key of the table with its memory."""
    rows = []
    for key in step.table:
        replay = step.replays.get(key)
        used = None if replay is None else replay.used
        rows.append(KeyMemory(*key, _estimate(step, key), step.book.measured.get(key), used))
    return MemoryTable(tuple(rows), step.book.pool, step.book.rules.memory_budget)


def fits(step: Captured, key: Key) -> bool:
    """Whether the budget seems to have room for one key more."""
    limit = step.book.rules.memory_budget
    return limit is None or step.book.total + _needed(step, key) <= limit


def make_room(step: Captured, key: Key, *, evict: bool) -> bool:
    """Make room for a key that is about to be captured; False: there is none, nothing is evicted.

    Raises:
        CaptureError: the budget cannot hold the key even alone.
    """
    limit = step.book.rules.memory_budget
    if limit is None:
        return True
    alone = _estimate(step, key)
    if sum(alone) > limit:
        raise CaptureError(
            f"memory_budget={limit} bytes cannot hold this key: its graphs will take about "
            f"{alone.graph} and its intermediates {alone.pool}. Give more, or capture smaller sizes"
        )
    if not evict:
        return fits(step, key)
    if max(step.book.pool, alone.pool) + alone.graph > limit:
        begin_again(step)
    while not fits(step, key) and step.replays:
        _evict(step)
    return True


def settle(step: Captured, key: Key, *, evict: bool) -> bool:
    """Keep to the budget by what was measured; False: the key itself had to go with the others.

    Raises:
        CaptureError: the key alone takes more than the budget.
    """
    limit, book = step.book.rules.memory_budget, step.book
    if limit is None or book.total <= limit:
        return True
    while evict and book.total > limit and len(step.replays) > 1:
        _evict(step, but=key)
    if book.total <= limit:
        return True
    taken = book.measured[key]
    alone = len(step.replays) == 1 and book.pool == taken.pool
    if alone or evict or book.pool > limit:
        begin_again(step)
    else:
        free(step, [key])
    if not alone:
        return False
    raise CaptureError(
        f"memory_budget={limit} bytes cannot hold this key: its graphs took {taken.graph} "
        f"and the pool {taken.pool} more. Give more, or capture smaller sizes"
    )


def begin_again(step: Captured) -> None:
    """Release every key and begin a new pool; keys are captured again as they are needed."""
    free(step, list(step.replays))
    step.recorder.renew()
    step.book.pool = 0


def free(step: Captured, keys: Iterable[Key]) -> None:
    """Forget the replays of these keys, once the device has done with them."""
    going = [key for key in keys if key in step.replays]
    forget(step)
    if not going:
        return
    step.recorder.synchronize()
    for key in going:
        del step.replays[key]
        step.book.measured.pop(key, None)


def _evict(step: Captured, but: Key | None = None) -> None:
    """Release the key that was used least recently."""
    others = (key for key in step.replays if key != but)
    free(step, [min(others, key=lambda key: step.replays[key].used)])


def _needed(step: Captured, key: Key) -> int:
    """Bytes that a key will take beyond what is taken."""
    alone = _estimate(step, key)
    return max(alone.pool - step.book.pool, 0) + alone.graph


def _estimate(step: Captured, key: Key) -> Bytes:
    return step.compiled.lowered.estimate(*key)
