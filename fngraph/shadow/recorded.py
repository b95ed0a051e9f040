"""`RecordedStep`: what each of the last steps was, and how long it took; `step.log` has it.

It costs a step some us on the host: two looks at the clock, and on CUDA two events. They are read
when the log is.
"""

from __future__ import annotations

import collections
import time
from typing import Any, NamedTuple

import torch

from fngraph.core import BatchDescriptor, BatchSpec, Flown, KeyLog, KeyPart, Log, Mode
from fngraph.core.dispatching import Allowed
from fngraph.core.lookup import Dispatch
from fngraph.core.spec import COUNTS, Key
from fngraph.executable import Executable
from fngraph.graphs.inside import short_name
from fngraph.graphs.replay import EagerCall
from fngraph.options import Verify
from fngraph.shadow.verified import VerifiedStep
from fngraph.step.call import EXACT
from fngraph.step.keys import Shared
from fngraph.step.step import R, Step, make_step
from fngraph.step.times import Times
from fngraph.torch_facts.tracing import run_by_python


class _Seen(NamedTuple):
    began: int  # ns
    host: int
    spec: BatchSpec
    ran: Dispatch | None
    events: tuple[Any, Any] | None


class RecordedStep(VerifiedStep[R]):
    """A `Step` that keeps what its last calls were."""

    def __init__(self, shared: Shared, executable: Executable, last: int, verify: Verify) -> None:
        super().__init__(shared, executable, verify)
        self._seen: collections.deque[_Seen] = collections.deque(maxlen=last)
        self._measured: dict[Key, Times] = {}
        self._on_cuda = shared.recorder.device.type == "cuda"

    @run_by_python
    def __call__(self, /, *args: Any, allowed: Allowed = None, **kwargs: Any) -> R:
        """As `VerifiedStep.__call__`."""
        with self.turn.lock:
            events = self._marks()
            if events is not None:
                events[0].record()
            began = time.perf_counter_ns()
            result = VerifiedStep.__call__(self, *args, allowed=allowed, **kwargs)
            host = time.perf_counter_ns() - began
            if events is not None:
                events[1].record()
            spec, ran = self._what(args, kwargs, allowed)
            self._seen.append(_Seen(began, host, spec, ran, events))
        return result

    def _marks(self) -> tuple[Any, Any] | None:
        if not self._on_cuda:
            return None
        one, other = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        return one, other

    def _what(self, args: Any, kwargs: Any, allowed: Allowed) -> tuple[BatchSpec, Dispatch | None]:
        """The counts of a batch, and what it ran as."""
        entry, keys = self.entry, self.last.keys
        values, allowed = entry.given(args, kwargs, allowed)
        field = entry.spec_field
        spec = EXACT if field is None else getattr(values[entry.staged_at], field)
        if allowed is not None:
            return spec, keys.prepare(spec, allowed).chosen
        prepared = keys.prepared.get(spec[COUNTS])
        return spec, None if prepared is None else prepared.chosen

    def times(self, descriptor: BatchDescriptor, repeats: int = 20) -> Times:
        """As `Step.times`, whose parts the log then has."""
        found = Step.times(self, descriptor, repeats)
        replay = self[descriptor]
        self._measured[replay.mode, descriptor] = found
        return found

    @property
    def log(self) -> Log:
        """What the last steps were, and what keys cost. Device times are waited for."""
        with self.turn.lock:
            seen = tuple(self._seen)
        self.recorder.synchronize()
        first = seen[0].began if seen else 0
        steps = tuple(_flown(one, first) for one in seen)
        stats = self.stats
        counted = tuple((r.num_tokens, r.padded, r.mode.name, r.steps) for r in stats.rows())
        compiles = tuple(
            (made.piece, str(made.sizes), made.kernels, made.loaded, float(took.us))
            for made, took in stats.compiles.items()
        )
        name = getattr(self.main.executable.args.signature.fn, "__name__", "forward")
        device = self.recorder.device
        where = torch.cuda.get_device_name(device) if self._on_cuda else self.recorder.name
        return Log(
            f"{name} on {where}", steps, tuple(map(self._key_log, self.memory.rows)), compiles,
            counted, dict(stats.reasons), (stats.verified, stats.differences),
        )  # fmt: skip

    def _key_log(self, row: Any) -> KeyLog:
        took = [(in_step, one) for (*key, in_step), one in self.stats.captures.items()
                if tuple(key) == (row.mode, row.key)]  # fmt: skip
        replay = self.main.replays.get((row.mode, row.key))
        times = self._measured.get((row.mode, row.key))
        parts: tuple[KeyPart, ...] = ()
        if times is not None and replay is not None:
            parts = tuple(
                KeyPart(name, us, paced, isinstance(call, EagerCall))
                for (name, us), paced, call in zip(times.rows, times.paced, replay.calls)
            )
        return KeyLog(
            short_name(row.mode, row.key), row.key.num_tokens, tuple(row.estimated),
            None if row.measured is None else tuple(row.measured),
            float(sum(one.us for _, one in took)),
            sum(one.times for in_step, one in took if in_step), parts,
        )  # fmt: skip


def _flown(one: _Seen, first: int) -> Flown:
    device = None if one.events is None else one.events[0].elapsed_time(one.events[1]) * 1e3
    mode, descriptor, reason = one.ran or (Mode.NONE, one.spec.descriptor(), "it is not known")
    key = "" if mode is Mode.NONE else short_name(mode, descriptor)
    padded = descriptor.num_tokens
    return Flown((one.began - first) / 1e3, one.spec, mode, key, padded, reason, one.host / 1e3,
                 device)  # fmt: skip


def make_recorded(
    last: int, verify: Verify, executable: Executable, values: Any, **options: Any
) -> Step[Any]:
    """`make_step`, of a step that keeps what its last calls were."""
    return make_step(
        executable, values, make=lambda shared, made: RecordedStep(shared, made, last, verify),
        **options,
    )  # fmt: skip
