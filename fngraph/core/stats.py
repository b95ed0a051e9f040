"""Counts of what the steps ran as, per (tokens, padded tokens, mode), why some ran eagerly, and how
long compiling and captures took."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Self

from fngraph.core import text
from fngraph.core.compiling import Range
from fngraph.core.lookup import Dispatch
from fngraph.core.modes import Mode
from fngraph.core.spec import BatchDescriptor


class Row(NamedTuple):
    """One line of the counts: steps of `num_tokens`, run as `padded` tokens in `mode`."""

    num_tokens: int
    padded: int
    mode: Mode
    steps: int


class Took(NamedTuple):
    """Captures of one key, or compilations of one piece: how many, and whole microseconds in all,
    so that sums are exact."""

    times: int
    us: int

    @property
    def ms(self) -> float:
        """Milliseconds in all."""
        return self.us / 1000


CaptureKey = tuple[Mode, BatchDescriptor, bool]
"""Mode and descriptor of a key, and whether it was captured in a step, which had to wait for it."""


class OfShape(NamedTuple):
    """What ran at one exact shape of a batch without a spec: steps, and captures; more than one
    of these where it was let go for others and came back."""

    steps: int
    captures: int


class CompileKey(NamedTuple):
    """What was made of a piece.

    Attributes:
        piece: a distinct one, "piece 0".
        sizes: what the code is for.
        kernels: how many kernels of Inductor's it has.
        loaded: whether it was found on disk, and nothing was compiled.
    """

    piece: str
    sizes: Range
    kernels: int
    loaded: bool


class Stats:
    """What the steps ran as.

    `observe` counts in place, since it runs once a step (0.3 us); everything else reads, or
    makes a new value: `later - earlier` are the steps in between, `a + b` those of two ranks.

    Attributes:
        counts: (num_tokens, padded tokens, mode) -> steps.
        reasons: why steps ran eagerly -> how many did.
        captures: (mode, descriptor, whether in a step) -> how often and how long it was captured.
        compiles: what was made of a piece -> likewise, for code that Inductor has made.
        passes: a pass that matched, by name -> how often, in all programs that were traced.
        shapes: exact shapes of batches without a spec, "float32[64, 4]" -> what ran at them.
        verified: steps that ran a second time through bare `forward`.
        differences: those of them that came to something else.
        unverified: why steps whose turn it was did not -> how many.
    """

    __slots__ = (
        "captures", "compiles", "counts", "differences", "passes", "reasons", "shapes",
        "unverified", "verified",
    )  # fmt: skip

    def __init__(
        self,
        counts: Mapping[tuple[int, int, Mode], int] | None = None,
        reasons: Mapping[str, int] | None = None,
        captures: Mapping[CaptureKey, Took] | None = None,
        compiles: Mapping[CompileKey, Took] | None = None,
        passes: Mapping[str, int] | None = None,
        shapes: Mapping[str, OfShape] | None = None,
        verified: int = 0,
        differences: int = 0,
        unverified: Mapping[str, int] | None = None,
    ) -> None:
        self.counts = dict(counts or {})
        self.reasons = dict(reasons or {})
        self.captures = dict(captures or {})
        self.compiles = dict(compiles or {})
        self.passes = dict(passes or {})
        self.shapes = dict(shapes or {})
        self.verified, self.differences = verified, differences
        self.unverified = dict(unverified or {})

    def observe(self, num_tokens: int, ran: Dispatch) -> None:
        """Counts one step of `num_tokens` true tokens that ran as `ran`."""
        mode, descriptor, reason = ran
        row = (num_tokens, descriptor[0], mode)
        counts = self.counts
        counts[row] = counts.get(row, 0) + 1
        if mode is Mode.NONE:
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    def observe_capture(
        self, mode: Mode, descriptor: BatchDescriptor, us: int, in_step: bool = False
    ) -> None:
        """Counts one capture of a key, which took `us` microseconds."""
        times, before = self.captures.get((mode, descriptor, in_step), (0, 0))
        self.captures[mode, descriptor, in_step] = Took(times + 1, before + us)

    def observe_compile(self, made: CompileKey, us: int) -> None:
        """Counts one artefact of a piece, which took `us` microseconds to make or to load."""
        times, before = self.compiles.get(made, (0, 0))
        self.compiles[made] = Took(times + 1, before + us)

    def observe_passes(self, matches: Mapping[str, int]) -> None:
        """Counts what the passes over one program have matched, each by its name."""
        for name, count in matches.items():
            if count:
                self.passes[name] = self.passes.get(name, 0) + count

    def of_shape(self, shape: str) -> Self:
        """The same, all of which ran at one exact shape."""
        made = self.copy()
        made.shapes[shape] = OfShape(self.steps, sum(took.times for took in self.captures.values()))
        return made

    @property
    def compiled(self) -> int:
        """Compilations counted; what was found on disk is none."""
        return sum(took.times for made, took in self.compiles.items() if not made.loaded)

    @property
    def steps(self) -> int:
        """Steps counted."""
        return sum(self.counts.values())

    def share(self, mode: Mode | str) -> float:
        """The share of steps that ran as this runtime mode, 0 to 1; 0 where none ran at all."""
        mode = Mode.parse(mode)
        ran = sum(count for (_, _, as_mode), count in self.counts.items() if as_mode is mode)
        return ran / self.steps if self.counts else 0.0

    @property
    def tokens(self) -> int:
        """True tokens of all steps."""
        return sum(num_tokens * count for (num_tokens, _, _), count in self.counts.items())

    @property
    def padding(self) -> int:
        """Padding tokens of all steps."""
        return sum((padded - true) * count for (true, padded, _), count in self.counts.items())

    def rows(self) -> tuple[Row, ...]:
        """The counts, most frequent first."""
        rows = (Row(*key, steps) for key, steps in self.counts.items())
        return tuple(sorted(rows, key=lambda row: (-row.steps, row.num_tokens, row.padded)))

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def as_text(self, modes: Mode | str | None = None, sizes: tuple[int, ...] = ()) -> str:
        """A Markdown table by falling count, then the reasons of eager steps.

        Args:
            modes, sizes: what was configured, for the header.

        Source: the columns are those of vLLM 0.33's `CUDAGraphLogging`; the reasons are ours.
        """
        head = [f"modes: {modes}"] if modes is not None else []
        head += [f"sizes: {text.ranges(sizes)}"] if sizes else []
        rows = [
            (r.num_tokens, r.padded, r.padded - r.num_tokens, r.mode, r.steps) for r in self.rows()
        ]
        parts = ["\n".join(head)] if head else []
        parts.append(text.table(("tokens", "padded", "padding", "mode", "count"), rows))
        if self.reasons:
            why = sorted(self.reasons.items(), key=lambda item: (-item[1], item[0]))
            parts.append(text.table(("eager because", "count"), why))
        if self.verified or self.unverified:
            came = [("the same", self.verified - self.differences), ("else", self.differences)]
            came += [(f"not run: {why}", n) for why, n in sorted(self.unverified.items())]
            parts.append(text.table(("verified: bare forward came to", "count"), came))
        if self.captures:
            slowest = sorted(self.captures.items(), key=lambda item: -item[1].us)
            taken = [(mode, key, "in a step" if in_step else "ahead", took.times, f"{took.ms:.1f}")
                     for (mode, key, in_step), took in slowest]  # fmt: skip
            parts.append(text.table(("captured", "key", "when", "times", "ms"), taken))
        if self.compiles:
            made = [
                (*key[:2], "loaded" if key.loaded else "compiled", key.kernels, took.times,
                 f"{took.ms:.1f}")
                for key, took in self.compiles.items()
            ]  # fmt: skip
            parts.append(text.table(("piece", "sizes", "was", "kernels", "times", "ms"), made))
        if self.shapes:
            ran = [(shape, *both) for shape, both in self.shapes.items()]
            parts.append(text.table(("exact shapes", "steps", "captures"), ran))
        if self.passes:
            parts.append(text.table(("pass", "matches"), list(self.passes.items())))
        return "\n\n".join(parts)

    def copy(self) -> Self:
        """The counts as they stand, to subtract later."""
        return type(self)(
            self.counts, self.reasons, self.captures, self.compiles, self.passes, self.shapes,
            self.verified, self.differences, self.unverified,
        )  # fmt: skip

    def __add__(self, other: Stats) -> Stats:
        return self._with(other, 1)

    def __sub__(self, earlier: Stats) -> Stats:
        return self._with(earlier, -1)

    def _with(self, other: Stats, sign: int) -> Stats:
        return Stats(
            _sum(self.counts, other.counts, sign),
            _sum(self.reasons, other.reasons, sign),
            _sum_took(self.captures, other.captures, sign),
            _sum_took(self.compiles, other.compiles, sign),
            _sum(self.passes, other.passes, sign),
            _sum_of_shapes(self.shapes, other.shapes, sign),
            self.verified + sign * other.verified,
            self.differences + sign * other.differences,
            _sum(self.unverified, other.unverified, sign),
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Stats):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in self.__slots__)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        shares = (f"{m} {self.share(m):.0%}" for m in (Mode.FULL, Mode.PIECEWISE, Mode.NONE))
        return f"Stats({text.count(self.steps, 'step')}: {', '.join(shares)})"


_NONE, _NOTHING = Took(0, 0), OfShape(0, 0)


def _sum(one: Mapping, other: Mapping, sign: int) -> dict:
    both = {key: one.get(key, 0) + sign * other.get(key, 0) for key in {**one, **other}}
    return {key: count for key, count in both.items() if count}


def _sum_took(one: Mapping, other: Mapping, sign: int) -> dict:
    pairs = {key: (one.get(key, _NONE), other.get(key, _NONE)) for key in {**one, **other}}
    took = {
        key: Took(mine.times + sign * theirs.times, mine.us + sign * theirs.us)
        for key, (mine, theirs) in pairs.items()
    }
    return {key: both for key, both in took.items() if both.times}


def _sum_of_shapes(one: Mapping, other: Mapping, sign: int) -> dict:
    pairs = {key: (one.get(key, _NOTHING), other.get(key, _NOTHING)) for key in {**one, **other}}
    ran = {
        key: OfShape(*(mine + sign * theirs for mine, theirs in zip(*both)))
        for key, both in pairs.items()
    }
    return {key: both for key, both in ran.items() if any(both)}
