"""What becomes of a process that waits for another one which is gone: an error that says which.

Gloo raises when a connection breaks, which is at once, and when its timeout is over; NCCL's own
watchdog likewise. Who it was they do not say. So whoever is left says so in the store that the
processes have met in, waits a moment for the others to do the same, and names those that do not.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from fngraph.errors import RankError
from fngraph.torch_facts.names import default_store, resolve_group

ROLL_CALL_S = 3.0
"""How long those who are left wait for one another, to tell who is not."""


def group_of(name: str, axis: str) -> Any:
    """The process group of an axis.

    Raises:
        RankError: it has been destroyed, or is of another process.
    """
    try:
        return resolve_group(name)
    except RuntimeError:
        raise RankError(
            f"axis {axis!r} has no processes: its group {name!r} is not there. It was destroyed, "
            "or made by another process. Make the mesh again, and trace with its axes: "
            f"fg.make_mesh({axis}=...)"
        ) from None


@contextlib.contextmanager
def failing_as(what: str, axis: str, group: str) -> Iterator[Any]:
    """A context in which what torch raises of the axis's processes is a `RankError`; their group.

    Args:
        what: what is done: "all_gather".
    """
    found, came = group_of(group, axis), time.time()
    try:
        yield found
    except RuntimeError as error:
        ranks = dist.get_process_group_ranks(found)
        raise RankError(
            f"{what} over axis {axis!r}, of ranks {ranks}, failed on rank {dist.get_rank()}: "
            f"{_who(ranks, came)}. ({first_words(error)})",
            at=(what, axis),
        ) from error


def first_words(error: BaseException) -> str:
    """Of what torch says: the first sentence, without the place in its own source."""
    line = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[\S*\] *", "", line).partition(". ")[0]


def say_failed(error: BaseException) -> None:
    """Tell those who will look for this process why it does not go on with them."""
    with contextlib.suppress(Exception):  # the store is gone with whoever kept it
        default_store().set(_key(dist.get_rank()), f"{_RAISED}{type(error).__name__}: {error}")
        _SAID.set()


def unsay() -> None:
    """Take back what `say_failed` has told, if anything: this process goes on after all."""
    if _SAID.is_set():
        _SAID.clear()
        with contextlib.suppress(Exception):
            default_store().delete_key(_key(dist.get_rank()))


_SAID = threading.Event()
"""Whether this process's word is in the store, whichever of its programs has failed."""


_RAISED, _FOUND, _CAME = "raised ", "found that ", "came "
"""What a process says of itself, and of others; or when it came, in seconds since the epoch."""
_LATE_S = 0.1


def _key(rank: int) -> str:
    return f"fngraph/failed/{rank}"


def _who(ranks: Sequence[int], came: float) -> str:
    """Which of these processes are gone, have raised something, or came last.

    Args:
        came: when this one did.
    """
    own = dist.get_rank()
    others = [rank for rank in ranks if rank != own]
    try:
        store = default_store()
        if not store.check([_key(own)]):  # what it was the first time is said
            store.set(_key(own), f"{_CAME}{came}")
        until = time.monotonic() + ROLL_CALL_S
        told = _roll(store, others)
        while time.monotonic() < until and not all(
            rank in told and not told[rank].startswith(_CAME) for rank in others
        ):  # who only came may know more in a moment
            time.sleep(0.05)
            told = _roll(store, others)
        who = _told(told, others, came)
        if not told.keys() >= set(others) and store.get(_key(own)).decode().startswith(_CAME):
            store.set(_key(own), f"{_FOUND}{who}")
    except Exception as error:  # of any class, as the store is anything
        return f"which process is gone cannot be known, as their store is gone too ({error})"
    return who


def _roll(store: Any, others: Sequence[int]) -> dict[int, str]:
    """What others have said."""
    return {r: store.get(_key(r)).decode() for r in others if store.check([_key(r)])}


def _told(told: Mapping[int, str], others: Sequence[int], came: float) -> str:
    """What to make of it."""
    known = [f"rank {r} {text}" for r, text in told.items() if not text.startswith(_CAME)]
    gone = [rank for rank in others if rank not in told]
    if gone:
        some = f"rank {gone[0]} is" if len(gone) == 1 else f"ranks {gone} are"
        known.append(f"{some} gone, or did not come in time")
    if known:
        return "; ".join(known)
    late = {r: float(text.removeprefix(_CAME)) - came for r, text in told.items()}
    last = max(late, key=lambda rank: late[rank])
    if late[last] > _LATE_S:
        return f"rank {last} came {late[last]:.1f} s after this one, by its clock"
    return "all are there, and another one came late, or it has failed in all"
