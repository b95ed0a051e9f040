"""The flight recorder: a recorded stream of specs, replayed offline against any table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, Self

from fngraph.core import text
from fngraph.core.dispatching import Allowed, dispatch
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchSpec, HostBounds, Key
from fngraph.core.stats import Stats
from fngraph.core.table import DispatchTable
from fngraph.errors import SpecError


class Replayed(NamedTuple):
    """What a stream would have run as.

    Attributes:
        stats: the counts.
        used: key -> steps, for keys that served any.
        unused: keys that served none: memory that this traffic does not need.
    """

    stats: Stats
    used: dict[Key, int]
    unused: tuple[Key, ...]

    @property
    def hit_rate(self) -> float:
        """The share of steps that a graph served, 0 to 1."""
        return 1.0 - self.stats.share(Mode.NONE) if self.stats.steps else 0.0

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def as_text(self) -> str:
        """Hit rate, padding and graphs used, then the counts."""
        stats = self.stats
        rows = [
            ("steps", stats.steps),
            ("hit rate", f"{self.hit_rate:.1%}"),
            *((f"share {m}", f"{stats.share(m):.1%}") for m in (Mode.FULL, Mode.PIECEWISE)),
            ("padded rows", stats.padding),
            ("padded rows / true rows", f"{stats.padding / max(stats.tokens, 1):.1%}"),
            ("graphs used", f"{len(self.used)} of {len(self.used) + len(self.unused)}"),
        ]
        return text.table(("over the whole stream", "value"), rows)


class _FlightTuple(NamedTuple):
    specs: tuple[BatchSpec, ...]


class Flight(_FlightTuple):
    """A recorded stream of specs.

    Record by appending each step's `batch.spec` to a list (or a bounded deque), and make a
    `Flight(tuple(recorded))` when you want to look.

    Attributes:
        specs: one a step, in order.

    Raises:
        SpecError: what are no specs.
    """

    def __new__(cls, specs: Iterable[BatchSpec]) -> Self:
        text.expect(Iterable, "a list of specs", specs=specs)
        found = tuple(specs)
        for i, spec in enumerate(found):
            text.expect(BatchSpec, "batch.spec", **{f"specs[{i}]": spec})
        return tuple.__new__(cls, (found,))

    def replay(self, table: DispatchTable, allowed: Allowed = None) -> Replayed:
        """What each step would run as under `table`. Raises as `dispatch`.

        Raises:
            TypeError: no table.
        """
        if not isinstance(table, DispatchTable):
            raise TypeError(
                f"replay({type(table).__name__}): expected a DispatchTable, such as lowered.table "
                "or step.table"
            )
        stats = Stats()
        used: dict[Key, int] = {}
        for spec in self.specs:
            ran = dispatch(table, spec, allowed)
            stats.observe(spec.num_tokens, ran)
            if ran.mode is not Mode.NONE:
                used[ran.key] = used.get(ran.key, 0) + 1
        return Replayed(stats, used, tuple(key for key in table if key not in used))

    def histogram(self, query_len: int | None = None) -> dict[int, int]:
        """Tokens -> steps, of batches of this query length (None: mixed), for `plan_sizes`."""
        text.expect((int, type(None)), "a number of tokens, or None", query_len=query_len)
        counts: dict[int, int] = {}
        for spec in self.specs:
            if spec.query_len == query_len:
                counts[spec.num_tokens] = counts.get(spec.num_tokens, 0) + 1
        return counts

    def dumps(self) -> str:
        """The stream as text: a JSON list of the fields that are set, one spec a line."""
        import json  # 2 ms that dispatch never needs

        return "\n".join(json.dumps(fields_of(spec)) for spec in self.specs)

    @classmethod
    def loads(cls, dumped: str) -> Flight:
        """The stream that `dumps` wrote.

        Raises:
            SpecError: a line that is not a spec.
        """
        text.expect(str, "what dumps() gave", dumped=dumped)
        lines = enumerate(dumped.splitlines(), 1)
        return cls(tuple(_spec(i, line) for i, line in lines if line.strip()))

    def __repr__(self) -> str:
        return f"Flight({text.count(len(self.specs), 'step')})"


def fields_of(spec: BatchSpec) -> dict[str, object]:
    """The fields of a spec that are set, for JSON."""
    plain = BatchSpec(spec.num_tokens, spec.num_reqs)
    changed = {
        name: v for name, v, d in zip(spec._fields, spec, plain) if v != d or name[:4] == "num_"
    }
    return changed | ({"extra": dict(spec.extra)} if spec.extra else {})


def spec_of(fields: dict[str, Any]) -> BatchSpec:
    """The spec of such fields."""
    return BatchSpec(**{**fields, "host": HostBounds(*fields.get("host", ()))})


def _spec(number: int, line: str) -> BatchSpec:
    import json

    try:
        return spec_of(json.loads(line))
    except (AttributeError, TypeError, ValueError) as error:
        shown = repr(line) if len(line) < 200 else f"{line[:100]!r}..."
        raise SpecError(
            f"Line {number} of the flight is not a spec: {shown} ({error}). Read what "
            "Flight.dumps() wrote; of a log, Log.loads(text).flight"
        ) from error
