"""Processes that meet in a step's collectives capture the same keys at once, and run the same ones.

A step whose graph has collectives says what it is about to do to all that its graph speaks to, and
does it if they all are: some 64 bytes an axis, before anything is launched. What was decided before
(`allowed=` a `Dispatch`, as of `fg.core.settle` or a plan that was broadcast) is compared as well:
one who was told another plan, or has another table, would wait where nobody comes. But it may be
for batches of different counts, which one key holds. A step without collectives asks nobody.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

from fngraph.core import BatchSpec, Dispatch, Mode
from fngraph.core.spec import NO_BOUNDS, Key
from fngraph.core.text import count
from fngraph.errors import CaptureError, RankError
from fngraph.ranks.agreement import IN_TURN, RAISED, Peers, Told, meet, tell_all
from fngraph.ranks.faults import say_failed
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared


def before_step(keys: Keys, prepared: Prepared, spec: BatchSpec, decided: bool) -> None:
    """Go on if all are about to run the same key on as many tokens and requests.

    Where some have captured it and some have not, all do so now, since its collectives run then.

    Args:
        decided: a `Dispatch` was given, so that each may have tokens of its own in the key.

    Raises:
        RankError: they are not, or one cannot go on: on every process. One of them is gone.
    """
    peers, chosen = keys.executable.peers, prepared.chosen
    if peers is None:
        return
    say = _step(keys, peers, chosen, spec, decided)
    number = prepared.numbers.get(decided)
    if number is None:
        number = prepared.numbers[decided] = peers.number(say())
    key = chosen.key
    has = FAILED if key in keys.failed else MISSING
    if chosen.mode is Mode.NONE or key in keys.replays:
        has = READY
    flags = meet(peers, f"run a step as {_named(key)}", number, has,
                 lambda: {**peers.told, **say()})  # fmt: skip
    if flags == [READY] or chosen.mode is Mode.NONE:
        return
    if has == READY:
        keys.free([key])
        prepared.replay = None
    if FAILED in flags:  # who tries again does so with all others
        keys.failed.setdefault(key, "it has failed in another process. Call recapture() in all")


MISSING, READY, FAILED = range(3)
"""Of the key that a step runs as, in a process."""


def _step(
    keys: Keys, peers: Peers, chosen: Dispatch, spec: BatchSpec, decided: bool
) -> Callable[[], dict[str, str]]:
    padded = chosen.mode is not Mode.NONE  # to the key's size, as which collectives see rows

    def say() -> dict[str, str]:
        ran = _named(chosen.key) if padded or peers.counts else str(chosen.mode)
        own = spec._replace(host=NO_BOUNDS)  # each process has bounds of its own
        counts = {"the batch": str(own)} if peers.counts and not (decided and padded) else {}
        rebound = count(keys.shared.binding.rebound, "time")
        return {"what is done": "a step", "the key that runs": ran, **counts,
                "how often held leaves were rebound": rebound}  # fmt: skip

    return say


def failed_step(keys: Keys, prepared: Prepared | None, error: Exception, met: bool) -> None:
    """Tell the others that this process does not go on; of an error that came from them, say where.

    Args:
        met: whether they have agreed on the step before.
    """
    peers = keys.executable.peers
    if peers is None:
        return
    if isinstance(error, RankError):
        where = f"the step that runs as {_named(prepared.chosen.key)}" if prepared else "a step"
        _say_where(peers, error, where)
    elif met:
        say_failed(error)
    else:
        tell_refused(peers, as_told(error))


def tell_refused(peers: Peers | None, why: str) -> None:
    """Come to the agreement on a step that this process does not take, so that nobody does.

    Args:
        why: the error that it has raised.
    """
    if peers is not None:
        with contextlib.suppress(RankError):  # they get one
            meet(peers, "run a step", 0, 0, lambda: {RAISED: why}, trouble=True)


@contextlib.contextmanager
def refusing(keys: Keys, meets: bool = True) -> Iterator[None]:
    """A context ahead of an agreement, in which a process may find that it does not come to it: the
    others are told there.

    Args:
        meets: whether there is one to come.
    """
    try:
        yield
    except Exception as error:
        if meets:
            tell_refused(keys.executable.peers, as_told(error))
        raise


def before_capture(keys: Keys, wanted: Sequence[Key]) -> None:
    """Go on if all are about to capture these keys.

    Raises:
        RankError: as `before_step`.
    """
    peers = keys.executable.peers
    if peers is None or not wanted:
        return
    keyed = ", ".join(map(_named, wanted))
    rules, recorder = keys.shared.rules, keys.shared.recorder.name
    say = {"what is done": "captures", "the keys to capture": keyed, "recorder": recorder,
           "on_failure": rules.on_failure}  # fmt: skip
    _meet(peers, f"capture {count(len(wanted), 'key')}", say)


def before_times(keys: Keys, key: Key, repeats: int) -> None:
    """Go on if all are about to run this key so often.

    Raises:
        RankError: as `before_step`.
    """
    peers = keys.executable.peers
    if peers is None:
        return
    what = f"measure {_named(key)}"
    _meet(peers, what, {"what is done": what, "repeats": str(repeats)})


def after_capture(keys: Keys, key: Key, failure: CaptureError | None) -> CaptureError | None:
    """Why the key cannot be captured or warmed, here or in another process: then nobody keeps it.

    Raises:
        RankError: it failed in another process alone, and `on_failure="raise"`.
    """
    named = _named(key)
    found = _failure_of_any(keys, f"keep {named}, which was captured", failure)
    if found is None or found is failure:
        return found
    keys.free([key])
    keys.warm = {of: one for of, one in keys.warm.items() if one != key}
    return _elsewhere(keys, f"{named} cannot be captured", named, found)


def after_warming(keys: Keys, what: str, failure: CaptureError | None) -> CaptureError | None:
    """Why something that comes before captures has failed, here or in another process: one that
    went on by itself would come to other collectives than the others.

    Args:
        what: it was: "BatchSpec(...) without a graph".

    Raises:
        RankError: as `after_capture`.
    """
    found = _failure_of_any(keys, f"go on after {what}", failure)
    if found is None or found is failure:
        return found
    return _elsewhere(keys, f"{what} cannot be run", what, found)


def _failure_of_any(keys: Keys, what: str, failure: CaptureError | None) -> CaptureError | None:
    """The failure of this process, or those of others in one; None: nobody has any."""
    peers = keys.executable.peers
    if peers is None:
        return failure
    if 0 not in _meet(peers, what, {"what is done": what}, failure is None):
        return None
    told = tell_all(peers, what, _raised(failure) if failure else {})
    each = (f"rank {rank}: {one[RAISED]}" for rank, one in told.items() if one)
    return failure or CaptureError("; ".join(each))


def _elsewhere(keys: Keys, what: str, named: str, failure: CaptureError) -> CaptureError:
    """A failure of other processes, as one of this one; raised by `on_failure="raise"`."""
    if keys.shared.rules.on_failure == "raise":
        raise RankError(f"{what} by every process, so none keeps it: {failure}")
    return CaptureError(f"{named}: {failure}")


def any_of(peers: Peers | None, what: str, here: bool) -> bool:
    """Whether it is so in this process, or in any that its collectives meet.

    Args:
        what: all are about to do: "capture some keys".
    """
    return here if peers is None else 1 in _meet(peers, what, {"what is done": what}, here)


def _meet(peers: Peers, what: str, say: Told, flag: int = 0) -> list[int]:
    """`meet`, of what is said here and what stays as it is."""
    return meet(peers, what, peers.number(say), flag, lambda: {**peers.told, **say})


@contextlib.contextmanager
def telling(keys: Keys, what: str) -> Iterator[None]:
    """A context whose errors the others are told of, should they wait; theirs are said where."""
    peers = keys.executable.peers
    try:
        with contextlib.nullcontext() if peers is None else IN_TURN:
            yield
    except RankError as error:
        if peers is not None:
            _say_where(peers, error, what)
        raise
    except Exception as error:
        if peers is not None:
            say_failed(error)
        raise


def _say_where(peers: Peers, error: RankError, where: str) -> None:
    """Add it to the error, once."""
    if error.at is None:
        return
    (op, axis), error.at = error.at, None
    lines = peers.lines(op, axis)
    called = f"; {op} over {axis!r} is called at {', '.join(lines)}" if lines else ""
    error.args = (f"{error}. In {where}{called}",)


def _raised(error: Exception) -> Mapping[str, str]:
    return {RAISED: as_told(error)}


def as_told(error: Exception) -> str:
    """An error, as others are told of it."""
    return f"{type(error).__name__}: {error}"


def _named(key: Key) -> str:
    return f"{key[0]} {key[1]}"
