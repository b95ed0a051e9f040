"""`Step`: what `capture` returns. Bound leaves and the keys captured over them; a call is one step.

    batch.spec -> dispatch -> stage -> replay -> own

The one stage with state: it owns memory, and it counts what it did. A call under other ambient
state (autocast, default dtype, ...) than the trace's may need another program, whose keys then
stand beside the first ones: over the same leaves, in the same pool. What is captured ahead is of
the state of now; what is released, of all.
"""

from __future__ import annotations

import dataclasses
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from fngraph.compile.piece import CompiledPiece
from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Dispatch,
    DispatchTable,
    Explanation,
    Limits,
    Log,
    Mode,
    Stats,
    dispatch,
    explain,
)
from fngraph.core.costs.launch import LaunchModel
from fngraph.core.costs.roofline import Constants
from fngraph.core.dispatching import Allowed
from fngraph.core.memory import MemoryTable
from fngraph.core.spec import COUNTS, Key
from fngraph.core.stats import CompileKey
from fngraph.core.text import expect
from fngraph.errors import AmbientError, RankError, TreeError
from fngraph.executable import Executable, launch_model_of
from fngraph.fx.donation.table import DonationTable
from fngraph.fx.tracing.ambient import (
    Ambient,
    check_no_dispatch_mode,
    check_no_transform,
    is_plain,
    plain_state,
    read,
)
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.recorders import make_recorder
from fngraph.graphs.replay import Replay
from fngraph.options import Rules
from fngraph.ranks.agreement import IN_TURN
from fngraph.step.agreed import (
    any_of,
    before_capture,
    before_step,
    before_times,
    failed_step,
    refusing,
    tell_refused,
    telling,
)
from fngraph.step.binding import bind
from fngraph.step.call import FULL, leaves_of, results_of, spec_of
from fngraph.step.capture import capture_ahead, find_replay, obtain
from fngraph.step.changed_rows import ChangedRows, make_tables, put_changed
from fngraph.step.given import slot_writes, write
from fngraph.step.host_batch import buffer_of, next_batch
from fngraph.step.keys import Keys, Shared, make_keys
from fngraph.step.prepared import Prepared, make_entry
from fngraph.step.rebind import changes_of
from fngraph.step.sleep import give_back, take_again
from fngraph.step.times import Times, measure
from fngraph.torch_facts.tracing import run_by_python

KEY = "a key, as step.dispatch(spec).descriptor is"
R = TypeVar("R")  # what `forward` returns

MOST_AMBIENTS = 16  # that are kept; a function mode that cannot be compared is one more each time


@dataclasses.dataclass(slots=True)
class LastCall:
    """What the last call found, for the next one.

    Attributes:
        read_ambient: reads the ambient state; see `plain_state`.
        keys: those that served it.
        ambient: as it was then; None if that was not plain, so that all is looked at.
        in_fixed_ambient: whether the caller's state is the one that steps run under.
    """

    read_ambient: Callable[[], tuple[Any, ...]]
    keys: Keys
    ambient: tuple[Any, ...] | None = None
    in_fixed_ambient: bool = False


class Step(Generic[R]):
    """A step over bound weights and state; `step[descriptor]` is the replay of a captured key.

    What looks at keys (`replays`, `memory`, `times`, `failed`, ...) looks at those of `main`; calls
    and captures are of the ambient state that they come under, and a budget is of each alone.

    Attributes:
        main: the keys of the function as it was compiled, or bound again.
        by_ambient: those for each ambient state that calls have come under; `main` for its own.
    """

    def __init__(self, shared: Shared, executable: Executable) -> None:
        ambient = _ambient(shared.recorder)
        executable = executable.maker.under(ambient) or executable
        self.shared, self.entry, self.binding = shared, shared.entry, shared.binding
        self.recorder, self.turn = shared.recorder, shared.recorder.turn
        # how much of `made` the stats have
        self._counted: MutableMapping[CompiledPiece | Executable, int] = weakref.WeakKeyDictionary()
        self.main = make_keys(executable, shared)
        self.by_ambient: dict[Ambient, Keys] = {ambient: self.main}
        self.last = LastCall(plain_state(self.recorder.device.type), self.main)

    @run_by_python
    def __call__(self, /, *args: Any, allowed: Allowed = None, **kwargs: Any) -> R:
        """One step: `forward` without its held arguments.

        Args:
            allowed: the modes that this batch may run as, by name or value, ("FULL", "NONE");
                None: all. Or a `Dispatch` that was made beforehand, such as `fg.core.settle`'s over
                ranks: the step runs as just that.

        Raises:
            SpecError: a batch beyond the limits.
            ModesError: no key of an allowed mode covers it, or it has failed, and NONE is not
                allowed; or there is no such key as was decided, or it does not cover the batch.
            TreeError: arguments that are not what was traced; with paths.
            AddressError: bound leaves that moved, or other donated ones.
            AmbientError: autocast, default dtype, ... have changed, and that is to be an error.
            TransformError: within a `torch.func` transform.
            CaptureError: a key that cannot be captured, or a step within a capture of the caller's.
            CompileError: sizes that compile="once" has no code for.
            SleepError: while it sleeps.
            StaleError: a leaf is a borrowed result that has expired, with guards=True.
            RankError: processes that its collectives meet are about to do something else, cannot go
                on, or are gone. Where they did not agree nothing was launched; else donated leaves
                hold what ran before has written.
            Exception: what torch or a backend raises in an eager call (NONE, or attention between
                two graphs). Donated leaves hold then what ran before it has written.
        """
        turn = self.turn
        with turn.lock:
            last = self.last
            prepared: Prepared | None = None
            in_turn = met = False  # with the processes that its collectives meet
            try:
                ambient = last.read_ambient()
                if ambient != last.ambient:
                    self._switch_keys(ambient)
                keys = last.keys
                stream = turn.current()
                if stream != turn.stream or turn.capturing():
                    turn.order(stream)
                entry, binding = self.entry, self.binding
                if allowed is not None and entry.takes_allowed:  # an argument of forward's own
                    kwargs["allowed"], allowed = allowed, None
                if keys.poison is not None:
                    args, keys.handed = keys.poison.begin(entry, args, kwargs, keys.handed)
                elif kwargs or len(args) != entry.count:
                    args = entry.values(args, kwargs)
                for at, position, bound in entry.donated:
                    if args[at] is not bound:
                        binding.check_argument(position, args[at])
                if binding.watch.moved():
                    binding.check()
                batch = args[entry.staged_at]
                filled = keys.handed
                if filled is not None and filled.batch is batch:
                    spec, prepared = filled.spec, filled.prepared
                else:
                    filled, spec = None, spec_of(keys, batch)
                if allowed is not None:
                    prepared = keys.prepare(spec, allowed)
                    filled = filled and filled.laid_out_for(prepared)
                elif prepared is None:
                    prepared = keys.prepared.get(spec[COUNTS]) or keys.prepare(spec)
                keys.handed = None
                leaves = leaves_of(keys, batch, prepared) if filled is None else None
                if keys.executable.peers is not None:
                    in_turn = IN_TURN.acquire()
                    before_step(keys, prepared, spec, isinstance(allowed, Dispatch))
                    met = True
                if prepared.replay is None and prepared.chosen.mode is not Mode.NONE:
                    find_replay(keys, prepared, spec, allowed)
                if prepared.chosen.mode is FULL or (last.in_fixed_ambient and turn.is_here()):
                    results = results_of(keys, prepared, spec, batch, leaves, filled)
                else:
                    with keys.fixed_ambient():
                        results = results_of(keys, prepared, spec, batch, leaves, filled)
                assembled: R = keys.assemble(results, args)
                return assembled
            except Exception as error:
                failed_step(last.keys, prepared, error, met)
                raise
            finally:
                if in_turn:
                    IN_TURN.release()

    def _tell_refused(self, why: str) -> None:
        """Tell the processes that its collectives meet of a call that is refused before it comes
        here: as one that this refuses."""
        with self.turn.lock:
            tell_refused(self.last.keys.executable.peers, why)

    def _between_steps(self) -> AbstractContextManager[None]:
        """Work between two steps, alone: after the last one, and what goes on beside it."""
        return self.turn.taken()

    # which keys serve a call

    def _switch_keys(self, ambient: tuple[Any, ...]) -> None:
        """Another ambient state than the last call's: find the keys that serve it."""
        check_no_transform()
        last = self.last
        before, last.keys = last.keys, self._keys_of_now()
        if last.keys is not before:
            last.keys.take_over(before)
        last.in_fixed_ambient = last.keys.is_in_fixed_ambient()
        last.ambient = ambient if is_plain(ambient) else None

    def _keys_of_now(self) -> Keys:
        """The keys for the ambient state of now: of another program, where that matters.

        Raises:
            AmbientError: it does matter, and `on_ambient="error"` was asked for.
        """
        ambient = _ambient(self.recorder)
        found = self.by_ambient.pop(ambient, None)
        if found is None:
            self.main.check_awake()
            other = self.main.executable.maker.under(ambient)
            found = self.main if other is None else make_keys(other, self.shared, self.main)
            while len(self.by_ambient) >= MOST_AMBIENTS:
                self._forget(next(iter(self.by_ambient)))
        self.by_ambient[ambient] = found  # the most recently used is last
        return found

    @property
    def stats(self) -> Stats:
        """What ran, counted; what was compiled, and what passes matched, up to now."""
        self._count_compiled()
        return self.shared.stats

    def _count_compiled(self) -> None:
        """Count what was made of pieces since the last time, and passes over new programs."""
        for keys in self._family:
            if keys.executable not in self._counted:
                self.shared.stats.observe_passes(keys.executable.matches)
                self._counted[keys.executable] = 1
            own = keys.executable.one_launch
            for piece in (*keys.executable.compiled, *(own.compiled if own else ())):
                counted = self._counted.get(piece, 0)
                for one in piece.made[counted:]:
                    kind = CompileKey(piece.name, one.range, one.made.kernels, one.loaded)
                    self.shared.stats.observe_compile(kind, one.us)
                self._counted[piece] = len(piece.made)

    def _forget(self, ambient: Ambient) -> None:
        """Let go of an ambient state, and of the graphs that nothing else is for."""
        self._count_compiled()
        keys = self.by_ambient.pop(ambient)
        if all(keys is not other for other in self._family):
            keys.free(list(keys.replays))

    def _is_of_now(self) -> bool:
        """Whether `main` serves the ambient state of now."""
        try:
            return self._keys_of_now() is self.main
        except AmbientError:
            return False

    @property
    def _family(self) -> list[Keys]:
        """The keys of every program."""
        return list({id(keys): keys for keys in (self.main, *self.by_ambient.values())}.values())

    @property
    def differences(self) -> Sequence[Any]:
        """What `verify=` has found, the first ones; see `fg.Difference`."""
        return ()

    @property
    def parts(self) -> Any:
        """What a verified step copies, for `verify=`; see `VerifiedStep.parts`.

        Raises:
            TreeError: its steps are not verified.
        """
        raise TreeError("its steps are not verified. Say which share: graphify(..., verify=1e-3)")

    @property
    def log(self) -> Log:
        """What its last steps were, for `record=`; see `fg.core.Log`.

        Raises:
            TreeError: its steps are not recorded.
        """
        raise TreeError("its steps are not recorded. Say how many: capture(..., record=1000)")

    # what runs as what

    @property
    def table(self) -> DispatchTable:
        """The dispatch table."""
        return self.main.executable.table

    @property
    def limits(self) -> Limits:
        """The bounds of every step."""
        return self.main.executable.limits

    @property
    def notes(self) -> tuple[str, ...]:
        """Why anything is not as it was asked for: modes, backends, cuts, streams."""
        return self.main.executable.notes

    @property
    def backends(self) -> Mapping[str, str]:
        """What runs each call of a primitive, {"attention 0": "triton_decode", ...}; of two, that
        of uniform batches is first."""
        return self.main.executable.backends

    @property
    def donation(self) -> DonationTable:
        """How each donated leaf gets its new value."""
        return self.main.executable.donation

    @property
    def outputs(self) -> str:
        """Whose results are: "own": the caller's; "borrow": views, good until the next call."""
        return "borrow" if self.shared.borrow else "own"

    @property
    def guards(self) -> bool:
        """Whether padding and expired results are poisoned."""
        return self.shared.guards

    def dispatch(self, spec: BatchSpec, allowed: Allowed = None) -> Dispatch:
        """What `spec` runs as."""
        return dispatch(self.table, spec, allowed)

    def runs_as(self, spec: BatchSpec, allowed: Allowed = None) -> Dispatch:
        """As `dispatch`, but NONE where the key has failed under the last call's ambient state."""
        chosen, keys = self.dispatch(spec, allowed), self.last.keys
        failed = chosen.key in keys.failed
        return keys.refused(chosen.key, spec, allowed) if failed else chosen

    def explain(self, spec: BatchSpec, allowed: Allowed = None) -> Explanation:
        """Why `spec` runs as it does, and why not as anything else."""
        return explain(self.table, spec, allowed)

    def launch_model(self, constants: Constants, context: int | None = None) -> LaunchModel:
        """What steps take in each mode, predicted; see `Lowered.launch_model`."""
        made = self.main.executable
        layers = None if made.one_launch is None else made.one_launch.layers
        return launch_model_of(made.count, made.table, made.level, layers, constants, context)

    @property
    def memory(self) -> MemoryTable:
        """Memory of each key: estimated, measured, last used."""
        return self.main.memory

    @property
    def failed(self) -> Mapping[Key, str]:
        """Keys that are served eagerly since their capture failed, and why."""
        return MappingProxyType(self.main.failed)

    # batches where graphs read them

    def host_batch(self, /, spec: BatchSpec, **changed: ChangedRows) -> Any:
        """A batch in the ring's next slot, in pinned memory on CUDA: fill its leaves, and pass it.

        Its contents are whatever was last in the slot. It is good for one step, the next one.

        Args:
            changed: for fields with rows="changed", what takes the place of the whole leaf.

        Raises:
            TreeError: a function without a spec, whose batches have exact shapes; or a field that
                takes no `ChangedRows`. SpecError: no spec.
        """
        if not isinstance(spec, BatchSpec):
            expect(BatchSpec, "fg.BatchSpec(num_tokens, num_reqs), or batch.spec", spec=spec)
        with self.turn.lock:
            batch = next_batch(self.last.keys, spec)
        if changed:
            put_changed(self.shared.tables, batch, changed)
        return batch

    def static_buffer(self, descriptor: BatchDescriptor, leaf: str) -> Any:
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
        return buffer_of(self._keys_of_now(), descriptor, leaf)

    # new values for held leaves

    def rebind(self, /, **held: Any) -> None:
        """New values for held arguments: `step.rebind(params=new)`.

        All is checked first; then leaf by leaf is copied into the bound one, without a second copy
        of the model. A leaf of another shape or dtype gets the new tensor's memory instead, in
        every tree that holds it; if `forward` reads it, it is traced again, and the keys that were
        captured are captured again. Another function that reads it raises `AddressError` at its
        next call, until it is rebound too: `other.rebind(params=params)`. Processes that meet in
        its collectives all do it, or the next step is a `RankError` in each.

        Args:
            held: by name, a tree of the bound structure, on any device; or a mapping from some
                paths, as errors write them, to tensors: {"params['head']": x}. It may load what it
                is asked for from a file; each is asked for twice, to check and to copy.

        Raises:
            TreeError: another structure, an unknown path, no tensor, or different values for
                leaves that share memory.
            AddressError: a leaf that is not given has moved.
            SleepError: another shape or dtype, while it sleeps. The same ones can be written then.
            FnGraphError: `forward` refuses the new shapes, or torch does, in its own words. Nothing
                has been written.
            CaptureError: a key cannot be captured again; the others are, or will be when needed.
        """
        with self._between_steps():
            main, old = self.main, self.main.executable
            changes = changes_of(self.binding, held)
            new = old
            if changes.replaced or changes.leaves != old.args.leaves:
                main.check_awake()  # it may have to be captured again
            if changes.leaves != old.args.leaves:
                new = old.maker.for_leaves(old, changes.leaves)
            moved = changes.moved
            stale = bool(moved & new.reads) and main.asleep is None  # else `wake` does it
            changes.apply()
            self.binding.bound_again(new.args)
            self.binding.rebound += 1
            for keys in self._family:
                keys.forget_numbers()
            if stale or new.fns is not old.fns:
                captured = list(main.replays)
                self.recorder.synchronize()  # a step in flight still reads its slot
                main.free(captured)
                self._begin(make_keys(new, self.shared, main))
                self.main.pool = main.pool  # which the recorder still has
                if self._is_of_now():  # else they wait for their own ambient state
                    capture_ahead(self.main, [key for key in captured if key in new.table])
            elif moved:
                self._begin(dataclasses.replace(main, executable=new))
                self.main.forget()

    def _begin(self, main: Keys) -> None:
        """Go on with these keys; those for other ambient states are made again when needed."""
        self._count_compiled()
        main.take_over(self.last.keys)
        self.main, self.by_ambient = main, {}
        self.last = LastCall(self.last.read_ambient, main)

    def load_slot(self, /, slot: int, **held: Any) -> None:
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
        with self._between_steps():
            self.binding.check()
            for target, value in slot_writes(self.binding, slot, held):
                write(target, value())

    # the keys, which come and go

    @property
    def replays(self) -> Mapping[Key, Replay]:
        """What has been captured, by mode and descriptor."""
        return MappingProxyType(self.main.replays)

    def __getitem__(self, descriptor: BatchDescriptor) -> Replay:
        """The replay of a captured key.

        Raises:
            KeyError: it is not captured, or no key of the table.
        """
        replays = self.main.replays
        for mode in (Mode.FULL, Mode.PIECEWISE):
            if (mode, descriptor) in replays:
                return replays[mode, descriptor]
        expect(BatchDescriptor, KEY, descriptor=descriptor)
        distance = lambda d: abs(d.num_tokens - descriptor.num_tokens)  # noqa: E731
        near = sorted((d for _, d in replays), key=distance)[:3]
        text = f"{descriptor} is not captured; the nearest that are: {near or 'none'}"
        self._check_key(descriptor, f"{text}. It")
        fix = "wake()" if self.main.asleep else f"recapture({descriptor})"
        raise KeyError(f"{text}. Capture it: step.{fix}")

    def _check_key(self, descriptor: BatchDescriptor, subject: str = "") -> None:
        """Raise `KeyError` unless the table has this key."""
        if all(known != descriptor for _, known in self.table):
            raise KeyError(
                f"{subject or descriptor} is no key of {self.table!r}. Ask for the one that a "
                "batch runs as: step.dispatch(spec).descriptor"
            )

    def capture_all(self, progress: bool | str = False) -> None:
        """Capture every key of the table that is not yet, largest first, as far as the memory
        budget goes.

        Raises:
            CaptureError: what was captured before stays.
            SleepError: while it sleeps. AddressError: a bound leaf has moved.
        """
        expect((bool, str), "True, False, or the label of a bar", progress=progress)
        with self._between_steps():
            now = self._keys_of_now()
            capture_ahead(now, now.missing, progress)

    def capture_some(self, budget_ms: float) -> int:
        """Capture missing keys between two steps, largest first, until `budget_ms` milliseconds
        are used, but at least one; returns how many keys are missing still.

        Raises:
            CaptureError, SleepError, AddressError: as `capture_all`.
        """
        with self._between_steps():
            now = self._keys_of_now()
            with refusing(now, bool(now.missing)):
                expect((float, int), "milliseconds", budget_ms=budget_ms)
                now.check_ready()
            before_capture(now, now.missing)
            until = time.perf_counter() + budget_ms / 1000
            for key in now.missing:
                obtain(now, key)
                is_over = key in now.replays and time.perf_counter() >= until
                if any_of(now.executable.peers, "capture some keys", is_over):
                    break
            return len(now.missing)

    def release(self, /, *descriptors: BatchDescriptor) -> None:
        """Free the graphs of these keys (none: of all), once the device has done with them.

        A released key that is dispatched to is captured again, and counted in `stats.captures`.
        The pool keeps its memory while another key has a graph in it; with all of them it goes.

        Raises:
            KeyError: no key of the table.
        """
        with self._between_steps():
            self._release(self._family, descriptors)

    def recapture(self, /, *descriptors: BatchDescriptor) -> None:
        """Release these keys (none: all that are captured or failed) and capture them again.

        Raises:
            KeyError: no key of the table. CaptureError, SleepError, AddressError: as `capture_all`.
        """
        with self._between_steps():
            now = self._keys_of_now()
            with refusing(now, bool(descriptors or now.replays or now.failed)):
                self._release([keys for keys in self._family if keys is not now], descriptors)
                now.check_ready()
            (released,) = self._release([now], descriptors)
            named = [key for key in now.executable.table if key[1] in descriptors]
            capture_ahead(now, named if descriptors else released)

    def _release(
        self, family: Sequence[Keys], descriptors: Sequence[BatchDescriptor]
    ) -> list[list[Key]]:
        for descriptor in descriptors:
            self._check_key(descriptor)
        return [keys.release(descriptors) for keys in family]

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
        expect(bool, "True or False", cache=cache)
        with self._between_steps():
            give_back(self.shared, self._family, cache)

    def wake(self) -> None:
        """Take the memory again and capture the keys that were captured. A cache that was given
        back holds zeros, in the same tensors.

        Raises:
            TreeError: a bound leaf has another shape or dtype by now; the step sleeps on.
            CaptureError: too little memory, and the step sleeps on; or a key that fails.
            SleepError: a bound leaf that another function gave back: wake that one first.
        """
        with self._between_steps():
            awake = take_again(self.shared, self._family)
            now = self._keys_of_now()
            for keys, captured in awake:
                if keys is now:  # captured under their own ambient state alone: others wait for it
                    capture_ahead(keys, captured)

    # keys looked at while they run

    def times(self, descriptor: BatchDescriptor, repeats: int = 20) -> Times:
        """Device time of each graph and eager call of a captured key; CPU time on the tape.

        It replays a batch that is all padding, so donated state and generators are as before; what
        is written other than through null slots is saved first. Attention sees no keys there, so
        its time is a lower bound. Borrowed outputs are overwritten, as by a step.

        Raises:
            KeyError: a key that is not captured. AddressError: a bound leaf has moved.
        """
        with self._between_steps(), telling(self.main, "times()"):
            with refusing(self.main):
                expect(int, repeats=repeats)
                if repeats < 1:
                    raise ValueError(f"repeats={repeats}: at least 1")
                replay = self[descriptor]
            before_times(self.main, (replay.mode, replay.descriptor), repeats)
            return measure(self.main, replay, repeats)

    def show_ranges(self, on: bool = True) -> None:
        """From now on, replays of the keys that are captured show in profiles, or no longer do.

        Each is in a range that is named after its key, as `fngraph FULL 8x8 q1`: of torch.profiler,
        and an NVTX one where there is CUDA. Keys captured later have none until this is called
        again. A step that never was asked for them has no code for them.
        """
        expect(bool, "True or False", on=on)
        with self._between_steps():
            replays = self.main.replays
            for key, replay in replays.items():
                replays[key] = replay.with_ranges() if on else replay.without_ranges()
            self.main.forget()

    def __iter__(self) -> Iterator[BatchDescriptor]:
        return iter(descriptor for _, descriptor in self.main.replays)

    def __len__(self) -> int:
        return len(self.main.replays)

    def __repr__(self) -> str:
        done = f"{len(self)} of {len(self.table)} keys on {self.recorder.name}"
        asleep = ", asleep" if self.main.asleep else ""
        guarded = ", guarded" if self.guards else ""
        return f"Step({done}{asleep}{guarded}; {self.table!r})"


def _ambient(recorder: Recorder) -> Ambient:
    """The ambient state of now, for the recorder's device."""
    check_no_dispatch_mode()
    return read(recorder.device.type)


def make_step(
    executable: Executable,
    values: Sequence[Any],
    *,
    recorder: str | Recorder | None = None,
    outputs: str = "own",
    rules: Rules | None = None,
    guards: bool = False,
    make: Callable[[Shared, Executable], Step[Any]] | None = None,
) -> Step[Any]:
    """A step over held and donated arguments, given in `forward`'s order; nothing is captured yet.

    Args:
        make: what makes it, if it is to be more than a `Step`.

    Raises:
        TreeError, AliasError: see `bind`. CaptureError: an unknown recorder.
    """
    args = executable.args
    binding = bind(executable, values)
    made = make_recorder(recorder, args.device)
    if executable.peers is not None and rules is not None and rules.memory_budget is not None:
        raise RankError(
            f"memory_budget={rules.memory_budget}: which keys there is room for is measured, and "
            "may differ from process to process, whose collectives must be captured together. "
            "Leave it out, and give fewer sizes"
        )
    entry = make_entry(args, binding)
    tables = make_tables(args, executable.limits, made.device)
    if tables is not None:
        entry = dataclasses.replace(entry, leaves=tables.reader(args, entry.leaves))
    borrow = outputs == "borrow"
    numbers = itertools.count(1)
    shared = Shared(
        binding, made, entry, tables, rules or Rules(), borrow, guards, Stats(), numbers
    )
    return (make or Step)(shared, executable)
