"""What a run did, counted: steps, tokens and padding by kind of batch, mode and key."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import fngraph as fg
from fngraph.models.serving.loop import Served, each


class Line(NamedTuple):
    """Steps of one kind that ran as one key.

    Attributes:
        kind: decode, verify, prefill or mixed; "cascade" before it and "lora" behind it.
        key: None for mode NONE, where each batch is a key of its own.
        tokens: true tokens of all these steps.
        padding: tokens that were added to them.
        new: tokens that requests got out of them.
        reused: tokens that requests found in blocks, in place of computing them.
    """

    kind: str
    mode: fg.Mode
    key: fg.BatchDescriptor | None
    steps: int = 0
    tokens: int = 0
    padding: int = 0
    new: int = 0
    reused: int = 0


class Tally:
    """Counts of the steps that went by: `for one in tally.watch(serve(...))`."""

    def __init__(self, served: Iterable[Served] = ()) -> None:
        self._lines: dict[tuple, Line] = {}
        for _ in self.watch(served):
            pass

    def watch(self, served: Iterable[Served]) -> Iterator[Served]:
        """Count steps and pass them on."""
        how = "pass tally.watch(serve(steps, cache, ...))"
        for one in each(Served, served, "Tally.watch", how):
            spec, (mode, key, _) = one.spec, one.ran
            kind = "cascade " * spec.cascade + one.kind + " lora" * (spec.adapters > 0)
            of = (kind, mode, None if mode is fg.Mode.NONE else key)
            line = self._lines.get(of) or Line(*of)
            self._lines[of] = line._replace(
                steps=line.steps + 1,
                tokens=line.tokens + spec.num_tokens,
                padding=line.padding + key.num_tokens - spec.num_tokens,
                new=line.new + sum(len(event.tokens) for event in one.events),
                reused=line.reused + one.reused,
            )
            yield one

    @property
    def lines(self) -> tuple[Line, ...]:
        """Most steps first."""
        return tuple(sorted(self._lines.values(), key=lambda line: -line.steps))

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of batches that there were."""
        return frozenset(line.kind for line in self._lines.values())

    def total(self, count: str = "steps", mode: fg.Mode | str | None = None) -> int:
        """Sum of one count of `Line`, over all lines or those of a mode."""
        asked = None if mode is None else fg.Mode.parse(mode)
        return sum(getattr(x, count) for x in self.lines if asked is None or x.mode is asked)

    def share(self, mode: fg.Mode | str, count: str = "steps") -> float:
        """The share of steps, or of another count, that ran in a mode; 0 to 1."""
        return self.total(count, mode) / (self.total(count) or 1)

    def __repr__(self) -> str:
        kinds = ", ".join(sorted(self.kinds))
        return f"Tally({self.total()} steps, {self.total('new')} new tokens; {kinds})"

    def _repr_html_(self) -> str:
        return fg.core.text.html(self.as_text())

    def as_text(self) -> str:
        """A Markdown table, most steps first."""
        head = ("batch", "mode", "key", "steps", "tokens", "padding", "new", "reused")
        return fg.core.text.table(
            head, [(kind, mode, key or "", *counts) for kind, mode, key, *counts in self.lines]
        )
