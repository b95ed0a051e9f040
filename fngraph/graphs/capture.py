"""Capture one key of a program.

FULL records the whole program in one graph. PIECEWISE records the runs of pieces between cuts; a
cut is then an eager call over the rows that are really there, between two replays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fngraph.core import BatchDescriptor, Dim, HostBounds, Mode
from fngraph.core.program import Program, groups
from fngraph.graphs.recorder import Recorder, Recording
from fngraph.graphs.replay import EagerCall, Replay
from fngraph.graphs.staging import Sizes

StepFn = Callable[..., tuple[Any, ...]]  # fn(sizes, host, *tensors) -> tensors


def capture(
    recorder: Recorder,
    program: Program,
    fns: Sequence[StepFn],
    rows: Sequence[tuple[Dim | None, ...]],
    inputs: Sequence[torch.Tensor],
    mode: Mode,
    descriptor: BatchDescriptor,
    sizes: Sizes,
    host: HostBounds,
    outputs: tuple[torch.Tensor, ...],
    first: Callable[[], None],
    generators: Sequence[torch.Generator] = (),
    watched: bool = True,
) -> Replay:
    """Record `program` for one key on `recorder`.

    Args:
        fns: one a step.
        rows: one a step; see `EagerCall.rows`.
        inputs: leaves and constants at their fixed addresses, cut to the key's rows.
        host: the key's own upper bounds, baked into FULL.
        outputs: where the program's results are copied; shared by all keys.
        first: the node that takes the batch in.
        generators, watched: see `Recorder.record`.

    Raises:
        CaptureError: with nothing left behind in the pool.
    """
    env: dict[int, torch.Tensor] = dict(enumerate(inputs))  # the program's values so far
    calls: list[Recording | EagerCall] = []
    last = len(program.steps) - 1
    record = functools.partial(recorder.record, generators=generators, watched=watched)

    def body(indices: Sequence[int]) -> None:
        if not calls:
            first()
        for i in indices:
            step = program.steps[i]
            values = fns[i](sizes, host, *[env[j] for j in step.reads])
            env.update(zip(step.writes, values))
            for j in step.drops:
                del env[j]
        if indices and indices[-1] == last:
            deliver()

    def deliver() -> None:
        for into, j in zip(outputs, program.outputs):
            into.copy_(env[j])

    done = False
    try:
        for recorded, indices in groups(program, mode):
            if recorded:
                recording, _ = record(functools.partial(body, indices))
                calls.append(recording)
                done = indices[-1] == last
                continue
            if not calls:
                calls.append(record(first)[0])
            (i,) = indices
            step = program.steps[i]
            tensors = tuple(recorder.unowned(env[j]) for j in step.reads)
            calls.append(EagerCall(step.name, fns[i], tensors, rows[i]))
            for j in step.drops:
                del env[j]
        if not calls:
            calls.append(record(first)[0])
        if outputs and not done:
            calls.append(record(deliver)[0])
    except BaseException:
        env.clear()  # the traceback holds this frame, and would hold the pool's memory with it
        calls.clear()
        raise
    return Replay(mode, descriptor, tuple(calls), outputs, first)
