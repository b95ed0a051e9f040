"""`explain`: why a batch goes to its key, and why not to each of the others."""

from __future__ import annotations

import re
from typing import NamedTuple

from fngraph.core import text
from fngraph.core.covering import AtLeast, RoundedTo
from fngraph.core.dispatching import Allowed, dispatch
from fngraph.core.lookup import Dispatch
from fngraph.core.modes import Mode, runtime_modes
from fngraph.core.spec import BatchDescriptor, BatchSpec
from fngraph.core.table import DispatchTable


class Candidate(NamedTuple):
    """One key that was not chosen.

    Attributes:
        mode: FULL or PIECEWISE.
        descriptor: the key.
        field: the first field that does not cover the batch; None: all do, and the key lost.
        why: the same in words.
    """

    mode: Mode
    descriptor: BatchDescriptor
    field: str | None
    why: str


class Explanation(NamedTuple):
    """A decision with everything that was decided against. `str()` is the text.

    Attributes:
        spec: the batch.
        chosen: what `dispatch` says.
        others: every other key of the table, FULL first, smallest first.
    """

    spec: BatchSpec
    chosen: Dispatch
    others: tuple[Candidate, ...]

    def as_text(self) -> str:
        """The decision and, a line each, the keys that it was not."""
        mode, descriptor, reason = self.chosen
        padding = descriptor.num_tokens - self.spec.num_tokens
        padded = f", {text.count(padding, 'padding token')}" if padding else ""
        head = f"{self.spec!r}\n-> {mode} {descriptor!r}{padded}: {reason}"
        if not self.others:
            return head
        return f"{head}\n\n{text.table(('mode', 'not this key', 'because'), self.folded())}"

    def folded(self) -> list[tuple[str, str, str]]:
        """Mode, keys and reason of each run of keys that are out for one reason, in a line each.

        Where the reason has each key's own number, the first's and the last's are said.
        """
        runs: list[list[Candidate]] = []
        for other in self.others:
            if runs and _kind(runs[-1][-1]) == _kind(other):
                runs[-1].append(other)
            else:
                runs.append([other])
        found = []
        for run in runs:
            if len(run) < text.FOLDED:
                found += [(str(one.mode), repr(one.descriptor), one.why) for one in run]
                continue
            first, last = run[0], run[-1]
            keys = f"{first.descriptor!r} to {last.descriptor!r}, {len(run)} keys"
            found.append((str(first.mode), keys, _joined(first.why, last.why)))
        return found

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def __str__(self) -> str:
        return self.as_text()


def _kind(one: Candidate) -> tuple[Mode, str | None, str]:
    """Alike for keys that are out for one reason, whatever number each of them has there."""
    return one.mode, one.field, re.sub(r"\d+", "#", one.why) if one.field else one.why


def _joined(first: str, last: str) -> str:
    """Two reasons that differ in a key's own number: `num_tokens: 1..8 is less than 13`."""
    words = [a if a == b else f"{a}..{b}" for a, b in zip(first.split(" "), last.split(" "))]
    return " ".join(words)


def explain(table: DispatchTable, spec: BatchSpec, allowed: Allowed = None) -> Explanation:
    """`dispatch(table, spec, allowed)`, and for every other key what ruled it out.

    Raises: as `dispatch`.
    """
    chosen = dispatch(table, spec, allowed)
    modes = None if isinstance(allowed, Dispatch) else runtime_modes(allowed)
    others = [
        _why_not(table, spec, mode, descriptor, chosen, modes)
        for mode in (Mode.FULL, Mode.PIECEWISE)
        for descriptor in reversed(table.keys(mode))
        if (mode, descriptor) != chosen.key
    ]
    return Explanation(spec, chosen, tuple(others))


def _why_not(
    table: DispatchTable,
    spec: BatchSpec,
    mode: Mode,
    descriptor: BatchDescriptor,
    chosen: Dispatch,
    modes: frozenset[Mode] | None,
) -> Candidate:
    """What ruled a key out.

    Args:
        modes: those that are allowed; None: the choice was made beforehand.
    """
    for item in table.fields:
        if not item.covers(descriptor, spec):
            captured, wanted = item.captured(descriptor), item.wanted(spec)
            if isinstance(item.rule, AtLeast):
                why = f"{item.name}: {captured} is less than {wanted}"
            elif isinstance(item.rule, RoundedTo):
                why = f"{item.name}: {wanted} is rounded to {item.rule.round(wanted)}"
                why += f", not {captured}"
            else:
                why = f"{item.name}: {captured} is not {wanted}"
            return Candidate(mode, descriptor, item.name, why)
    if modes is None:
        why = f"covers it, but {chosen.mode} {chosen.descriptor!r} was decided beforehand"
    elif mode not in modes:
        why = f"covers it, but {mode} is not allowed"
    elif mode is not chosen.mode:
        why = f"covers it, but {chosen.mode} is stronger"
    else:
        why = f"covers it, but {chosen.descriptor!r} is less"
    return Candidate(mode, descriptor, None, why)
