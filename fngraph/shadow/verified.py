"""`VerifiedStep`: a share of its calls run a second time, through bare `forward`, and are compared.

A step that is not verified is `Step.__call__` behind one frame and one comparison; a step without
`verify=` is a plain `Step`, which knows nothing of this.
"""

from __future__ import annotations

import itertools
import math
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fngraph.calls import PrimitiveCall
from fngraph.core import Mode
from fngraph.core.dispatching import Allowed
from fngraph.errors import DifferenceError
from fngraph.executable import Executable
from fngraph.fx.rows.boxes import Boxes, elements
from fngraph.fx.tracing.tried import said
from fngraph.options import Verify
from fngraph.ranks.faults import say_failed
from fngraph.shadow.compared import Compared, compare
from fngraph.shadow.difference import Difference
from fngraph.shadow.parts import Parts, needed, parts_of
from fngraph.shadow.saved import (
    Ran,
    Saved,
    donated_of,
    output_paths,
    prepared_of,
    ran_of,
    run_bare,
    save,
)
from fngraph.shadow.share import verified_in
from fngraph.step.agreed import any_of
from fngraph.step.keys import Keys, Shared
from fngraph.step.prepared import Prepared
from fngraph.step.step import R, Step, make_step
from fngraph.torch_facts.tracing import run_by_python


class VerifiedStep(Step[R]):
    """A `Step` that verifies a share of its calls; see `fg.Verify`.

    Attributes:
        verify: what was asked for.
    """

    def __init__(self, shared: Shared, executable: Executable, verify: Verify) -> None:
        super().__init__(shared, executable)
        self.verify = verify
        self._calls = itertools.count(1)
        self._newest = 0  # of the calls that looked whether they are due
        self._window = 0
        self._due: float = verified_in(0, verify.share) if verify.share else math.inf
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
        if number < self._due:
            return Step.__call__(self, *args, allowed=allowed, **kwargs)
        with self.turn.taken():
            self._newest = max(self._newest, number)  # threads may come in another order
            if self._newest < self._due:  # another's call has meanwhile had this window's turn
                return Step.__call__(self, *args, allowed=allowed, **kwargs)
            self._window += 1
            self._due = verified_in(self._window, self.verify.share)
            return self._verify(number, args, kwargs, allowed)

    @property
    def differences(self) -> Sequence[Difference]:
        """What was found, the first `keep` of it."""
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
                self._compare(number, keys, prepared, saved, result)
        if why:
            self._unverified(why)
        return result

    def _compare(
        self, number: int, keys: Keys, prepared: Prepared, saved: Saved, result: R
    ) -> None:
        peers = keys.executable.peers
        try:
            want = run_bare(keys, saved)
        except Exception as error:
            if peers is not None:  # who wait for it in a collective
                say_failed(error)
                raise
            self._unverified(f"bare forward raised {said(error)}")
            return
        got = _with_state(keys, self._parts_of(keys), saved, ran_of(keys, result))
        found = differences(keys, got, want, self.verify, claims_bits(keys, prepared))
        stats = self.shared.stats
        stats.verified += 1
        if not any_of(peers, "compare a verified step", bool(found)):  # what one finds, all keep
            return
        stats.differences += 1
        made = Difference(
            number, prepared.chosen, saved, tuple(found), weakref.ref(keys.executable)
        )
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
            warnings.warn(text, stacklevel=5)


def keys_of_now(step: Step[Any]) -> Keys:
    """The keys that serve the caller's ambient state (autocast, ...), as a call takes them."""
    if (ambient := step.last.read_ambient()) != step.last.ambient:
        step._meet(ambient)
    return step.last.keys


def make_verified(verify: Verify, executable: Executable, values: Any, **options: Any) -> Step[Any]:
    """`make_step`, of a step that verifies a share of its calls."""
    return make_step(
        executable, values, make=lambda shared, made: VerifiedStep(shared, made, verify), **options
    )


def why_not(keys: Keys, prepared: Prepared) -> str:
    """Why a step that ran so cannot be compared; "" if it can."""
    if not keys.executable.generators or not is_padded(keys, prepared):
        return ""
    return (
        "forward draws random numbers, and a key draws for its padding too; steps are verified "
        "that have none"
    )


def is_padded(keys: Keys, prepared: Prepared) -> bool:
    """Whether the key had more rows than the batch."""
    mode, descriptor, _ = prepared.chosen
    return mode is not Mode.NONE and keys.executable.sizes(descriptor) != prepared.true


def claims_bits(keys: Keys, prepared: Prepared) -> bool:
    """Whether a step that ran so ran bare `forward`'s own kernels on its own sizes: no padding,
    nothing compiled or rewritten, and no primitive, whose backends go by bounds as well."""
    executable = keys.executable
    is_plain = executable.level == "none" and not any(executable.matches.values())
    no_calls = not any(isinstance(fn, PrimitiveCall) for fn in executable.fns)
    return is_plain and no_calls and not is_padded(keys, prepared)


def differences(keys: Keys, got: Ran, want: Ran, verify: Verify, exact: bool) -> list[Compared]:
    """What two runs do not have alike."""
    executable = keys.executable
    leaves, back = executable.args.leaves, executable.returns
    own = [k for k in range(executable.out_tree.num_leaves) if k not in set(back.values())]
    triples = list(zip(own, output_paths(keys), got.outputs, want.outputs))
    triples += [(back[i], leaves[i].path, x, want.state[i]) for i, x in got.state.items()]
    pairs = [(path, _but_dirty(executable.dirty.get(k, ()), a, b), b) for k, path, a, b in triples]
    return compare(pairs, verify.by_dtype, exact)


def _but_dirty(dirty: Boxes, got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """A result, with rows that are kept for padding as the other run has them."""
    if not dirty or got.shape != want.shape:
        return got
    made = got.clone()
    at = elements(dirty, made)
    made[at] = want[at]
    return made


@torch.no_grad()
def _with_state(keys: Keys, parts: Parts, saved: Saved, ran: Ran) -> Ran:
    """The step's own outputs, and the bound leaves as they are now, cut to the rows."""
    return Ran(ran.outputs, needed(parts, saved.rows, donated_of(keys)))
