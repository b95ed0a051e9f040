"""`EncoderStats`: what items ran as, counted by path; two of them add and subtract."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import NamedTuple

from fngraph.core import text
from fngraph.core.memory import MemoryTable
from fngraph.encoder.run import Ran
from fngraph.errors import SpecError


class Served(NamedTuple):
    """How runs went that were alike.

    Attributes:
        path: the path.
        budget: the graph's tokens; None: they ran eagerly.
        tokens: true tokens of each run.
    """

    path: str
    budget: int | None
    tokens: int


class Count(NamedTuple):
    """How many runs, and how many items in all of them."""

    runs: int
    items: int


NONE = Count(0, 0)


@dataclasses.dataclass(repr=False)
class EncoderStats:
    """What items ran as.

    `observe` counts in place, since it runs once a call; everything else reads, or makes a new
    value: `later - earlier` are the calls in between, `a + b` those of two ranks. An item counts
    once for each path that it brings tokens: a hit where a graph ran it, or a miss.

    Attributes:
        calls: calls of the encoder.
        items: items that they ran: of those that ranks share, this rank's.
        counts: runs and items, by how they ran.
        reasons: why items ran eagerly -> how many, counted by path.
        known: the encoder's paths; a question about another one is an error.
    """

    calls: int = 0
    items: int = 0
    counts: dict[Served, Count] = dataclasses.field(default_factory=dict)
    reasons: dict[str, int] = dataclasses.field(default_factory=dict)
    known: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def observe(self, ran: Iterable[Ran]) -> None:
        """Count one call, of these runs."""
        items: set[int] = set()
        for run in ran:
            items.update(run.items)
            served = Served(run.path, run.budget, sum(run.tokens))
            before = self.counts.get(served, NONE)
            self.counts[served] = Count(before.runs + 1, before.items + len(run.items))
            if run.budget is None:
                self.reasons[run.why] = self.reasons.get(run.why, 0) + len(run.items)
        self.calls, self.items = self.calls + 1, self.items + len(items)

    def copy(self) -> EncoderStats:
        """The counts as they stand."""
        counts, reasons = dict(self.counts), dict(self.reasons)
        return EncoderStats(self.calls, self.items, counts, reasons, self.known)

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths that ran."""
        return tuple(dict.fromkeys(served.path for served in self.counts))

    def hits(self, path: str | None = None) -> int:
        """Items that a graph ran, of one path or of all."""
        return sum(count.items for served, count in self._of(path) if served.budget is not None)

    def misses(self, path: str | None = None) -> int:
        """Items that ran eagerly, of one path or of all."""
        return sum(count.items for served, count in self._of(path) if served.budget is None)

    def hit_rate(self, path: str | None = None) -> float:
        """The share of items that a graph ran, 0 to 1; 0 where there was none."""
        items = sum(count.items for _, count in self._of(path))
        return self.hits(path) / items if items else 0.0

    def tokens(self, path: str | None = None) -> int:
        """True tokens, of one path or of all."""
        return sum(served.tokens * count.runs for served, count in self._of(path))

    def padding(self, path: str | None = None) -> int:
        """Padding tokens of graphs, of one path or of all."""
        return sum(
            (served.budget - served.tokens) * count.runs
            for served, count in self._of(path)
            if served.budget is not None
        )

    def histogram(self, path: str) -> dict[int, int]:
        """Tokens of a run -> how many runs of them a path had: what budgets are planned from."""
        found: dict[int, int] = {}
        for served, count in self._of(path):
            found[served.tokens] = found.get(served.tokens, 0) + count.runs
        return dict(sorted(found.items()))

    def _of(self, path: str | None) -> Iterable[tuple[Served, Count]]:
        known = tuple(dict.fromkeys((*self.known, *self.paths)))
        if path is not None and known and path not in known:
            raise SpecError(
                f"path={path!r}: the encoder has the paths {sorted(known)}."
                f"{text.did_you_mean(path, known)} Name one of those."
            )
        return [pair for pair in self.counts.items() if path in (None, pair[0].path)]

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def as_text(self) -> str:
        """A table by path and budget, then why items ran eagerly."""
        rows: dict[tuple[str, int | None], list[int]] = {}
        for served, (runs, items) in self.counts.items():
            row = rows.setdefault((served.path, served.budget), [0, 0, 0, 0])
            tokens = served.tokens * runs
            padding = 0 if served.budget is None else served.budget * runs - tokens
            for i, more in enumerate((runs, items, tokens, padding)):
                row[i] += more
        places = {path: i for i, path in enumerate(self.paths)}
        order = sorted(rows, key=lambda key: (places[key[0]], key[1] is None, key[1] or 0))
        cells = [
            (path, "eager" if budget is None else budget, *rows[path, budget])
            for path, budget in order
        ]
        head = ("path", "ran as", "runs", "items", "tokens", "padding")
        parts = [self.line(), *([text.table(head, cells)] if cells else [])]
        if self.reasons:
            why = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
            parts.append(text.table(("eager because", "items"), why))
        return "\n\n".join(parts)

    def line(self) -> str:
        """All of it in one line, for a log."""
        parts = []
        for path in self.paths:
            rows = sum((s.budget or 0) * count.runs for s, count in self._of(path))
            share = f", {self.padding(path) / rows:.1%} padding" if rows else ""
            parts.append(f"{path}: {self.hits(path)} by graph{share}, {self.misses(path)} eagerly")
        head = f"encoder: {text.count(self.calls, 'call')}, {text.count(self.items, 'item')}"
        return "; ".join([head, *parts])

    def __add__(self, other: EncoderStats) -> EncoderStats:
        return self._with(other, 1)

    def __sub__(self, earlier: EncoderStats) -> EncoderStats:
        return self._with(earlier, -1)

    def _with(self, other: EncoderStats, sign: int) -> EncoderStats:
        counts = {
            key: Count(*(
                mine + sign * theirs
                for mine, theirs in zip(self.counts.get(key, NONE), other.counts.get(key, NONE))
            ))
            for key in {**self.counts, **other.counts}
        }  # fmt: skip
        reasons = {
            why: self.reasons.get(why, 0) + sign * other.reasons.get(why, 0)
            for why in {**self.reasons, **other.reasons}
        }
        return EncoderStats(
            self.calls + sign * other.calls,
            self.items + sign * other.items,
            {key: count for key, count in counts.items() if count != NONE},
            {why: count for why, count in reasons.items() if count},
            tuple(dict.fromkeys((*self.known, *other.known))),
        )

    def __repr__(self) -> str:
        return f"EncoderStats({self.line().removeprefix('encoder: ')})"


class EncoderMemory(dict[str, MemoryTable]):
    """Memory of an encoder's graphs by path, whose pool is one."""

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def as_text(self) -> str:
        """The table of each path, behind its name."""
        return "\n\n".join(f"{path}:\n\n{table.as_text()}" for path, table in self.items())
