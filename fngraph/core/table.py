"""The dispatch table: every key that is captured, as one immutable value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from fngraph.core import text
from fngraph.core.covering import Field, RoundedTo, user_defined
from fngraph.core.limits import Limits
from fngraph.core.lookup import Lookup, arrange
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchDescriptor, Key
from fngraph.errors import ModesError

Cost = Callable[[BatchDescriptor], float]


@dataclass(frozen=True, slots=True)
class DispatchTable:
    """Which keys exist, and what covers what.

    Attributes:
        modes: the resolved modes.
        full: descriptors of FULL keys in capture order: most tokens first, then most adapters.
        piecewise: of PIECEWISE keys, the same.
        limits: bounds of every step. Dispatch itself does not look at them.
        fields: every descriptor field in comparing order, user-defined ones last.
        cost: what "least" compares first in place of the token count; None: the token count.
        lookup: the same keys arranged for `dispatch`; computed, not given.
    """

    modes: Mode
    full: tuple[BatchDescriptor, ...]
    piecewise: tuple[BatchDescriptor, ...]
    limits: Limits
    fields: tuple[Field, ...]
    cost: Cost | None = None
    lookup: Lookup = field(init=False, compare=False)

    def __post_init__(self) -> None:
        lookup = arrange(self.full, self.piecewise, self.fields, self.order)
        object.__setattr__(self, "lookup", lookup)

    def keys(self, mode: Mode | str) -> tuple[BatchDescriptor, ...]:
        """The descriptors of one runtime mode in capture order, largest first. NONE has none."""
        mode = Mode.parse(mode)
        if mode.dual:
            raise ModesError(
                f"{mode} is two modes. Ask table.keys({str(mode.decode)!r}) "
                f"and table.keys({str(mode.mixed)!r})."
            )
        return {Mode.NONE: (), Mode.PIECEWISE: self.piecewise, Mode.FULL: self.full}[mode]

    def __iter__(self) -> Iterator[Key]:
        """Keys, (mode, descriptor), in capture order: PIECEWISE before FULL, each largest first."""
        yield from ((Mode.PIECEWISE, key) for key in self.piecewise)
        yield from ((Mode.FULL, key) for key in self.full)

    def __len__(self) -> int:
        return len(self.piecewise) + len(self.full)

    @property
    def adapters(self) -> RoundedTo:
        """How adapter counts are rounded: `table.adapters.round(3)`."""
        return self.lookup.adapters

    @property
    def top(self) -> int:
        """The largest token count of any key; 0 where there is none. Static buffers reach to it."""
        return self.lookup.top

    def order(self, descriptor: BatchDescriptor) -> tuple:
        """What "least" compares: cost, then each field, constrained before unconstrained."""
        *built_in, _ = descriptor
        rank: list[object] = [] if self.cost is None else [self.cost(descriptor)]
        for value in built_in:
            rank += (True,) if value is None else (False, value)
        for item in user_defined(self.fields):
            value = item.captured(descriptor)
            rank += (True,) if value is None else (False, value)
        return tuple(rank)

    @property
    def plan_hash(self) -> str:
        """16 hex digits; two ranks whose tables decide alike, for every spec, print the same."""
        import hashlib  # OpenSSL takes 5 ms to load

        costs = self.cost and [self.cost(key) for _, key in self]
        rules = [(item.name, str(item.rule), item.default) for item in self.fields]
        plan = repr((str(self.modes), self.full, self.piecewise, rules, costs))
        return hashlib.sha256(plan.encode()).hexdigest()[:16]

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def as_text(self) -> str:
        """The ladders as a text table: one row for each kind of key."""
        kinds: dict[tuple, list[int]] = {}
        for mode, key in self:
            uniform = "mixed" if key.query_len is None else f"uniform, {key.query_len} each"
            extra = ", ".join(f"{name}={value!r}" for name, value in key.extra)
            kinds.setdefault((str(mode), uniform, key.adapters, extra), []).append(key.num_tokens)
        rows = [
            (mode, batch, adapters, extra, len(sizes), text.ranges(reversed(sizes)))
            for (mode, batch, adapters, extra), sizes in kinds.items()
        ]
        header = ("mode", "batches", "adapters", "extra", "keys", "tokens")
        return f"{self!r}\n\n{text.table(*_without_empty(header, rows))}"

    def __repr__(self) -> str:
        keys = [
            f"{text.count(len(keys), f'{mode} key')} of {keys[-1].num_tokens}..{keys[0].num_tokens}"
            for mode, keys in (("PIECEWISE", self.piecewise), ("FULL", self.full))
            if keys
        ]
        return f"DispatchTable({self.modes}: {', '.join(keys) or 'no keys'})"


def _without_empty(header: Sequence[str], rows: list[tuple]) -> tuple[list[str], list[list]]:
    kept = [i for i in range(len(header)) if header[i] != "extra" or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]
