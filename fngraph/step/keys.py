"""`Keys`: the graphs of one executable under one ambient state, the memory that they share, and
what is known of them.

Releasing a key frees its graphs at once. Its pool's memory stays with the pool, for the keys that
share it, and comes back to the device only when the pool has no graph left; so where the pool
itself is over the budget, all keys are released and a new pool is begun.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from fngraph.core import BatchDescriptor, BatchSpec, Dispatch, Mode, Stats, dispatch
from fngraph.core.dispatching import Allowed, modes_of
from fngraph.core.memory import Bytes, KeyMemory, MemoryTable
from fngraph.core.spec import COUNTS, Key
from fngraph.errors import CaptureError, ModesError, SleepError
from fngraph.executable import Executable
from fngraph.graphs.memory import Emptied
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.replay import Replay
from fngraph.graphs.staging.buffers import StaticBuffers, allocate, true_sizes
from fngraph.graphs.staging.ring import Ring, make_ring
from fngraph.graphs.staging.unpack import words_of
from fngraph.options import Rules
from fngraph.step.binding import Binding
from fngraph.step.changed_rows import Tables
from fngraph.step.guards import Poison, make_poison
from fngraph.step.prepared import Assemble, Entry, HostBatch, Prepared, assembler
from fngraph.torch_facts.names import InferenceMode, set_grad_mode

MOST_PREPARED = 4096  # counts that are kept


class Shared(NamedTuple):
    """What all keys of a step have in common, whatever they are captured under.

    Attributes:
        binding: held and donated leaves, and their addresses.
        entry: how a call's arguments are read.
        tables: of the batch's leaves that are device state, `rows="changed"`.
        borrow: whether results are views of the outputs, good until the next call.
        guards: whether padding and expired results are poisoned.
        stats: what ran, counted.
        numbers: of its calls, from 1: warm-ups and measurements are none.
        settle: waits for what goes on beside the steps; before a capture, which that could end.
    """

    binding: Binding
    recorder: Recorder
    entry: Entry
    tables: Tables | None
    rules: Rules
    borrow: bool
    guards: bool
    stats: Stats
    numbers: Iterator[int]
    settle: Callable[[], None] = lambda: None


class Asleep(NamedTuple):
    """What `wake` brings back: the keys that were captured, and memory with its bytes."""

    keys: tuple[Key, ...]
    emptied: Emptied


@dataclasses.dataclass(eq=False)
class Keys:
    """The keys of an executable.

    Attributes:
        static: buffers of the batch's leaves, read by every key.
        ring: host memory in which batches wait for their graphs.
        constants: of the trace, on the device.
        outputs: static output buffers, written by every key.
        assemble: results and donated containers to `forward`'s whole output.
        poison: what is poisoned, if anything is.
        replays: what has been captured.
        measured: memory of each captured key.
        pool: bytes that the pool has grown to for these keys.
        failed: why a key is served eagerly.
        warm: kinds of kernels that have run, each with the key that they ran for.
        is_eager_warm: whether what steps without graphs run has run.
        prepared: what a batch's counts decide, by those counts.
        handed: what `host_batch` has handed out since the last call, if anything.
        asleep: set while the step sleeps.
    """

    executable: Executable
    shared: Shared
    static: StaticBuffers
    ring: Ring
    constants: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    assemble: Assemble
    poison: Poison | None
    replays: dict[Key, Replay] = dataclasses.field(default_factory=dict)
    measured: dict[Key, Bytes] = dataclasses.field(default_factory=dict)
    pool: int = 0
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    warm: dict[Hashable, Key] = dataclasses.field(default_factory=dict)
    is_eager_warm: bool = False
    prepared: dict[Any, Prepared] = dataclasses.field(default_factory=dict)
    handed: HostBatch | None = None
    asleep: Asleep | None = None

    def check_awake(self) -> None:
        """Raise `SleepError` while the step sleeps."""
        if self.asleep is not None:
            raise SleepError(
                "the step sleeps: its graphs and static buffers are given back. Call step.wake()"
            )

    def check_ready(self) -> None:
        """Raise unless keys can be captured now: awake, and with every leaf where it was bound, or
        the new graphs would read other memory than the old ones.

        Raises:
            SleepError, AddressError
        """
        self.check_awake()
        self.shared.binding.check()

    @property
    def missing(self) -> list[Key]:
        """Keys that are neither captured nor known to fail, largest first."""
        known = (self.replays, self.failed)
        return [key for key in self.executable.table if not any(key in found for found in known)]

    @contextlib.contextmanager
    def fixed_ambient(self) -> Iterator[None]:
        """The caller's autocast, gradients and device change nothing: the trace has decided."""
        device = self.shared.recorder.device
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current, InferenceMode(self.shared.binding.inference):
            set_grad_mode(False)
            if not torch.is_autocast_enabled(device.type):
                yield
                return
            with torch.autocast(device.type, enabled=False):
                yield

    def is_in_fixed_ambient(self) -> bool:
        """Whether the caller's own state is the one that steps run under."""
        return not (
            torch.is_grad_enabled()
            or torch.is_inference_mode_enabled() is not self.shared.binding.inference
            or torch.is_autocast_enabled(self.shared.recorder.device.type)
        )

    def cut(self, outputs: Sequence[torch.Tensor], sizes: dict[str, int]) -> list[torch.Tensor]:
        """Leading slices of outputs, along the dims that depend on T and R."""
        dims = self.executable.output_dims
        return [out[tuple(slice(d(**sizes)) for d in ds)] for out, ds in zip(outputs, dims)]

    # what the counts of a batch decide

    def prepare(self, spec: BatchSpec, allowed: Allowed = None) -> Prepared:
        """All that the counts of a batch decide, kept for the next one that has the same.

        Args:
            allowed: the modes that it may run as, None: all; or what was decided.

        Raises:
            SpecError: a batch beyond the limits. SleepError: while the step sleeps.
            ModesError: no key covers the batch, and NONE is not allowed; or there is no such key
                as was decided, or it does not cover the batch.
        """
        self.check_awake()  # nothing is found prepared while it sleeps
        counts: Any = spec[COUNTS]
        if allowed is not None:
            counts = (*counts, allowed if isinstance(allowed, Dispatch) else modes_of(allowed))
            if counts in self.prepared:
                return self.prepared[counts]
        executable = self.executable
        executable.limits.check(spec)
        chosen = dispatch(executable.table, spec, allowed)
        true = true_sizes(spec, executable.limits.dims)
        words = words_of(executable.plan, true, chosen.descriptor.query_len or 0)
        kinds = [
            (planned.buffer.shape(true), getattr(torch, planned.buffer.dtype), torch.strided, False)
            for planned in executable.plan.buffers
        ]
        with self.fixed_ambient():
            views = [] if chosen.mode is Mode.NONE else self.cut(self.outputs, true)
        counted_as = (true["T"], chosen.descriptor.num_tokens, chosen.mode)
        prepared = Prepared(chosen, true, kinds, words, views, counted_as)
        if len(self.prepared) >= MOST_PREPARED:
            self.prepared.clear()
        self.prepared[counts] = prepared
        return prepared

    def forget(self) -> None:
        """After replays have gone or changed: the next calls look them up again."""
        self.prepared.clear()
        if self.handed is not None:
            self.handed = self.handed._replace(prepared=None)

    def forget_numbers(self) -> None:
        """After what processes compare has changed: the next steps say it anew."""
        for prepared in self.prepared.values():
            prepared.numbers.clear()

    def take_over(self, earlier: Keys) -> None:
        """From now on these serve: what `host_batch` handed out is laid out anew, as it is still
        good for one step."""
        handed, earlier.handed = earlier.handed, None
        if handed is not None and earlier.ring is self.ring:
            self.handed = handed._replace(prepared=None).not_in_place()

    def refused(self, key: Key, spec: BatchSpec, allowed: Allowed = None) -> Dispatch:
        """What a batch runs as whose key cannot be captured.

        Raises:
            ModesError: NONE is not allowed.
        """
        if Mode.NONE not in modes_of(allowed):
            decided = isinstance(allowed, Dispatch)
            fix = "Decide for step.runs_as(spec)" if decided else 'Add "NONE" to allowed='
            raise ModesError(
                f"{spec!r} cannot run as {key[0]}: capture failed: {self.failed[key]}. {fix}, or "
                "mend what failed and call step.recapture()"
            )
        return Dispatch(Mode.NONE, spec.descriptor(), f"capture failed: {self.failed[key]}")

    # memory

    @property
    def total(self) -> int:
        """Bytes of the pool and of all graphs."""
        return self.pool + sum(item.graph for item in self.measured.values())

    @property
    def memory(self) -> MemoryTable:
        """Every key of the table with its memory."""
        rows = []
        for key in self.executable.table:
            replay = self.replays.get(key)
            used = None if replay is None else replay.used
            estimate = self.executable.estimate(*key)
            rows.append(KeyMemory(*key, estimate, self.measured.get(key), used))
        return MemoryTable(tuple(rows), self.pool, self.shared.rules.memory_budget)

    def fits(self, key: Key) -> bool:
        """Whether the budget seems to have room for one key more."""
        limit = self.shared.rules.memory_budget
        if limit is None:
            return True
        alone = self.executable.estimate(*key)
        return self.total + max(alone.pool - self.pool, 0) + alone.graph <= limit

    def make_room(self, key: Key, *, evict: bool) -> bool:
        """Make room for a key that is about to be captured; False: there is none, nothing goes.

        Raises:
            CaptureError: the budget cannot hold the key even alone.
        """
        limit = self.shared.rules.memory_budget
        if limit is None:
            return True
        alone = self.executable.estimate(*key)
        if sum(alone) > limit:
            raise CaptureError(
                f"memory_budget={limit} bytes cannot hold this key: its graphs will take about "
                f"{alone.graph} and its intermediates {alone.pool}. Give more, or capture smaller "
                "sizes"
            )
        if not evict:
            return self.fits(key)
        if max(self.pool, alone.pool) + alone.graph > limit:
            self.begin_again()
        while not self.fits(key) and self.replays:
            self._evict()
        return True

    def keep_to_budget(self, key: Key, *, evict: bool) -> bool:
        """Keep to what was measured; False: the key itself had to go with the others.

        Raises:
            CaptureError: the key alone takes more than the budget.
        """
        limit = self.shared.rules.memory_budget
        if limit is None or self.total <= limit:
            return True
        while evict and self.total > limit and len(self.replays) > 1:
            self._evict(but=key)
        if self.total <= limit:
            return True
        taken = self.measured[key]
        alone = len(self.replays) == 1 and self.pool == taken.pool
        if alone or evict or self.pool > limit:
            self.begin_again()
        else:
            self.free([key])
        if not alone:
            return False
        raise CaptureError(
            f"memory_budget={limit} bytes cannot hold this key: its graphs took {taken.graph} "
            f"and the pool {taken.pool} more. Give more, or capture smaller sizes"
        )

    def _evict(self, but: Key | None = None) -> None:
        """Release the key that was used least recently."""
        others = (key for key in self.replays if key != but)
        self.free([min(others, key=lambda key: self.replays[key].used)])

    def begin_again(self) -> None:
        """Release every key and begin a new pool; keys are captured again as they are needed."""
        self.free(list(self.replays))
        self.shared.recorder.renew()
        self.pool = 0

    def free(self, keys: Iterable[Key]) -> None:
        """Forget the replays of these keys, once the device has done with them."""
        going = [key for key in keys if key in self.replays]
        self.forget()
        if not going:
            return
        self.shared.recorder.synchronize()
        for key in going:
            del self.replays[key]
            self.measured.pop(key, None)

    def release(self, descriptors: Sequence[BatchDescriptor]) -> list[Key]:
        """Free these keys, or all; returns those that were captured, or had failed."""
        wanted = [k for k in self.executable.table if not descriptors or k[1] in descriptors]
        found = [key for key in wanted if key in self.replays or key in self.failed]
        for key in found:
            self.failed.pop(key, None)
        if descriptors:
            self.free(found)
        else:
            self.begin_again()
        return found


@torch.inference_mode(False)  # graphs write these buffers, whatever mode the caller is in
def make_keys(executable: Executable, shared: Shared, earlier: Keys | None = None) -> Keys:
    """Static buffers, ring and outputs allocated; nothing captured yet.

    Args:
        earlier: other keys of the step, whose ring serves these too: what was filled there once and
            is passed again is known, whatever keys serve.
    """
    recorder, plan = shared.recorder, executable.plan
    device = recorder.device
    static = allocate(plan, device)
    outputs = tuple(
        torch.zeros([max(d(**plan.sizes), 0) for d in dims], dtype=dtype, device=device)
        for dims, dtype in zip(executable.output_dims, executable.output_dtypes)
    )
    assemble = assembler(executable.args, executable.out_tree, executable.returns)
    if shared.tables is not None:
        assemble = shared.tables.assembler(assemble)
    poison = make_poison(executable, static, recorder.loans) if shared.guards else None
    if poison is not None and shared.borrow:
        assemble = poison.lending(assemble)
    constants = tuple(c.to(device) for c in executable.constants)
    if earlier is None:
        ring = make_ring(plan, device)
    elif earlier.executable.plan == plan:
        ring = earlier.ring
    else:
        ring = make_ring(plan, device, earlier.ring)
    return Keys(executable, shared, static, ring, constants, outputs, assemble, poison)
