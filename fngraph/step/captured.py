"""`Captured`: bound leaves, static buffers and one replay a key; calling it is one step.

    batch.spec -> dispatch -> stage -> replay -> own

The one stage with state: it owns memory, and it counts what it did. Most of its methods are the
functions of the same name under `fngraph/step/`, a file for each idea.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Dispatch,
    DispatchTable,
    Explanation,
    Limits,
    Stats,
    dispatch,
    explain,
)
from fngraph.core.memory import MemoryTable
from fngraph.errors import SpecError
from fngraph.fx.ambient import Ambient
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.replay import Replay
from fngraph.graphs.staging.buffers import StaticBuffers
from fngraph.graphs.staging.ring import Ring
from fngraph.stages import Compiled
from fngraph.step.adapter_slots import load_slot
from fngraph.step.ambient import under_ambient
from fngraph.step.assemble import Assemble
from fngraph.step.binding import Binding
from fngraph.step.book import Book, Key
from fngraph.step.budget import memory
from fngraph.step.call import call
from fngraph.step.entry import Entry
from fngraph.step.host_batch import host_batch
from fngraph.step.inside import show_ranges, times
from fngraph.step.keys import capture_all, capture_some, captured_replay, recapture, release
from fngraph.step.obtain import refused
from fngraph.step.prepared import LastCall, Prepared
from fngraph.step.rebind import rebind
from fngraph.step.sleep import sleep, wake
from fngraph.step.static_buffer import static_buffer
from fngraph.step.tables import Tables


@dataclasses.dataclass(frozen=True, eq=False)
class Captured:
    """A step over bound weights and state; a mapping from descriptors to replays.

    Attributes:
        binding: held and donated leaves, and their addresses.
        static: buffers of the batch's leaves, read by every key.
        constants: of the trace, on the device.
        outputs: static output buffers, written by every key.
        borrow: whether results are views of them, good until the next call.
        assemble: results and donated containers to `forward`'s whole output.
        replays: what has been captured.
        entry: how a call's arguments are read.
        ring: host memory in which batches wait for their graphs.
        prepared: what a batch's counts decide, by those counts.
        last_call: what it found, for the next one.
        siblings: the step for each ambient state that calls have come under; itself for its own.
        stats: what ran, counted.
        tables: of the batch's leaves that are device state, `rows="changed"`.
        book: what is kept of the keys beside their replays.
    """

    compiled: Compiled
    binding: Binding
    recorder: Recorder
    static: StaticBuffers
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    borrow: bool
    assemble: Assemble
    replays: dict[Key, Replay]
    stats: Stats
    entry: Entry
    ring: Ring
    prepared: dict[tuple[Any, ...], Prepared]
    last_call: LastCall
    book: Book
    siblings: dict[Ambient, Captured] = dataclasses.field(default_factory=dict)
    tables: Tables | None = None

    @property
    def table(self) -> DispatchTable:
        """The dispatch table."""
        return self.compiled.lowered.table

    @property
    def limits(self) -> Limits:
        """The bounds of every step."""
        return self.compiled.lowered.limits

    @property
    def guards(self) -> bool:
        """Whether padding and expired results are poisoned."""
        return False

    def guard(self, first: Callable[[], None], sizes: Mapping[str, int]) -> Callable[[], None]:
        """What a key's first node is; a guarded step adds to it."""
        return first

    # what a call does
    __call__ = call
    host_batch = host_batch
    static_buffer = static_buffer
    under_ambient = under_ambient

    # new values for held leaves
    rebind = rebind
    load_slot = load_slot

    # the keys, which come and go
    __getitem__ = captured_replay
    capture_all = capture_all
    capture_some = capture_some
    release = release
    recapture = recapture
    sleep = sleep
    wake = wake

    # keys looked at while they run
    times = times
    show_ranges = show_ranges

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as."""
        return dispatch(self.table, _checked(spec))

    def runs_as(self, spec: BatchSpec) -> Dispatch:
        """As `dispatch`, but NONE where the key has failed in the step that the last call was."""
        chosen, step = self.dispatch(spec), self.last_call.step or self
        key = chosen.mode, chosen.descriptor
        return refused(step, key, spec) if key in step.book.failed else chosen

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does, and why not as anything else."""
        return explain(self.table, _checked(spec))

    @property
    def memory(self) -> MemoryTable:
        """Memory of each key: estimated, measured, last used."""
        return memory(self)

    @property
    def failed(self) -> Mapping[Key, str]:
        """Keys that are served eagerly since their capture failed, and why."""
        return MappingProxyType(self.book.failed)

    def cut(self, outputs: Sequence[torch.Tensor], sizes: dict[str, int]) -> list[torch.Tensor]:
        """Leading slices of outputs, along the dims that depend on T and R."""
        dims = self.compiled.lowered.split.pieces.output_dims
        return [out[tuple(slice(d(**sizes)) for d in ds)] for out, ds in zip(outputs, dims)]

    def __iter__(self) -> Iterator[BatchDescriptor]:
        return iter(descriptor for _, descriptor in self.replays)

    def __len__(self) -> int:
        return len(self.replays)

    def __repr__(self) -> str:
        done = f"{len(self.replays)} of {len(self.table)} keys on {self.recorder.name}"
        asleep = ", asleep" if self.book.asleep else ""
        return f"{type(self).__name__}({done}{asleep}; {self.table!r})"


def _checked(spec: BatchSpec) -> BatchSpec:
    if not isinstance(spec, BatchSpec):
        raise SpecError(f"expected a BatchSpec, got {type(spec).__name__}. Pass batch.spec")
    return spec
