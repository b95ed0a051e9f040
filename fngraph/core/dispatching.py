"""`dispatch`: the least key that covers a batch, of the strongest mode that is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fngraph.core.fields import BUILT_IN, Field
from fngraph.core.lookup import CROWDED, Class, Dispatch, Entry
from fngraph.core.modes import Mode, runtime_modes
from fngraph.core.spec import CLASS, BatchDescriptor, BatchSpec
from fngraph.core.table import DispatchTable
from fngraph.errors import ModesError, SpecError

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
        if mode in modes:
            keys = table.keys(mode)
            covering = [key for key in keys if all(f.covers(key, spec) for f in table.fields)]
            if covering:
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
    if allowed is None:
        kind: Class = spec[CLASS]  # type: ignore[assignment]
        entries = lookup.quick.get(kind)
        if entries is None and lookup.quick and not spec[6]:
            kind = lookup.classify(spec)
            entries = lookup.quick[kind]
        if entries is not None:
            entry: Entry = ()
            if spec[0] <= lookup.top:
                entry = entries[lookup.rung[spec[0]]]
                for most, answer in entry:
                    if spec[1] <= most:
                        return answer
            reason = CROWDED if entry else lookup.reasons[kind]
            return Dispatch(Mode.NONE, spec.descriptor(), reason)
    return _scan(table, spec, runtime_modes(allowed))


def _scan(table: DispatchTable, spec: BatchSpec, modes: frozenset[Mode]) -> Dispatch:
    """The answer for any spec and table; user-defined fields are compared key by key."""
    check_fields(table, spec)
    lookup, num_tokens, extra = table.lookup, spec.num_tokens, table.lookup.extra
    kind = lookup.classify(spec)
    entry = lookup.classes[kind][lookup.rung[num_tokens]] if num_tokens <= lookup.top else ()
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
    reason = _why(spec, barred, missed, extra) or lookup.reasons[kind]
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
        known = [item.name for item in table.fields[len(BUILT_IN) :]]
        if name not in known:
            raise SpecError(
                f"BatchSpec(extra={{{name!r}: {value!r}}}): the table knows "
                f"{', '.join(known) or 'no user-defined field'}. Pass "
                f"build_table(..., fields=[Field({name!r}, rule)])."
            )
