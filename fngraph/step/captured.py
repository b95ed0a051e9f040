"""`Captured`: bound leaves, static buffers and one replay a key; calling it is one step.

    batch.spec -> dispatch -> stage -> replay -> own

The one stage with state: it owns memory, and it counts what it did. How a call goes is `call.py`,
how keys come and go `keys.py`.
"""

from __future__ import annotations

import contextlib
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
    Mode,
    Stats,
    dispatch,
    explain,
)
from fngraph.core.memory import MemoryTable
from fngraph.errors import SpecError
from fngraph.fx.ambient import Ambient, read
from fngraph.fx.torch_modes import check_no_dispatch_mode
from fngraph.graphs.capture import Replay
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.ring import Ring
from fngraph.graphs.staging import StaticBuffers
from fngraph.stages import Compiled
from fngraph.step.binding import Assemble, Binding
from fngraph.step.book import Book, Key
from fngraph.step.budget import memory
from fngraph.step.call import call, host_batch
from fngraph.step.changed_rows import ChangedRows
from fngraph.step.inside import Times, show_ranges, times
from fngraph.step.keys import capture_all, capture_some, check_key, recapture, refused, release
from fngraph.step.ready import Entry, Hot, Ready
from fngraph.step.rebind import rebind
from fngraph.step.sleep import family, sleep, wake
from fngraph.step.slots import load_slot
from fngraph.step.static_leaf import static_leaf
from fngraph.step.tables import Tables, put_changed


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
        ready: what a batch's counts decide, by those counts.
        hot: what the last call found, for the next one.
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
    replays: dict[tuple[Mode, BatchDescriptor], Replay]
    stats: Stats
    entry: Entry
    ring: Ring
    ready: dict[tuple[Any, ...], Ready]
    hot: Hot
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

    def dispatch(self, spec: BatchSpec) -> Dispatch:
        """What `spec` runs as."""
        return dispatch(self.table, _checked(spec))

    def runs_as(self, spec: BatchSpec) -> Dispatch:
        """As `dispatch`, but NONE where the key has failed in the step that the last call was."""
        chosen, step = self.dispatch(spec), self.hot.step or self
        key = chosen.mode, chosen.descriptor
        return refused(step, key, spec) if key in step.book.failed else chosen

    def explain(self, spec: BatchSpec) -> Explanation:
        """Why `spec` runs as it does, and why not as anything else."""
        return explain(self.table, _checked(spec))

    __call__ = call

    def under_ambient(self) -> Captured:
        """The step for the ambient state of now: traced and captured again, where that matters.

        Raises:
            AmbientError: it does matter, and `on_ambient="error"` was asked for.
        """
        check_no_dispatch_mode()
        ambient = read(self.recorder.device.type)
        step = self.siblings.get(ambient)
        if step is None:
            from fngraph.step.allocate import sibling

            step = self.siblings[ambient] = sibling(self, ambient)
        return step

    def host_batch(self, spec: BatchSpec, **changed: ChangedRows) -> Any:
        """A batch in the ring's next slot, in pinned memory on CUDA: fill its leaves, and pass it.

        Its contents are whatever was last in the slot. It is good for one step, the next one.

        Args:
            changed: for fields with rows="changed", what takes the place of the whole leaf.

        Raises:
            TreeError: a function without a spec, whose batches have exact shapes; or a field that
                takes no `ChangedRows`.
        """
        batch = host_batch(self, spec)
        if changed:
            put_changed(self.tables, batch, changed)
        return batch

    def static_buffer(self, descriptor: BatchDescriptor, leaf: str) -> torch.Tensor:
        """The static buffer of a batch leaf as a key reads it: its leading rows, on the device.

        What writes there (a receive from another rank, the kernel that samples) need not be
        copied: pass the true rows of it as the leaf, of a batch that runs as that key.

            key = step.dispatch(spec).descriptor
            x = step.static_buffer(key, "hidden")[: spec.num_tokens]
            dist.recv(x, src=rank - 1)
            step(cache, Batch(hidden=x, ..., spec=spec))

        Pass its leading rows, from the first one on, and write it on the stream of the steps (or
        one that waits for it): the step before still reads it. Padding is written beyond the true
        rows. The buffers are those of the current ambient state (autocast, ...), and new ones
        after a `rebind` that captured again.

        Args:
            leaf: the field's name, or the path: "hidden" or "batch.hidden".

        Raises:
            SpecError: not a key of the table. TreeError: no such leaf. SleepError: while it sleeps.
        """
        return static_leaf(self.under_ambient(), descriptor, leaf)

    def rebind(self, **held: Any) -> None:
        """New values for held arguments: `step.rebind(params=new)`.

        All is checked first; then leaf by leaf is copied into the bound one, without a second copy
        of the model. A leaf of another shape or dtype gets the new tensor's memory instead, in
        every tree that holds it; if `forward` reads it, it is traced again, and the keys that were
        captured are captured again. Another function that reads it raises `AddressError` at its
        next call, until it is rebound too: `other.rebind(params=params)`.

        Args:
            held: by name, a tree of the bound structure, on any device; or a mapping from some
                paths, as errors write them, to tensors: {"params['head']": x}. It may load what it
                is asked for from a file; each is asked for twice, to check and to copy.

        Raises:
            TreeError: another structure, an unknown path, no tensor, or different values for
                leaves that share memory.
            AddressError: a leaf that is not given has moved.
            SleepError: another shape or dtype, while it sleeps. The same ones can be written then.
            FnGraphError: `forward` refuses the new shapes. Nothing has been written.
            CaptureError: a key cannot be captured again; the others are, or will be when needed.
        """
        rebind(self, held)

    def load_slot(self, slot: int, **held: Any) -> None:
        """Write an adapter into a slot of stacked leaves: `step.load_slot(3, adapters=tree)`.

        Leaf k of the tree goes into `leaf_k[slot]` of the bound one. Nothing is captured again;
        rows of a batch that use the slot compute with the new values from the next call on.

        Args:
            slot: along the first dim of each leaf.
            held: by name, a tree of the bound structure with leaves of one slot, on any device; or
                a mapping from some paths to tensors, as `rebind` takes.

        Raises:
            TreeError: another structure, a slot that is none, or another shape or dtype. Nothing
                has been written.
            AddressError: a bound leaf has moved.
        """
        load_slot(self, slot, held)

    def capture_all(self, progress: bool | str = False) -> None:
        """Capture every key of the table that is not yet, largest first, as far as the memory
        budget goes.

        Raises:
            CaptureError: what was captured before stays.
            SleepError: while it sleeps. AddressError: a bound leaf has moved.
        """
        with self.recorder.turn.taken():
            capture_all(self.under_ambient(), progress)

    def capture_some(self, budget_ms: float) -> int:
        """Capture missing keys between two steps, largest first, until `budget_ms` milliseconds
        are used, but at least one; returns how many keys are missing still.

        Raises:
            CaptureError, SleepError, AddressError: as `capture_all`.
        """
        with self.recorder.turn.taken():
            return capture_some(self.under_ambient(), budget_ms)

    def release(self, *descriptors: BatchDescriptor) -> None:
        """Free the graphs of these keys (none: of all), once the device has done with them.

        A released key that is dispatched to is captured again, and counted in `stats.captures`.
        The pool keeps its memory while another key has a graph in it; with all of them it goes.

        Raises:
            KeyError: no key of the table.
        """
        with self.recorder.turn.taken():
            for step in family(self):
                release(step, descriptors)

    def recapture(self, *descriptors: BatchDescriptor) -> None:
        """Release these keys (none: all that are captured or failed) and capture them again.

        Raises:
            KeyError: no key of the table. CaptureError, SleepError, AddressError: as `capture_all`.
        """
        with self.recorder.turn.taken():
            now = self.under_ambient()
            for step in family(now):
                if step is not now:
                    release(step, descriptors)
            recapture(now, descriptors)

    def sleep(self, cache: bool = False) -> None:
        """Give back device memory: graphs, pool, static buffers, outputs. A call is then an error.

        Tensors over that memory (borrowed results, views of static buffers, a cache given back)
        must not be used before `wake`: torch does not check, and reads at address 0. With
        guards=True the use of a borrowed result is a `StaleError`.

        Args:
            cache: give back the donated leaves too. What they hold is lost.

        Raises:
            CaptureError: a donated leaf whose memory torch does not own; nothing is given back.
        """
        with self.recorder.turn.taken():
            sleep(self, cache)

    def wake(self) -> None:
        """Take the memory again and capture the keys that were captured. A cache that was given
        back holds zeros, in the same tensors.

        Raises:
            TreeError: a bound leaf has another shape or dtype by now; the step sleeps on.
            CaptureError: too little memory, and the step sleeps on; or a key that fails.
            SleepError: a bound leaf that another function gave back: wake that one first.
        """
        with self.recorder.turn.taken():
            wake(self)

    @property
    def memory(self) -> MemoryTable:
        """Memory of each key: estimated, measured, last used."""
        return memory(self)

    @property
    def failed(self) -> Mapping[Key, str]:
        """Keys that are served eagerly since their capture failed, and why."""
        return MappingProxyType(self.book.failed)

    @contextlib.contextmanager
    def fixed_ambient(self) -> Iterator[None]:
        """The caller's autocast, gradients and device change nothing: the trace has decided."""
        device = self.recorder.device.type
        current = (
            torch.cuda.device(self.recorder.device)
            if device == "cuda"
            else contextlib.nullcontext()
        )
        with current, torch.inference_mode(self.binding.inference), torch.no_grad():
            if not torch.is_autocast_enabled(device):
                yield
                return
            with torch.autocast(device, enabled=False):
                yield

    def cut(self, outputs: Sequence[torch.Tensor], sizes: dict[str, int]) -> list[torch.Tensor]:
        """Leading slices of outputs, along the dims that depend on T and R."""
        dims = self.compiled.lowered.split.pieces.output_dims
        return [out[tuple(slice(d(**sizes)) for d in ds)] for out, ds in zip(outputs, dims)]

    def times(self, descriptor: BatchDescriptor, repeats: int = 20) -> Times:
        """Device time of each graph and eager call of a captured key; CPU time on the tape.

        It replays a batch that is all padding, so donated state and generators are as before; what
        is written other than through null slots is saved first. Attention sees no keys there, so
        its time is a lower bound. Borrowed outputs are overwritten, as by a step.

        Raises:
            KeyError: a key that is not captured. AddressError: a bound leaf has moved.
        """
        return times(self, descriptor, repeats)

    def show_ranges(self, on: bool = True) -> None:
        """From now on, replays of the keys that are captured show in profiles, or no longer do.

        Each is in a range that is named after its key, as `fngraph FULL 8x8 q1`: of torch.profiler,
        and an NVTX one where there is CUDA. Keys captured later have none until this is called
        again. A step that never was asked for them has no code for them.
        """
        show_ranges(self, on)

    def __getitem__(self, descriptor: BatchDescriptor) -> Replay:
        """The replay of a captured key.

        Raises:
            KeyError: it is not captured, or no key of the table.
        """
        for mode in (Mode.FULL, Mode.PIECEWISE):
            if (mode, descriptor) in self.replays:
                return self.replays[mode, descriptor]
        distance = lambda d: abs(d.num_tokens - descriptor.num_tokens)  # noqa: E731
        near = sorted((d for _, d in self.replays), key=distance)[:3]
        missing = f"{descriptor} is not captured; the nearest that are: {near or 'none'}"
        check_key(self, descriptor, f"{missing}. It")
        fix = "wake()" if self.book.asleep else f"recapture({descriptor})"
        raise KeyError(f"{missing}. Capture it: step.{fix}")

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
