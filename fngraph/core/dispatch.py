"""`dispatch`: the least key that covers a batch, of the strongest mode that is allowed."""

from __future__ import annotations

from collections.abc import Iterable

from fngraph.core.fields import BUILT_IN
from fngraph.core.lookup import CROWDED, Dispatch, Entry
from fngraph.core.modes import Mode, runtime_modes
from fngraph.core.spec import BatchDescriptor, BatchSpec
from fngraph.core.table import DispatchTable
from fngraph.errors import ModesError, SpecError

__all__ = ["Dispatch", "dispatch", "dispatch_by_definition"]

Allowed = Iterable[Mode | str] | None


def dispatch_by_definition(
    table: DispatchTable, spec: BatchSpec, allowed: Allowed = None
) -> tuple[Mode, BatchDescriptor]:
    """The definition: of the strongest allowed mode, the least key whose every field covers.

    "Least" is `table.order`. Without any such key the batch runs as itself, NONE. `dispatch` does
    the same from a lookup made ahead; a test says that they agree.

    Raises:
        ModesError: no key covers the batch, and NONE is not allowed.
        SpecError: `spec` has a field that the table does not know.
    """
    check_fields(table, spec)
    modes = runtime_modes(allowed)
    for mode in (Mode.FULL, Mode.PIECEWISE):
        covering = [
            key for key in table.keys(mode) if all(item.covers(key, spec) for item in table.fields)
        ]
        if covering and mode in modes:
            return mode, min(covering, key=table.order)
    if Mode.NONE not in modes:
        raise ModesError(f"{spec!r} has no key among {sorted(map(str, modes))}.")
    return Mode.NONE, spec.descriptor()


def dispatch(table: DispatchTable, spec: BatchSpec, allowed: Allowed = None) -> Dispatch:
    """What `spec` runs as: (mode, descriptor, reason). Pure, total and deterministic.

    Args:
        allowed: the runtime modes that this batch may run as, by name or value; None: all.

    Raises:
        ModesError: no key covers the batch, and NONE is not allowed.
        SpecError: `spec` has a field that the table does not know.

    The same as `dispatch_by_definition` for every spec, from a lookup made ahead. A table with
    user-defined fields, and `allowed=`, take the longer way of `_scan`.
    """
    lookup = table.lookup
    if allowed is None and (entries := lookup.quick.get(spec[2:7])) is not None:
        entry: Entry = ()
        if spec[0] <= lookup.top:
            entry = entries[lookup.rung[spec[0]]]
            for most, answer in entry:
                if spec[1] <= most:
                    return answer
        reason = CROWDED if entry else lookup.reasons[spec[2:7]]
        return Dispatch(Mode.NONE, spec.descriptor(), reason)
    return _scan(table, spec, runtime_modes(allowed))


def _scan(table: DispatchTable, spec: BatchSpec, modes: frozenset[Mode]) -> Dispatch:
    """The answer for any spec and table; user-defined fields are compared key by key."""
    check_fields(table, spec)
    lookup = table.lookup
    kind = lookup.classify(spec)
    entry = (
        lookup.classes[kind][lookup.rung[spec.num_tokens]] if spec.num_tokens <= lookup.top else ()
    )
    barred = ", ".join(str(mode) for mode in (Mode.FULL, Mode.PIECEWISE) if mode not in modes)
    for most, answer in entry:
        if (
            answer.mode in modes
            and spec.num_reqs <= most
            and all(item.covers(answer.descriptor, spec) for item in lookup.extra)
        ):
            return answer._replace(reason=f"{barred} not allowed") if barred else answer
    if barred:
        reason = f"{barred} not allowed"
    elif not entry:
        reason = lookup.reasons[kind]
    else:
        keys = [answer.descriptor for _, answer in entry]
        out = (i for i in lookup.extra if not any(i.covers(key, spec) for key in keys))
        reason = next((f"no key covers {i.name}={i.wanted(spec)!r}" for i in out), CROWDED)
    if Mode.NONE not in modes:
        names = ", ".join(sorted(map(str, modes)))
        raise ModesError(
            f"{spec!r} cannot run as {names}: {lookup.reasons[kind] if barred else reason}. "
            'Add "NONE" to allowed=, or capture a key that covers it.'
        )
    return Dispatch(Mode.NONE, spec.descriptor(), reason)


def check_fields(table: DispatchTable, spec: BatchSpec) -> None:
    """Raises SpecError where `spec` has a user-defined field that `table` does not know."""
    known = [item.name for item in table.fields[len(BUILT_IN) :]]
    for name, value in spec.extra:
        if name not in known:
            raise SpecError(
                f"BatchSpec(extra={{{name!r}: {value!r}}}): the table knows "
                f"{', '.join(known) or 'no user-defined field'}. Pass "
                f"build_table(..., fields=[Field({name!r}, rule)])."
            )
