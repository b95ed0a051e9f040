"""Descriptor fields: one number of a batch, and one rule for which captured value covers it.

A user adds a field by handing `build_table` one more `Field`; dispatch does not change.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from fngraph.core.kinds import checked
from fngraph.core.spec import BatchDescriptor, BatchSpec
from fngraph.core.text import expect
from fngraph.errors import SpecError


class Rule:
    """When a captured value covers a batch's value. Subclass it for a rule of your own.

    None, as a captured value, covers any. Rules of one class are equal, unless they say otherwise.
    """

    __slots__ = ()

    def covers(self, captured: Any, value: Any) -> bool:
        """Whether a key captured at this value serves a batch of `value`."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class AtLeast(Rule):
    """The captured value is at least the batch's: what is missing is padding."""

    __slots__ = ()

    def covers(self, captured: Any, value: Any) -> bool:
        return captured is None or captured >= value

    def __str__(self) -> str:
        return "at least"


class Equal(Rule):
    """The captured value is the batch's own: it was baked into the graph."""

    __slots__ = ()

    def covers(self, captured: Any, value: Any) -> bool:
        return captured is None or captured == value

    def __str__(self) -> str:
        return "equal"


@checked
@dataclass(frozen=True, slots=True)
class RoundedTo(Rule):
    """The captured value is the next of `captured` that holds the batch's. 0 is never rounded up.

    Attributes:
        captured: the counts that have graphs, ascending.
        overflow: what a batch above them all gets: no graph ("eager"), or the largest ("clamp").

    Source: vLLM 0.33 rounds active LoRA counts so; its first dispatcher runs the overflow eagerly
    and its second clamps.
    """

    captured: tuple[int, ...]
    overflow: str = "eager"

    def __post_init__(self) -> None:
        if not self.captured or list(self.captured) != sorted(set(self.captured)):
            raise SpecError(
                f"rounded_to({self.captured}) needs ascending, distinct counts. "
                f"Pass rounded_to({tuple(sorted(set(self.captured))) or (0,)})."
            )
        if self.overflow not in ("eager", "clamp"):
            raise SpecError(
                f'overflow={self.overflow!r} is unknown. Pass overflow="eager" or overflow="clamp".'
            )

    def round(self, value: int) -> int | None:
        """The captured count that serves `value`; None where none does."""
        if value == 0:
            return 0 if self.captured[0] == 0 else None
        at = bisect_left(self.captured, value)
        if at < len(self.captured):
            return self.captured[at]
        return self.captured[-1] or None if self.overflow == "clamp" else None

    def covers(self, captured: Any, value: Any) -> bool:
        return captured is None or captured == self.round(value)

    def __str__(self) -> str:
        return f"rounded to {', '.join(map(str, self.captured))} or {self.overflow}"


class _FieldTuple(NamedTuple):
    name: str
    rule: Rule
    default: Hashable
    full: tuple[Hashable, ...]
    piecewise: tuple[Hashable, ...]


class Field(_FieldTuple):
    """One field of a descriptor, as data.

    Attributes:
        name: what a `BatchSpec` and its `BatchDescriptor` call it.
        rule: when a key's value covers a batch's.
        default: a batch's value where its spec does not say.
        full: the values that FULL keys are captured at. None covers any.
        piecewise: the same for PIECEWISE keys.

    Raises:
        SpecError: a name that is no str, a rule that is none.
    """

    def __new__(
        cls, name: str, rule: Rule, default: Hashable = 0, full: tuple[Hashable, ...] = (None,),
        piecewise: tuple[Hashable, ...] = (None,),
    ) -> Self:  # fmt: skip
        expect(str, name=name)
        expect(Rule, "fg.core.Equal(), fg.core.AtLeast() or another rule", rule=rule)
        expect(tuple, "(1, 2)", full=full, piecewise=piecewise)
        return tuple.__new__(cls, (name, rule, default, full, piecewise))

    def covers(self, descriptor: BatchDescriptor, spec: BatchSpec) -> bool:
        """Whether a descriptor covers a batch as far as this field goes."""
        return self.rule.covers(self.captured(descriptor), self.wanted(spec))

    def captured(self, descriptor: BatchDescriptor) -> Any:
        """This field of a descriptor; None: any."""
        if self.name in BUILT_IN:
            return getattr(descriptor, self.name)
        return dict(descriptor.extra).get(self.name)

    def wanted(self, spec: BatchSpec) -> Any:
        """This field of a spec."""
        if self.name in BUILT_IN:
            return getattr(spec, self.name)
        return dict(spec.extra).get(self.name, self.default)


BUILT_IN = (
    "num_tokens",
    "num_reqs",
    "query_len",
    "adapters",
    "cascade",
    "encoder_outputs",
)
"""The fields that every spec has, in the order in which keys are compared."""


def user_defined(fields: tuple[Field, ...]) -> tuple[Field, ...]:
    """Those of a table's fields that its user added; they stand behind the built-in ones."""
    return fields[len(BUILT_IN) :]


def built_in_fields(adapters: tuple[int, ...] = (0,), overflow: str = "eager") -> tuple[Field, ...]:
    """The fields of every table.

    | field           | rule                   | FULL keys   | PIECEWISE keys |
    |-----------------|------------------------|-------------|----------------|
    | num_tokens      | at least               | the ladder  | the ladder     |
    | num_reqs        | at least               | set         | None           |
    | query_len       | equal                  | set or None | None           |
    | adapters        | rounded to `adapters`  | `adapters`  | `adapters`     |
    | cascade         | equal                  | False       | None           |
    | encoder_outputs | equal                  | False       | None           |
    """
    return (
        Field("num_tokens", AtLeast()),
        Field("num_reqs", AtLeast()),
        Field("query_len", Equal()),
        Field("adapters", RoundedTo(adapters, overflow), 0, adapters, adapters),
        Field("cascade", Equal(), full=(False,)),
        Field("encoder_outputs", Equal(), full=(False,)),
    )
