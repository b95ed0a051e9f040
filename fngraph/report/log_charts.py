"""What is drawn of a log: charts of bars, as data. The page and the pictures draw the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fngraph.core import Flown, KeyLog, Log, Mode
from fngraph.core.flights.log import device_starts
from fngraph.core.text import count

MOST_BARS = 60  # of one chart; what more there is, is said
MOST_STEPS = 400  # of the timeline


class BarSpan(NamedTuple):
    """A part of a bar.

    Attributes:
        start, length: in the unit of the chart.
        kind: what it is, one of `KINDS`.
        name: what it says when it is pointed at.
    """

    start: float
    length: float
    kind: str
    name: str


class ChartBar(NamedTuple):
    """One line of a chart."""

    label: str
    note: str
    spans: tuple[BarSpan, ...]


class Chart(NamedTuple):
    """Bars on one scale.

    Attributes:
        about: a sentence on what is to be seen.
        left: what is not shown, "12 keys more".
        whole: the right end of the scale, if it is not that of the longest bar.
    """

    title: str
    about: str
    unit: str
    bars: tuple[ChartBar, ...]
    left: str = ""
    whole: float = 0.0

    @property
    def end(self) -> float:
        """The right end of the scale."""
        return (
            self.whole
            or max((s.start + s.length for bar in self.bars for s in bar.spans), default=0.0)
            or 1.0
        )

    @property
    def kinds(self) -> list[str]:
        """Kinds that there are, in the order of `KINDS`."""
        found = {span.kind for bar in self.bars for span in bar.spans}
        return [kind for kind in KINDS if kind in found]


KINDS = {
    "FULL": "FULL", "PIECEWISE": "PIECEWISE", "NONE": "without a graph", "padding": "padding",
    "graph": "a graph", "eager": "an eager call", "gap": "the device waits for the host",
    "pool": "intermediates", "graphs": "graphs", "ahead": "ahead of the steps",
    "in step": "a step had to wait", "loaded": "loaded from the disk",
}  # fmt: skip
"""Kinds of spans, with what the legend says."""


def charts_of(log: Log) -> list[Chart]:
    """All charts of a log that have something to show.

    Raises:
        TypeError: no log.
    """
    if not isinstance(log, Log):
        raise TypeError(
            f"expected a Log, got {type(log).__name__}. Pass step.log, of a step that was captured "
            "with record=1000, or fg.core.Log.loads(text)"
        )
    charts = [shares(log), ladder(log), timeline(log), parts(log), memory(log), made(log)]
    return [chart for chart in charts if chart.bars]


def stacked(pairs: Sequence[tuple[float, str, str]]) -> tuple[BarSpan, ...]:
    """Lengths, kinds and names one behind the other; nothing of length 0."""
    found, at = [], 0.0
    for length, kind, name in pairs:
        if length > 0:
            found.append(BarSpan(at, length, kind, name))
            at += length
    return tuple(found)


def shares(log: Log) -> Chart:
    """Modes by their share of all steps."""
    steps = {mode.name: 0 for mode in (Mode.FULL, Mode.PIECEWISE, Mode.NONE)}
    for *_, mode, number in log.counted:
        steps[mode] += number
    total = sum(steps.values())
    bars = [
        ChartBar(mode, f"{n / total:.1%} of {count(total, 'step')}",
            stacked([(100 * n / total, mode, f"{count(n, 'step')}")]))
        for mode, n in steps.items() if n
    ]  # fmt: skip
    return Chart("Modes", "What the steps ran as.", "% of steps", tuple(bars), whole=100.0)


def ladder(log: Log) -> Chart:
    """Keys against traffic: true tokens and padding that each has had."""
    by_key: dict[str, list[Flown]] = {key.key: [] for key in sorted(log.keys, key=_by_size)}
    eager = [step for step in log.steps if not step.key]
    for step in log.steps:
        if step.key:
            by_key.setdefault(step.key, []).append(step)
    bars = [_used(name, name.partition(" ")[0], steps) for name, steps in by_key.items() if steps]
    bars += [_used("without a graph", "NONE", eager)] if eager else []
    unused = [name for name, steps in by_key.items() if not steps]
    left = []
    if unused:
        named = ", ".join(unused[:8]) + (" ..." if len(unused) > 8 else "")
        left.append(f"{count(len(unused), 'key')} of {len(by_key)} served no step: {named}")
    if more := _more(bars):
        left.append(f"{more[:-1]}: these had the most tokens.")
        bars = sorted(bars, key=lambda bar: -sum(s.length for s in bar.spans))[:MOST_BARS]
    about = f"Tokens of the last {count(len(log.steps), 'step')}, by the key that served them."
    return Chart("Ladder and traffic", about, "tokens", tuple(bars), " ".join(left))


def _used(name: str, kind: str, steps: Sequence[Flown]) -> ChartBar:
    true = sum(step.spec.num_tokens for step in steps)
    padding = sum(step.padding for step in steps)
    share = padding / max(true + padding, 1)
    spans = stacked([(true, kind, f"{true} true tokens"), (padding, "padding", f"{padding} more")])
    return ChartBar(name, f"{count(len(steps), 'step')}, {share:.0%} padding", spans)


def timeline(log: Log) -> Chart:
    """The last steps in time, on the host and on the device."""
    steps = log.steps[-MOST_STEPS:]
    first = steps[0].at if steps else 0.0

    starts = {"host": [step.at for step in steps], "device": device_starts(steps)}

    def spans(of: str) -> tuple[BarSpan, ...]:
        return tuple(
            BarSpan((at - first) / 1000, us / 1000, s.mode.name,
                 f"{s.key or s.mode.name}: {us:.0f} us, {count(s.spec.num_tokens, 'token')}")
            for s, at in zip(steps, starts[of]) if (us := getattr(s, of)) is not None
        )  # fmt: skip

    bars = [ChartBar(of, f"{sum(s.length for s in found):.1f} ms busy", found)
            for of in ("host", "device") if (found := spans(of))]  # fmt: skip
    about = (
        f"The last {count(len(steps), 'step')}, each from when it was called, or the device free."
    )
    return Chart("Timeline", about, "ms", tuple(bars))


def parts(log: Log) -> Chart:
    """Keys that were measured, part by part, with their gaps."""
    bars = []
    for key in log.keys:
        found: list[tuple[float, str, str]] = []
        for part in key.parts:
            found.append((part.gap, "gap", f"waits {part.gap:.1f} us for {part.name}"))
            kind = "eager" if part.is_eager else "graph"
            found.append((part.us, kind, f"{part.name}: {part.us:.1f} us"))
        spans = stacked(found)
        if spans:
            us, gaps = (sum(s.length for s in spans if (s.kind == "gap") is is_gap)
                        for is_gap in (False, True))  # fmt: skip
            bars.append(ChartBar(key.key, f"{us:.0f} us, gaps {gaps:.0f} us", spans))
    return Chart(
        "Keys, part by part", "As step.times(...) has measured them.", "us",
        tuple(bars[:MOST_BARS]), _more(bars),
    )  # fmt: skip


def memory(log: Log) -> Chart:
    """What each captured key has taken; estimated, where nothing is captured."""
    is_measured = any(key.measured for key in log.keys)
    bars = []
    for key in log.keys:
        taken = key.measured if is_measured else key.estimated
        if taken is not None:
            pool, graphs = (n / 1e6 for n in taken)
            spans = stacked([(pool, "pool", f"{pool:.2f} MB of intermediates"),
                             (graphs, "graphs", f"{graphs:.2f} MB of graphs")])  # fmt: skip
            bars.append(ChartBar(key.key, f"{pool + graphs:.2f} MB", spans))
    about = "What the pool and the graphs grew by for each key, in the order of capture."
    if not is_measured:
        about = "Estimated: nothing is captured."
    return Chart("Memory", about, "MB", tuple(bars[:MOST_BARS]), _more(bars))


def made(log: Log) -> Chart:
    """How long captures and compilations took."""
    bars = [
        ChartBar(key.key, f"{key.captured / 1000:.1f} ms",
            stacked([(key.captured / 1000, "in step" if key.in_step else "ahead", "capture")]))
        for key in log.keys if key.captured
    ]  # fmt: skip
    bars += [
        ChartBar(f"{piece}, {sizes}", f"{us / 1000:.1f} ms, {count(kernels, 'kernel')}",
            stacked([(us / 1000, "loaded" if loaded else "ahead", "compilation")]))
        for piece, sizes, kernels, loaded, us in log.compiles
    ]  # fmt: skip
    about = "Time of captures by key, and of compilations by piece."
    return Chart("Captures and compilations", about, "ms", tuple(bars[:MOST_BARS]), _more(bars))


def _by_size(key: KeyLog) -> tuple[bool, int, str]:
    return not key.key.startswith("FULL"), key.tokens, key.key


def _more(bars: Sequence[ChartBar]) -> str:
    return f"{len(bars) - MOST_BARS} more are not shown." if len(bars) > MOST_BARS else ""
