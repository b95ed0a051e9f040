"""`dispatch`: the least key that covers a batch, of the strongest mode that is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fngraph.core.covering import Field
from fngraph.core.lookup import CROWDED, Class, Dispatch, Entry
from fngraph.core.modes import Mode, runtime_modes
from fngraph.core.spec import CLASS, BatchSpec, Key
from fngraph.core.table import DispatchTable
from fngraph.core.text import expect
from fngraph.errors import ModesError, SpecError

Allowed = Iterable[Mode | str] | Dispatch | None
"""The modes that a batch may run as, None: all; or what was decided beforehand, and nothing else: a
`Dispatch`, as `dispatch`, `settle` and the plan of an encoder give it."""


def modes_of(allowed: Allowed) -> frozenset[Mode]:
    """The runtime modes that are allowed. Raises ModesError as `runtime_modes`."""
    return frozenset((allowed.mode,)) if isinstance(allowed, Dispatch) else runtime_modes(allowed)


def dispatch_by_definition(table: DispatchTable, spec: BatchSpec, allowed: Allowed = None) -> Key:
    """The definition: of the strongest allowed mode, the least key whose every field covers.

    "Least" is `table.order`. Without any such key the batch runs as itself, NONE. `dispatch` does
    the same from a lookup made ahead; a test says that they agree.

    Raises:
        ModesError: no key covers the batch, and NONE is not allowed.
        SpecError: `spec` has a field that the table does not know.
    """
    _check_kinds(table, spec)
    check_fields(table, spec)
    if isinstance(allowed, Dispatch):
        return decided(table, spec, allowed).key
    modes = runtime_modes(allowed)
    for mode in (Mode.FULL, Mode.PIECEWISE):
        if mode in modes:
            keys = table.keys(mode)
            covering = [key for key in keys if all(f.covers(key, spec) for f in table.fields)]
            if covering:
                return mode, min(covering, key=table.order)
    if Mode.NONE not in modes:
        raise ModesError(f"{spec!r} has no key among {sorted(map(str, modes))}.")
    return Mode.NONE, spec.descriptor()


def _check_kinds(table: Any, spec: Any) -> None:
    """Raise SpecError for what is no table or no spec."""
    expect(DispatchTable, "a table, then a spec: dispatch(step.table, spec)", table=table)
    expect(BatchSpec, "fg.BatchSpec(num_tokens, num_reqs), or batch.spec", spec=spec)


def dispatch(table: DispatchTable, spec: BatchSpec, allowed: Allowed = None) -> Dispatch:
    """What `spec` runs as: (mode, descriptor, reason). Pure, total and deterministic.

    Args:
        allowed: the runtime modes that this batch may run as, by name or value; None: all. Or a
            `Dispatch`: what was decided already, which is checked, and is the answer.

    Raises:
        ModesError: no key covers the batch, and NONE is not allowed; or what was decided is no key
            of the table, or one that does not cover the batch.
        SpecError: `spec` has a field that the table does not know.

    The same as `dispatch_by_definition` for every spec, from a lookup made ahead.
    """
    if isinstance(allowed, Dispatch):
        return decided(table, spec, allowed)
    if not (isinstance(spec, BatchSpec) and isinstance(table, DispatchTable)):
        _check_kinds(table, spec)
    lookup = table.lookup
    batch: Class = spec[CLASS]  # type: ignore[assignment]
    entries = lookup.classes.get(batch)
    if entries is None:
        check_fields(table, spec)
        batch = lookup.classify(spec)
        entries = lookup.classes[batch]
    entry: Entry = entries[lookup.rung[spec[0]]] if spec[0] <= lookup.top else ()
    if allowed is not None or lookup.extra:
        return _choose(spec, entry, runtime_modes(allowed), lookup.extra, lookup.reasons[batch])
    for most, answer in entry:
        if spec[1] <= most:
            return answer
    return Dispatch(Mode.NONE, spec.descriptor(), CROWDED if entry else lookup.reasons[batch])


def decided(table: DispatchTable, spec: BatchSpec, decision: Dispatch) -> Dispatch:
    """A decision that was made beforehand, if this table can keep it for this batch.

    Raises:
        ModesError: it cannot: there is no such key, or it does not cover the batch; or NONE was
            decided for other counts.
        SpecError: `spec` has a field that the table does not know.
    """
    check_fields(table, spec)
    mode, key, _ = decision
    if mode is Mode.NONE:
        if key != spec.descriptor():
            raise ModesError(
                f"{spec!r} was to run eagerly by a decision for other counts, {key!r}. Decide for "
                "the batch itself: step.dispatch(spec)."
            )
        return decision
    if key not in table.keys(mode):
        raise ModesError(
            f"{spec!r} was to run as {mode} {key!r}, which is no key of {table!r}. Capture it, "
            "or decide by this table: step.dispatch(spec)."
        )
    for item in table.fields:
        if not item.covers(key, spec):
            raise ModesError(
                f"{spec!r} was to run as {mode} {key!r}, which does not cover it: {item.name} is "
                f"{item.captured(key)!r} there and {item.wanted(spec)!r} here. Decide for the "
                "batch itself: step.dispatch(spec)."
            )
    return decision


def _choose(
    spec: BatchSpec, entry: Entry, modes: frozenset[Mode], extra: Sequence[Field], reason: str
) -> Dispatch:
    """The first of these answers that is allowed and whose user-defined fields cover the batch."""
    barred: list[str] = []  # modes that cover it and are not allowed
    missed: list[Dispatch] = []  # answers that do not cover it
    for most, answer in entry:
        key = answer.descriptor
        if spec.num_reqs > most or (extra and not all(item.covers(key, spec) for item in extra)):
            missed.append(answer)
        elif answer.mode not in modes:
            barred.append(str(answer.mode))
        else:
            stronger = [other for other in missed if other.mode is not answer.mode]
            why = _why(spec, barred, stronger, extra)
            return answer._replace(reason=why) if why else answer
    reason = _why(spec, barred, missed, extra) or reason
    if Mode.NONE not in modes:
        names = ", ".join(sorted(map(str, modes)))
        raise ModesError(
            f'{spec!r} cannot run as {names}: {reason}. Add "NONE" to allowed=, or capture a key '
            "that covers it."
        )
    return Dispatch(Mode.NONE, spec.descriptor(), reason)


def _why(spec: BatchSpec, barred: list[str], missed: list[Dispatch], extra: Sequence[Field]) -> str:
    """Why nothing stronger: a mode was barred, or the keys at hand miss a field; else empty."""
    if barred:
        return f"{' and '.join(dict.fromkeys(barred))} not allowed"
    if not missed:
        return ""
    keys = [answer.descriptor for answer in missed]
    out = (field for field in extra if not any(field.covers(key, spec) for key in keys))
    return next((f"no key covers {field.name}={field.wanted(spec)!r}" for field in out), CROWDED)


def check_fields(table: DispatchTable, spec: BatchSpec) -> None:
    """Raises SpecError where `spec` has a user-defined field that `table` does not know."""
    for name, value in spec.extra:
        known = [item.name for item in table.lookup.extra]
        if name not in known:
            raise SpecError(
                f"BatchSpec(extra={{{name!r}: {value!r}}}): the table knows "
                f"{', '.join(known) or 'no user-defined field'}. Pass "
                f"build_table(..., fields=[Field({name!r}, rule)])."
            )
