"""`Replay`: one captured key as a flat tuple of calls, graphs and the eager calls between them.

`capture` makes it of a program. FULL records the whole program in one graph. PIECEWISE records the
runs of pieces between cuts; a cut is then an eager call over the rows that are really there,
between two replays.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fngraph.core import BatchDescriptor, Dim, HostBounds, Mode
from fngraph.core.program import Program, groups
from fngraph.core.text import count
from fngraph.errors import CaptureError
from fngraph.graphs.inside import Counts, dot, key_name
from fngraph.graphs.ranges import RangedRecording, in_range
from fngraph.graphs.recorder import Recorder, Recording
from fngraph.graphs.staging.buffers import Sizes
from fngraph.torch_facts.memory import other_kind

InstructionFn = Callable[..., tuple[Any, ...]]  # fn(sizes, host, *tensors) -> tensors


@dataclasses.dataclass(frozen=True, slots=True)
class EagerCall:
    """A cut between two replays: its arguments live at fixed addresses, its rows vary.

    Attributes:
        fn: `bind(tensors)`, if it has that, makes its function of the step's bounds, `host=`.
        tensors: static arguments, as long as the key.
        row_dims: for each, its first dim in T and R, or None where it does not vary.
        range: a name that it shows as in profiles.
    """

    name: str
    fn: Any
    tensors: tuple[torch.Tensor, ...]
    row_dims: tuple[Dim | None, ...]
    range: str | None = None

    def __repr__(self) -> str:
        shapes = ", ".join(str(list(x.shape)) for x in self.tensors)
        return f"EagerCall({self.name}: {shapes})"

    def bind(self, true: Sizes) -> Callable[..., Any]:
        """The call over the true rows; the rest of the output is zero: the piece before made it."""
        rows = [x if d is None else x[: d(**true)] for x, d in zip(self.tensors, self.row_dims)]
        if hasattr(self.fn, "bind"):
            call = self.fn.bind(rows)
        else:

            def call(*, host: HostBounds | None) -> None:
                self.fn(true, host, *rows)

        return call if self.range is None else functools.partial(in_range, self.range, call)


BoundCalls = Sequence[tuple[Callable[..., Any], bool]]  # and whether it takes the host bounds


@dataclasses.dataclass(eq=False)
class Replay:
    """One captured key. `graph` (or `graphs`) is there to look at.

    Attributes:
        calls: graphs to replay and eager calls, in order.
        outputs: static output buffers, cut to the key's rows.
        unpack: the node that takes a batch in.
        used: the number of the call that used it last, from 1; 0: none. The one that changes.
    """

    mode: Mode
    descriptor: BatchDescriptor
    calls: tuple[Recording | EagerCall, ...]
    outputs: tuple[torch.Tensor, ...]
    unpack: Callable[[], None]
    used: int = 0

    @property
    def graphs(self) -> tuple[Any, ...]:
        """The recorded graphs: one for FULL, one a run of pieces for PIECEWISE."""
        return tuple(c.graph for c in self.calls if not isinstance(c, EagerCall))

    @property
    def graph(self) -> Any:
        """The only graph of a FULL key."""
        (graph,) = self.graphs
        return graph

    @functools.cached_property
    def graph_counts(self) -> tuple[Counts, ...]:
        """Nodes of each graph, counted when first asked for.

        Raises:
            PackageError: on CUDA, without `cuda.bindings`.
        """
        return tuple(Counts.of(c.nodes) for c in self.calls if not isinstance(c, EagerCall))

    @functools.cached_property
    def counts(self) -> Counts:
        """Nodes of all graphs together, with the kernels' names. See `graph_counts`."""
        return Counts.of(n for c in self.calls if not isinstance(c, EagerCall) for n in c.nodes)

    def dot(self) -> str:
        """The key's graphs and eager calls as DOT text, nodes named by kernel.

        Raises:
            PackageError: on CUDA, without `cuda.bindings`.
        """
        return dot(key_name(self.mode, self.descriptor), self.calls)

    def with_ranges(self) -> Replay:
        """The same, with a named range around each graph and eager call: in torch.profiler, and
        NVTX ones where there is CUDA. A few us each; without this call, nothing."""
        name = key_name(self.mode, self.descriptor)
        calls: list[Recording | EagerCall] = []
        for i, call in enumerate(self.without_ranges().calls):
            if isinstance(call, EagerCall):
                calls.append(dataclasses.replace(call, range=f"{name} [{i}] {call.name}"))
            else:
                part = f"{name} [{i}]" if len(self.calls) > 1 else name
                calls.append(RangedRecording(call, part))
        return dataclasses.replace(self, calls=tuple(calls))

    def without_ranges(self) -> Replay:
        """The same without ranges."""
        calls: list[Recording | EagerCall] = []
        for call in self.calls:
            if isinstance(call, EagerCall):
                call = dataclasses.replace(call, range=None)
            calls.append(call.recording if isinstance(call, RangedRecording) else call)
        return dataclasses.replace(self, calls=tuple(calls))

    def bind(self, true: Sizes) -> BoundCalls:
        """What to call for a batch of sizes `true`: replays, and eager calls of the host bounds."""
        return [
            (c.bind(true), True) if isinstance(c, EagerCall) else (c.replay, False)
            for c in self.calls
        ]

    def __call__(self, true: Sizes, host: HostBounds | None) -> None:
        """Replay on what has been staged."""
        launch(self.bind(true), host)

    def __repr__(self) -> str:
        eager = sum(isinstance(c, EagerCall) for c in self.calls)
        graphs = count(len(self.calls) - eager, "graph")
        if "counts" in self.__dict__:
            graphs += f" of {self.counts}"
        return f"Replay({self.mode} {self.descriptor}: {graphs}, {count(eager, 'eager call')})"


def launch(calls: BoundCalls, host: HostBounds | None) -> None:
    """Make the calls of a replay, in order."""
    for fn, takes_host in calls:
        if takes_host:
            fn(host=host)
        else:
            fn()


def _deliver(i: int, into: torch.Tensor, made: torch.Tensor) -> None:
    """Copy a result to where it is read, as which it must be of one kind."""
    if wrong := other_kind(into, made):
        raise CaptureError(f"result {i} of the graph {wrong}, or run this in mode NONE")
    into.copy_(made)


def capture(
    recorder: Recorder,
    program: Program,
    fns: Sequence[InstructionFn],
    row_dims: Sequence[tuple[Dim | None, ...]],
    inputs: Sequence[torch.Tensor],
    mode: Mode,
    descriptor: BatchDescriptor,
    sizes: Sizes,
    host: HostBounds,
    outputs: tuple[torch.Tensor, ...],
    unpack: Callable[[], None],
    generators: Sequence[torch.Generator] = (),
    watched: bool = True,
    keeps: tuple[Any, ...] = (),
) -> Replay:
    """Record `program` for one key on `recorder`.

    Args:
        fns: one an instruction.
        row_dims: one an instruction; see `EagerCall`.
        inputs: leaves and constants at their fixed addresses, cut to the key's rows.
        host: the key's own upper bounds, baked into FULL.
        outputs: where the program's results are copied; shared by all keys.
        unpack: the node that takes the batch in.
        generators, watched: see `Recorder.record`.
        keeps: what the graphs need besides, above all what `unpack` reads by its address.

    Raises:
        CaptureError: with nothing left behind in the pool.
    """
    env: dict[int, torch.Tensor] = dict(enumerate(inputs))  # the program's values so far
    calls: list[Recording | EagerCall] = []
    last = len(program.instructions) - 1
    keeps = (*keeps, unpack, *dict.fromkeys(fns), *inputs, *outputs)
    record = functools.partial(recorder.record, generators=generators, watched=watched, keeps=keeps)

    def body(indices: Sequence[int]) -> None:
        if not calls:
            unpack()
        for i in indices:
            instruction = program.instructions[i]
            values = fns[i](sizes, host, *[env[j] for j in instruction.reads])
            env.update(zip(instruction.writes, values))
            for j in instruction.drops:
                del env[j]
        if indices and indices[-1] == last:
            deliver()

    def deliver() -> None:
        for i, (into, j) in enumerate(zip(outputs, program.outputs)):
            _deliver(i, into, env[j])

    done = False
    try:
        for recorded, indices in groups(program, mode):
            if recorded:
                recording, _ = record(functools.partial(body, indices))
                calls.append(recording)
                done = indices[-1] == last
                continue
            if not calls:
                calls.append(record(unpack)[0])
            (i,) = indices
            instruction = program.instructions[i]
            tensors = tuple(recorder.unowned(env[j]) for j in instruction.reads)
            calls.append(EagerCall(instruction.name, fns[i], tensors, row_dims[i]))
            for j in instruction.drops:
                del env[j]
        if not calls:
            calls.append(record(unpack)[0])
        if outputs and not done:
            calls.append(record(deliver)[0])
    except BaseException:
        env.clear()  # the traceback holds this frame, and would hold the pool's memory with it
        calls.clear()
        raise
    return Replay(mode, descriptor, tuple(calls), outputs, unpack)
