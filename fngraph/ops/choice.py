"""Which backend runs which call of a primitive: by name, per layer, per kind of batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from fngraph.errors import BackendError
from fngraph.ops.primitives import Primitive, primitive


@dataclasses.dataclass(frozen=True, slots=True)
class Hybrid:
    """Two backends for one call: keys of uniform batches use one, everything else the other.

    Its level is the lower of the two. Uniform batches get keys of their own in every mode that
    captures them, FULL too.

        fg.graphify(forward, backends={"attention": fg.ops.Hybrid("sdpa", mixed="reference")}, ...)
    """

    uniform: str
    mixed: str


Choice: TypeAlias = str | Hybrid | None
Choices: TypeAlias = Choice | Sequence[Choice] | Mapping[int, Choice]
"""For every call of a primitive; one a call, in order; or by number, others take what is suited."""


def check_choices(name: str, choices: Choices) -> None:
    """Raise where a primitive or a backend is written that does not exist.

    Raises:
        BackendError: so does one.
    """
    known = primitive(name)
    for choice in _listed(choices):
        if isinstance(choice, Hybrid):
            known.backend(choice.uniform), known.backend(choice.mixed)
        elif isinstance(choice, str):
            known.backend(choice)
        elif choice is not None:
            raise BackendError(
                f"backends={{{name!r}: {choice!r}}}: pass a name, or "
                'fg.ops.Hybrid(uniform="...", mixed="...")'
            )


def choices_of(known: Primitive, choices: Choices, calls: int) -> list[Choice]:
    """One choice for each call.

    Raises:
        BackendError: another number of them than calls.
    """
    if isinstance(choices, Mapping):
        beyond = [i for i in choices if not (isinstance(i, int) and 0 <= i < calls)]
        if beyond:
            raise BackendError(
                f"backends={{{known.name!r}: {{{beyond[0]!r}: ...}}}}: forward calls "
                f"{known.name} {calls} times, number 0 to {calls - 1}"
            )
        return [choices.get(i) for i in range(calls)]
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        if len(choices) != calls:
            raise BackendError(
                f"backends={{{known.name!r}: ...}} lists {len(choices)} backends, and forward "
                f"calls {known.name} {calls} times. List one a call, or pass one for all"
            )
        return list(choices)
    return [choices] * calls


def _listed(choices: Any) -> list[Any]:
    if isinstance(choices, Mapping):
        return list(choices.values())
    if isinstance(choices, Sequence) and not isinstance(choices, str):
        return list(choices)
    return [choices]
