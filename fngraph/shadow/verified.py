"""`VerifiedStep`: a share of its calls run a second time, through bare `forward`, and are compared.

A step that is not verified is `Step.__call__` behind one frame and one comparison; a step without
`verify=` is a plain `Step`, which knows nothing of this.

A verified one takes copies, before and after, and goes on; a thread runs `forward` on the first and
compares with the second (`verifying/aside.py`). There is one such thread at a time: the next
verified step waits for it, and so does all that changes what it reads or could end a capture by it:
rebind, sleep and wake, captures. It counts and says nothing; the next call does, or who reads
`stats`, in his thread. Where the answer is the call's own, it is waited for (`stays`).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from fngraph.core import Stats
from fngraph.core.dispatching import Allowed
from fngraph.core.where import users_level
from fngraph.errors import DifferenceError, TreeError
from fngraph.executable import Executable
from fngraph.fx.tracing.purity import is_tracing
from fngraph.fx.tracing.tried import said
from fngraph.options import Verify
from fngraph.shadow.difference import Difference
from fngraph.shadow.parts import Parts, parts_of
from fngraph.shadow.saved import is_bare, prepared_of, ran_of, save
from fngraph.shadow.verifying.aside import Aside
from fngraph.shadow.verifying.comparing import (
    Answer,
    Due,
    compared,
    compared_later,
    copied_with_state,
    stays,
    why_not,
    with_state,
)
from fngraph.shadow.verifying.moment import SWITCHED, WRITTEN, moment_of
from fngraph.shadow.verifying.share import verified_in
from fngraph.step.agreed import any_of
from fngraph.step.keys import Keys, Shared
from fngraph.step.step import R, Step, make_step
from fngraph.torch_facts.tracing import run_by_python


class VerifiedStep(Step[R]):
    """A `Step` that verifies a share of its calls; see `fg.Verify`.

    Attributes:
        verify: what was asked for.
    """

    def __init__(self, shared: Shared, executable: Executable, verify: Verify) -> None:
        self._aside: Aside[Answer] = Aside(shared.recorder.device)
        super().__init__(shared._replace(settle=self._aside.wait), executable)
        self.verify = verify
        self._calls = itertools.count(1)
        self._newest = 0  # of the calls that looked whether they are due
        self._window = 0
        self._due: float = verified_in(0, verify.share) if verify.share else math.inf
        self._look = self._due  # the call that looks: one that is due, or has to tell
        self._stays = False  # whether they are compared in the call
        self._parts: weakref.WeakKeyDictionary[Executable, Parts] = weakref.WeakKeyDictionary()
        self._kept: list[Difference] = []
        self._told: set[str] = set()  # what was warned of

    @run_by_python
    def __call__(self, /, *args: Any, allowed: Allowed = None, **kwargs: Any) -> R:
        """As `Step.__call__`.

        Raises:
            DifferenceError: bare `forward` came to something else, and on_difference="raise".
        """
        number = next(self._calls)
        if number < self._look:
            return Step.__call__(self, *args, allowed=allowed, **kwargs)
        with self._between_steps():
            if self._is_due(number):
                return self._verify(number, args, kwargs, allowed)
            return Step.__call__(self, *args, allowed=allowed, **kwargs)

    def _is_due(self, number: int) -> bool:
        """Whether it is this call's turn; then the next one's is found."""
        self._newest = max(self._newest, number)  # threads may come in another order
        if self._newest < self._due:  # it had but to tell, or another's call had the turn
            return False
        self._window += 1
        self._due = self._look = verified_in(self._window, self.verify.share)
        return True

    def _tell_refused(self, why: str) -> None:
        """And count it as the others do, for whom it may be the turn of the call."""
        with self.turn.lock:
            self._is_due(next(self._calls))
            Step._tell_refused(self, why)

    # what is read waits for what goes on

    @property
    def stats(self) -> Stats:
        """As `Step.stats`; a comparison that goes on is waited for, and counted."""
        self._settle()
        return super().stats

    @property
    def differences(self) -> Sequence[Difference]:
        """What was found, the first `keep` of it; a comparison that goes on is waited for."""
        self._settle()
        return tuple(self._kept)

    @property
    def parts(self) -> Parts:
        """What a verified step copies of the state, and what that costs; prints as a table."""
        return self._parts_of(self.last.keys)

    def _parts_of(self, keys: Keys) -> Parts:
        found = self._parts.get(keys.executable)
        if found is None:
            found = self._parts[keys.executable] = parts_of(keys.executable)
        return found

    @contextlib.contextmanager
    def _between_steps(self) -> Iterator[None]:
        with Step._between_steps(self):
            self._settle()
            yield

    def _settle(self) -> None:
        """Wait for the comparison that goes on, if one does, and tell what it has found."""
        # forward itself asks, in a trace or in a run, of whom there is one at a time: of this step
        # or of another, whose comparison may wait for just that
        if self._aside.is_here() or is_tracing() or is_bare():
            return
        with self.turn.lock:
            answers = self._aside.take()
            self._look = self._due
            for answer in answers:
                self._tell(answer)

    # one step

    def _verify(self, number: int, args: Any, kwargs: Any, allowed: Allowed) -> R:
        keys = keys_of_now(self)
        why, saved, decided = "", None, allowed
        try:
            values, decided = self.entry.given(args, kwargs, allowed)
            saved = save(keys, self._parts_of(keys), values[self.entry.staged_at])
        except Exception as error:  # the step itself may go on, or says so better
            why = f"the batch and its state could not be copied: {said(error)}"
        if any_of(keys.executable.peers, "verify a step", saved is None):
            saved, why = None, why or "another process could not copy its state"
        result = Step.__call__(self, *args, allowed=allowed, **kwargs)
        keys = self.last.keys
        if saved is not None:
            prepared = prepared_of(keys, saved, decided)
            why = why_not(keys, prepared)
            if not why:
                self._compare(Due(number, keys, prepared, saved, self.verify), result)
        if why:
            self._unverified(why)
        return result

    def _compare(self, due: Due, result: R) -> None:
        """Now, or beside the steps that follow."""
        keys, parts = due.keys, self._parts_of(due.keys)
        moment = None
        if not (self._stays or stays(keys, self.verify)):
            try:
                moment = moment_of(keys)
            except TreeError:
                pass  # as bare forward will say
        if moment is None:
            got = ran_of(keys, result)
            self._tell(compared(due, with_state(keys, parts, due.saved, got)))
            return
        try:
            got = copied_with_state(keys, parts, due.saved, ran_of(keys, result))
        except Exception as error:
            self._unverified(f"results and state could not be copied: {said(error)}")
            return
        me = weakref.ref(self)
        self._aside.begin(lambda: compared_later(due, got, moment), lambda one: has_ended(me, one))

    def _tell(self, answer: Answer) -> None:
        """Count what was found of a step, and say so."""
        number, keys, prepared, saved, _ = answer.due
        if answer.why:
            self._stays |= answer.why in (SWITCHED, WRITTEN)  # so it would be again
            self._unverified(answer.why)
            return
        stats = self.shared.stats
        stats.verified += 1
        peers = keys.executable.peers
        # what one finds, all keep
        if not any_of(peers, "compare a verified step", bool(answer.found)):
            return
        stats.differences += 1
        executable = weakref.ref(keys.executable)
        made = Difference(number, prepared.chosen, saved, tuple(answer.found), executable)
        text = made.as_text(getattr(keys.executable.args.signature.fn, "__name__", "forward"))
        if len(self._kept) < self.verify.keep:
            self._kept.append(made)
            text += f". fg.bisect(step, step.differences[{len(self._kept) - 1}]) says where"
        if self.verify.on_difference == "raise":
            raise DifferenceError(text, made)
        self._warn("a difference", text)

    def _unverified(self, why: str) -> None:
        told = self.shared.stats.unverified
        told[why] = told.get(why, 0) + 1
        self._warn(why, f"a step is not verified, whose turn it was: {why}")

    def _warn(self, kind: str, text: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            warnings.warn(text, stacklevel=users_level())


def has_ended(step: weakref.ref[VerifiedStep[Any]], answer: Answer) -> None:
    """Have the next call tell what a comparison has found, if that is worth a word."""
    found = step()
    if found is not None and (answer.why or answer.found):
        found._look = 0


def keys_of_now(step: Step[Any]) -> Keys:
    """The keys that serve the caller's ambient state (autocast, ...), as a call takes them."""
    if (ambient := step.last.read_ambient()) != step.last.ambient:
        step._switch_keys(ambient)
    return step.last.keys


def make_verified(verify: Verify, executable: Executable, values: Any, **options: Any) -> Step[Any]:
    """`make_step`, of a step that verifies a share of its calls."""
    return make_step(
        executable, values, make=lambda shared, made: VerifiedStep(shared, made, verify), **options
    )
