"""The dispatch table: every key that is captured, as one immutable value."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product

from fngraph.core import text
from fngraph.core.fields import BUILT_IN, Field, RoundedTo, built_in_fields
from fngraph.core.limits import Limits
from fngraph.core.lookup import Lookup, build_lookup
from fngraph.core.modes import Mode
from fngraph.core.sizes import Ladders, check_sizes
from fngraph.core.spec import BatchDescriptor, sorted_extra
from fngraph.errors import ModesError, SizesError, SpecError

Cost = Callable[[BatchDescriptor], float]


@dataclass(frozen=True, slots=True, repr=False)
class DispatchTable:
    """Which keys exist, and what covers what.

    Attributes:
        modes: the resolved modes.
        full: FULL keys in capture order: most tokens first, then most adapters.
        piecewise: PIECEWISE keys, the same.
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
        object.__setattr__(
            self, "lookup", build_lookup(self.full, self.piecewise, self.fields, self.order)
        )

    def keys(self, mode: Mode | str) -> tuple[BatchDescriptor, ...]:
        """The keys of one runtime mode in capture order, largest first. NONE has none."""
        mode = Mode.parse(mode)
        if mode.dual:
            raise ModesError(
                f"{mode} is two modes. Ask table.keys({str(mode.decode)!r}) "
                f"and table.keys({str(mode.mixed)!r})."
            )
        return {Mode.NONE: (), Mode.PIECEWISE: self.piecewise, Mode.FULL: self.full}[mode]

    def __iter__(self) -> Iterator[tuple[Mode, BatchDescriptor]]:
        """(mode, key) in capture order: PIECEWISE before FULL, each largest first."""
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
        return max((keys[0].num_tokens for keys in (self.full, self.piecewise) if keys), default=0)

    def order(self, key: BatchDescriptor) -> tuple:
        """What "least" compares: cost, then each field, constrained before unconstrained."""
        rank: list[object] = [] if self.cost is None else [self.cost(key)]
        for value in key[:6]:
            rank += (True, 0) if value is None else (False, value)
        for item in self.fields[6:]:
            value = item.captured(key)
            rank += (True, 0) if value is None else (False, value)
        return tuple(rank)

    @property
    def plan_hash(self) -> str:
        """16 hex digits; two ranks whose tables decide alike, for every spec, print the same."""
        import hashlib  # OpenSSL takes 5 ms to load

        costs = self.cost and [self.cost(key) for _, key in self]
        rules = [(item.name, str(item.rule), item.default) for item in self.fields]
        plan = repr((str(self.modes), self.full, self.piecewise, rules, costs))
        return hashlib.sha256(plan.encode()).hexdigest()[:16]

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


def build_table(
    modes: Mode | str,
    ladders: Ladders,
    limits: Limits,
    adapters: Iterable[int] = (0,),
    fields: Iterable[Field] = (),
    cost: Cost | None = None,
    *,
    overflow: str = "eager",
    own_uniform: bool = False,
) -> DispatchTable:
    """Every key that `modes` captures on these ladders.

    Args:
        adapters: adapter counts that get keys, ascending; without 0, batches without adapters
            run eagerly.
        fields: user-defined fields; each multiplies the keys by its captured values.
        cost: what a key costs to run; a batch goes to the cheapest key that covers it. None: the
            one of fewest tokens.
        overflow: what a batch with more adapters than any key gets: "eager" or "clamp".
        own_uniform: capture uniform FULL keys in mode FULL too, because uniform batches have a
            backend of their own.

    Raises:
        SizesError: a ladder beyond the limits. SpecError: bad adapters or fields.

    Source: the kinds of keys are vLLM 0.33's (uniform FULL, mixed FULL, PIECEWISE).
    """
    modes = Mode.parse(modes)
    fields = _all_fields(tuple(adapters), tuple(fields), overflow)
    if modes is not Mode.NONE:
        check_sizes(ladders.mixed, limits)
    full: list[BatchDescriptor] = []
    if modes.decode is Mode.FULL and (modes.dual or own_uniform):
        for query_len, sizes in ladders.by_query_len:
            full += _keys(
                (
                    (size, size // query_len, query_len)
                    for size in _uniform(query_len, sizes, limits)
                ),
                [item.full for item in fields[3:]],
                fields,
            )
    if modes.mixed is Mode.FULL:
        mixed = ((size, min(size, limits.max_reqs), None) for size in ladders.mixed)
        full += _keys(mixed, [item.full for item in fields[3:]], fields)
    piecewise: list[BatchDescriptor] = []
    if modes.mixed is Mode.PIECEWISE:
        mixed = ((size, None, None) for size in ladders.mixed)
        piecewise = _keys(mixed, [item.piecewise for item in fields[3:]], fields)
    return DispatchTable(modes, _ordered(full), _ordered(piecewise), limits, fields, cost)


def _all_fields(
    adapters: tuple[int, ...], extra: tuple[Field, ...], overflow: str
) -> tuple[Field, ...]:
    names = [item.name for item in extra]
    for name in names:
        if name in BUILT_IN or names.count(name) > 1:
            raise SpecError(f"Field {name!r} is declared twice. Name it otherwise.")
    return built_in_fields(adapters, overflow) + extra


def _uniform(query_len: int, sizes: Sequence[int], limits: Limits) -> Sequence[int]:
    """A uniform ladder, checked: whole requests only, and no more of them than can come."""
    if not sizes:
        return ()
    check_sizes(sizes, limits)
    most = limits.max_reqs * query_len
    odd = [size for size in sizes if size % query_len or size > most]
    if odd:
        rule = "is not a multiple of" if odd[0] % query_len else f"is above {limits.max_reqs} times"
        raise SizesError(
            f"Uniform size {odd[0]} {rule} query_len={query_len}. "
            "Make the ladders with ladders(sizes, query_lens, limits.max_reqs)."
        )
    return sizes


def _keys(
    counts: Iterable[tuple[int, int | None, int | None]],
    values: Sequence[tuple],
    fields: tuple[Field, ...],
) -> list[BatchDescriptor]:
    names = [item.name for item in fields[6:]]
    combos = [
        (*combo[:3], sorted_extra([pair for pair in zip(names, combo[3:]) if pair[1] is not None]))
        for combo in product(*values)
    ]
    new, cls = tuple.__new__, BatchDescriptor  # built by the thousand; the fields are checked
    return [new(cls, count + combo) for count in counts for combo in combos]


def _ordered(keys: list[BatchDescriptor]) -> tuple[BatchDescriptor, ...]:
    """Capture order: largest first, so that small keys reuse the pool of large ones."""
    return tuple(sorted(keys, key=lambda key: (-key.num_tokens, -key.adapters)))
