"""The log of a run, in which each step says what it was: as a table, a file, and a trace."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from fngraph.core import text
from fngraph.core.flights.flight import Flight, fields_of, spec_of
from fngraph.core.modes import RUNTIME_MODES, Mode
from fngraph.core.spec import BatchSpec
from fngraph.core.text import what_is_off
from fngraph.errors import SpecError

T = TypeVar("T")


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
        text.expect(int, "how many steps", last=last)
        if last < 0:
            raise SpecError(f"last={last}: pass how many steps, 0 or more")
        rows = [
            (f"{s.at / 1000:.3f}", s.spec.num_tokens, s.spec.num_reqs, s.key or str(s.mode),
             s.padding, f"{s.host:.1f}", "" if s.device is None else f"{s.device:.1f}", s.reason)
            for s in self.steps[max(len(self.steps) - last, 0) :]
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
            [s.at, fields_of(s.spec), s.mode.name, s.key, s.padded, reasons.index(s.reason), s.host,
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

        text.expect(str, "what dumps() gave", dumped=dumped)
        try:
            found = json.loads(dumped)
            if found.pop("format") != FORMAT:
                raise ValueError(f"not of the format {FORMAT!r}")
            reasons = found.pop("reasons")
            found["title"] = _checked(str, found["title"])
            found["steps"] = tuple(
                Flown(_number(at), spec_of(spec), _mode(mode), _checked(str, key),
                      _checked(int, padded), _one_of(reasons, why), _number(host),
                      None if device is None else _number(device))
                for at, spec, mode, key, padded, why, host, device in found["steps"]
            )  # fmt: skip
            found["keys"] = tuple(_key_log(*one) for one in found["keys"])
            found["compiles"] = tuple(
                (_checked(str, a), _checked(str, b), _checked(int, c), bool(d), _number(e))
                for a, b, c, d, e in found["compiles"]
            )
            found["counted"] = tuple(
                (_checked(int, a), _checked(int, b), _mode(c).name, _checked(int, d))
                for a, b, c, d in found["counted"]
            )
            found["eager"] = {why: _checked(int, n) for why, n in found["eager"].items()}
            verified, differ = found["verified"]
            return cls(**{**found, "verified": (_checked(int, verified), _checked(int, differ))})
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


def device_starts(steps: Iterable[Flown]) -> list[float]:
    """us at which each step begins on the device: not before it is called, and not before the one
    ahead of it is through there, which the host need not wait for."""
    found, free = [], 0.0
    for step in steps:
        found.append(max(step.at, free))
        free = found[-1] + (step.device or 0.0)
    return found


def trace_events(log: Log) -> Iterator[dict[str, Any]]:
    """Events in the format of Chrome's traces, `ts` and `dur` in us: a process of the steps, on the
    host and on the device; one of the keys that were measured, part by part with their gaps; one of
    what was captured and compiled, one after the other."""
    yield from _named(1, "steps", {1: "host", 2: "device"})
    for step, began in zip(log.steps, device_starts(log.steps)):
        args = {"tokens": step.spec.num_tokens, "requests": step.spec.num_reqs,
                "padding": step.padding, "why": step.reason}  # fmt: skip
        name = step.key or str(step.mode)
        yield _event(1, 1, name, step.at, step.host, args)
        if step.device is not None:
            yield _event(1, 2, name, began, step.device, args)
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
    made = tuple(
        KeyPart(_checked(str, name), _number(us), _number(paced), bool(is_eager))
        for name, us, paced, is_eager in parts
    )
    bytes_of = _checked(int, pool), _checked(int, graph)
    return KeyLog(
        _checked(str, key), _checked(int, tokens), bytes_of, taken, _number(captured),
        _checked(int, in_step), made,
    )  # fmt: skip


def _checked(kind: type[T], x: Any) -> T:
    if not isinstance(x, kind) or isinstance(x, bool):
        raise TypeError(f"{x!r} is no {kind.__name__}")
    return x


def _one_of(reasons: list[str], why: Any) -> str:
    if _checked(int, why) < 0:
        raise ValueError(f"{why} is no reason's number")
    return _checked(str, reasons[why])


def _number(x: Any) -> float:
    if isinstance(x, bool) or not isinstance(x, int | float) or not math.isfinite(x):
        raise TypeError(f"{x!r} is no number")
    return x


def _mode(name: Any) -> Mode:
    found = Mode.parse(name)
    if found not in RUNTIME_MODES:
        raise ValueError(f"no step runs as {name}")
    return found
