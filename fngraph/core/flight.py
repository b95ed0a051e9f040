"""The flight recorder: a recorded stream of specs, replayed offline against any table; and the log
of a run, in which each step says what it was."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from fngraph.core import text
from fngraph.core.dispatching import Allowed, dispatch
from fngraph.core.foreign import what_is_off
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


class Flight(NamedTuple):
    """A recorded stream of specs.

    Record by appending each step's `batch.spec` to a list (or a bounded deque), and make a
    `Flight(tuple(recorded))` when you want to look.

    Attributes:
        specs: one a step, in order.
    """

    specs: tuple[BatchSpec, ...]

    def replay(self, table: DispatchTable, allowed: Allowed = None) -> Replayed:
        """What each step would run as under `table`. Raises as `dispatch`."""
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
        counts: dict[int, int] = {}
        for spec in self.specs:
            if spec.query_len == query_len:
                counts[spec.num_tokens] = counts.get(spec.num_tokens, 0) + 1
        return counts

    def dumps(self) -> str:
        """The stream as text: a JSON list of the fields that are set, one spec a line."""
        import json  # 2 ms that dispatch never needs

        return "\n".join(json.dumps(_fields(spec)) for spec in self.specs)

    @classmethod
    def loads(cls, dumped: str) -> Flight:
        """The stream that `dumps` wrote.

        Raises:
            SpecError: a line that is not a spec.
        """
        lines = enumerate(dumped.splitlines(), 1)
        return cls(tuple(_spec(i, line) for i, line in lines if line.strip()))

    def __repr__(self) -> str:
        return f"Flight({text.count(len(self.specs), 'step')})"


class Flown(NamedTuple):
    """One step.

    Attributes:
        at: us since the first step of the log began.
        key: of what it ran as, in a few letters, "FULL 8x8 q1"; "" for none.
        padded: tokens of the key; the batch's own, where it ran without one.
        reason: why it ran as that.
        host: us that the call took the host.
        device: us from its first to its last work on the device; None: that was not measured.
    """

    at: float
    spec: BatchSpec
    mode: Mode
    key: str
    padded: int
    reason: str
    host: float
    device: float | None = None

    @property
    def padding(self) -> int:
        """Tokens of padding."""
        return self.padded - self.spec.num_tokens


class KeyPart(NamedTuple):
    """A graph or an eager call of a key.

    Attributes:
        us: on the device, which has all of it to do and waits for nobody.
        paced: as the host launches it; what that is longer by is a gap, in which the device waits.
        is_eager: a call between two graphs.
    """

    name: str
    us: float
    paced: float
    is_eager: bool

    @property
    def gap(self) -> float:
        """us that the device waits for the host."""
        return max(self.paced - self.us, 0.0)


class KeyLog(NamedTuple):
    """A key, and what it costs.

    Attributes:
        tokens: of the key.
        estimated, measured: bytes of its intermediates and its graphs; None: it is not captured.
        captured: us that captures of it took, all together.
        in_step: how many of those a step had to wait for.
        parts: in order, where `step.times(...)` has measured them.
    """

    key: str
    tokens: int
    estimated: tuple[int, int]
    measured: tuple[int, int] | None = None
    captured: float = 0.0
    in_step: int = 0
    parts: tuple[KeyPart, ...] = ()


class Log(NamedTuple):
    """What the last steps of a run were, and what its keys cost. `step.log` is one.

    Attributes:
        title: of the function, and the device it ran on.
        steps: the last ones, in order.
        keys: of the dispatch table.
        compiles: of pieces, as (piece, sizes, kernels, whether it was loaded, us).
        counted: of all steps, not the last ones alone: (tokens, padded tokens, mode, steps).
        eager: why steps ran eagerly, with how many did.
        verified: steps that were verified, and those of them that differ.
    """

    title: str
    steps: tuple[Flown, ...]
    keys: tuple[KeyLog, ...] = ()
    compiles: tuple[tuple[str, str, int, bool, float], ...] = ()
    counted: tuple[tuple[int, int, str, int], ...] = ()
    eager: Mapping[str, int] = {}
    verified: tuple[int, int] = (0, 0)

    @property
    def flight(self) -> Flight:
        """The specs alone, to be replayed against other tables."""
        return Flight(tuple(step.spec for step in self.steps))

    def as_text(self, last: int = 20) -> str:
        """A table of the last steps: spec, key, reason, us."""
        rows = [
            (f"{s.at / 1000:.3f}", s.spec.num_tokens, s.spec.num_reqs, s.key or str(s.mode),
             s.padding, f"{s.host:.1f}", "" if s.device is None else f"{s.device:.1f}", s.reason)
            for s in self.steps[-last:]
        ]  # fmt: skip
        header = ("at ms", "tokens", "requests", "ran as", "padding", "host us", "device us", "why")
        return f"{self!r}\n\n{text.table(header, rows)}"

    def _repr_html_(self) -> str:
        return text.html(self.as_text())

    def __repr__(self) -> str:
        return f"Log({self.title}: {text.count(len(self.steps), 'step')})"

    def dumps(self) -> str:
        """The log as JSON, for `loads`."""
        import json

        reasons = list(dict.fromkeys(step.reason for step in self.steps))
        made: dict[str, Any] = {name: getattr(self, name) for name in self._fields}
        made |= {"eager": dict(self.eager), "format": FORMAT, "reasons": reasons}
        made["steps"] = [
            [s.at, _fields(s.spec), s.mode.name, s.key, s.padded, reasons.index(s.reason), s.host,
             s.device]
            for s in self.steps
        ]  # fmt: skip
        return json.dumps(made)

    @classmethod
    def loads(cls, dumped: str) -> Log:
        """The log that `dumps` wrote.

        Raises:
            SpecError: it is no log, or another version's.
        """
        import json

        try:
            found = json.loads(dumped)
            if found.pop("format") != FORMAT:
                raise ValueError(f"not of the format {FORMAT!r}")
            reasons = found.pop("reasons")
            found["steps"] = tuple(
                Flown(at, _read(spec), Mode.parse(mode), key, padded, reasons[why], host, device)
                for at, spec, mode, key, padded, why, host, device in found["steps"]
            )
            found["keys"] = tuple(_key_log(*one) for one in found["keys"])
            found["compiles"] = tuple((a, b, c, d, e) for a, b, c, d, e in found["compiles"])
            found["counted"] = tuple((a, b, c, d) for a, b, c, d in found["counted"])
            verified, differ = found["verified"]
            return cls(**{**found, "verified": (verified, differ)})
        except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
            off = what_is_off(dumped, error, FORMAT)
            raise SpecError(f"this is not a log that step.log.save wrote: {off}. {MADE}") from error

    def save(self, path: str | Path) -> None:
        """Write it, for `python -m fngraph report FILE`."""
        Path(path).write_text(self.dumps() + "\n")

    def save_trace(self, path: str | Path) -> None:
        """Write it as a trace that Perfetto (ui.perfetto.dev) and TensorBoard open."""
        import json

        made = {"displayTimeUnit": "ms", "traceEvents": list(trace_events(self))}
        Path(path).write_text(json.dumps(made))


FORMAT = "fngraph log 1"
MADE = "A step that is captured with record=1000 writes one: step.log.save('run.json')"
"""How to make a file with a log."""


def trace_events(log: Log) -> Iterator[dict[str, Any]]:
    """Events in the format of Chrome's traces, `ts` and `dur` in us: a process of the steps, on the
    host and on the device; one of the keys that were measured, part by part with their gaps; one of
    what was captured and compiled, one after the other."""
    yield from _named(1, "steps", {1: "host", 2: "device"})
    for step in log.steps:
        args = {"tokens": step.spec.num_tokens, "requests": step.spec.num_reqs,
                "padding": step.padding, "why": step.reason}  # fmt: skip
        name = step.key or str(step.mode)
        yield _event(1, 1, name, step.at, step.host, args)
        if step.device is not None:
            yield _event(1, 2, name, step.at, step.device, args)
    measured = [key for key in log.keys if key.parts]
    yield from _named(2, "keys, part by part", {i: key.key for i, key in enumerate(measured, 1)})
    for i, key in enumerate(measured, 1):
        at = 0.0
        for part in key.parts:
            if part.gap:
                yield _event(2, i, "gap", at, part.gap, {"before": part.name})
            yield _event(2, i, part.name, at + part.gap, part.us, {"eager": part.is_eager})
            at += part.gap + part.us
    yield from _named(3, "made, in turn", {1: "captures", 2: "compilations"})
    at = 0.0
    for key in log.keys:
        if key.captured:
            yield _event(3, 1, key.key, at, key.captured, {"in steps": key.in_step})
            at += key.captured
    at = 0.0
    for piece, sizes, kernels, loaded, us in log.compiles:
        yield _event(3, 2, f"{piece} for {sizes}", at, us, {"kernels": kernels, "loaded": loaded})
        at += us


def _event(
    pid: int, tid: int, name: str, at: float, us: float, args: dict[str, Any]
) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "name": name, "ts": at, "dur": us, "args": args}


def _named(pid: int, process: str, threads: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": pid, "tid": 0, "name": "process_name", "args": {"name": process}}
    for tid, name in threads.items():
        yield {"ph": "M", "pid": pid, "tid": tid, "name": "thread_name", "args": {"name": name}}


def _key_log(
    key: str, tokens: int, estimated: Any, measured: Any, captured: float, in_step: int, parts: Any
) -> KeyLog:
    pool, graph = estimated
    taken = None if measured is None else (int(measured[0]), int(measured[1]))
    return KeyLog(key, tokens, (pool, graph), taken, captured, in_step,
                  tuple(KeyPart(*part) for part in parts))  # fmt: skip


def _fields(spec: BatchSpec) -> dict[str, object]:
    plain = BatchSpec(spec.num_tokens, spec.num_reqs)
    changed = {
        name: v for name, v, d in zip(spec._fields, spec, plain) if v != d or name[:4] == "num_"
    }
    return changed | ({"extra": dict(spec.extra)} if spec.extra else {})


def _read(fields: dict[str, Any]) -> BatchSpec:
    return BatchSpec(**{**fields, "host": HostBounds(*fields.get("host", ()))})


def _spec(number: int, line: str) -> BatchSpec:
    import json

    try:
        return _read(json.loads(line))
    except (AttributeError, TypeError, ValueError) as error:
        raise SpecError(
            f"Line {number} of the flight is not a spec: {line!r} ({error})."
        ) from error
