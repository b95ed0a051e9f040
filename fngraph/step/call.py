"""One call of a `Captured` step: read the arguments, check, dispatch, stage, replay, own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from fngraph.core import BatchSpec, Mode
from fngraph.core.program import run_program
from fngraph.errors import TreeError
from fngraph.graphs.staging.buffers import check_leaves
from fngraph.step.ambient import fixed_ambient, meet
from fngraph.step.backend_plans import plan_step
from fngraph.step.entry import CALLED
from fngraph.step.obtain import find_replay
from fngraph.step.prepared import Prepared, kinds_of, prepare

if TYPE_CHECKING:
    from fngraph.step.captured import Captured
    from fngraph.step.host_batch import HostBatch

EXACT = BatchSpec(1, 1, query_len=1)  # stands for a batch that has exact shapes and no counts


def call(step: Captured, /, *args: Any, **kwargs: Any) -> Any:
    """One step: `forward` without its held arguments.

    Raises:
        SpecError: a batch beyond the limits.
        TreeError: arguments that are not what was traced; with paths.
        AddressError: bound leaves that moved, or other donated ones.
        AmbientError: autocast, default dtype, ... have changed, and that is to be an error.
        TransformError: within a `torch.func` transform.
        CaptureError: a key that cannot be captured, or a step within a capture of the caller's.
        SleepError: while it sleeps.
    """
    turn = step.recorder.turn
    with turn.lock:
        last = step.last_call
        ambient = last.read_ambient()
        if ambient != last.ambient:
            meet(step, ambient)
        in_fixed_ambient, step = last.in_fixed_ambient, last.step
        stream = turn.current()
        if stream != turn.stream or turn.capturing():
            turn.order(stream)
        entry = step.entry
        if kwargs or len(args) != entry.count:
            args = tuple(step.compiled.args.signature.values(args, kwargs, *CALLED))
        for at, position, bound in entry.donated:
            if args[at] is not bound:
                step.binding.check_argument(position, args[at])
        if step.binding.watch.moved():
            step.binding.check()
        batch, last = args[entry.staged_at], step.last_call
        filled, last.host_batch = last.host_batch, None
        prepared = None
        if filled is not None and filled.batch is batch:
            spec, prepared = filled.spec, filled.prepared
        else:
            filled, spec = None, _spec_of(step, batch)
        if prepared is None:
            prepared = step.prepared.get(spec[:7]) or prepare(step, spec)
        leaves = _leaves(step, batch, prepared) if filled is None else None
        if prepared.replay is None and prepared.chosen.mode is not Mode.NONE:
            find_replay(step, prepared, spec)
        if prepared.ignores_grad_mode or (in_fixed_ambient and turn.is_here()):
            results = _results(step, prepared, spec, batch, leaves, filled)
        else:
            with fixed_ambient(step):
                results = _results(step, prepared, spec, batch, leaves, filled)
        return step.assemble(results, args)


def _leaves(step: Captured, batch: Any, prepared: Prepared) -> Sequence[torch.Tensor]:
    """The leaves of a batch, which must be what its spec says."""
    leaves = step.entry.leaves(batch)
    try:
        right = [kinds_of(x) for x in leaves] == prepared.kinds
    except AttributeError:  # no tensor
        right = False
    if not right:
        check_leaves(step.static.buffer_plan, leaves, prepared.true)
    return leaves


def _spec_of(step: Captured, batch: Any) -> BatchSpec:
    field = step.entry.spec_field
    if field is None:
        return EXACT
    spec = getattr(batch, field, None)
    if type(spec) is BatchSpec:
        return spec
    raise TreeError(
        f"{step.compiled.args.batch_name}.{field} is {spec!r}, not a BatchSpec. Say what the "
        f"batch holds: {field}=fg.BatchSpec(num_tokens=..., num_reqs=...)"
    )


def _results(
    step: Captured,
    prepared: Prepared,
    spec: BatchSpec,
    batch: Any,
    leaves: Sequence[torch.Tensor] | None,
    filled: HostBatch | None,
) -> list[torch.Tensor]:
    """Stage, replay, own.

    Args:
        leaves: of the batch; None if it is `filled`.
        filled: the batch as `host_batch` handed it out for this step, if it is that one.
    """
    ring, stats = step.ring, step.stats
    if step.compiled.planners:
        plan_step(step, prepared.chosen, prepared.true, step.entry.leaves(batch))
    if filled is not None and prepared.replay is not None and filled.is_in_place(ring.taken):
        ring.memory[filled.in_slot.place] = filled.in_slot.words
        ring.taken += 1
    else:
        own = -1 if filled is None else filled.slot
        leaves = _leaves(step, batch, prepared) if leaves is None else leaves
        if prepared.replay is None:
            ring.check_own(leaves, own)
            results = run_eagerly(step, leaves, prepared.true, spec)
            stats.observe(spec[0], prepared.chosen)
            return results
        ring.put(prepared.words, leaves, own)
    prepared.replay.used = ring.taken
    bounds = None if prepared.chosen.mode is Mode.FULL else spec.bounds
    try:
        for fn, takes_host in prepared.calls:  # as `launch` does; a frame less, in each step
            if takes_host:
                returned = fn(host=bounds)
                if returned is not None:
                    _refuse_returned(prepared, fn, returned)
            else:
                fn()
    except BaseException:
        ring.resume()
        raise
    stats.counts[prepared.counted_as] = stats.counts.get(prepared.counted_as, 0) + 1
    if step.borrow:  # views of their own, since the caller may change what a view shows
        return [view.detach() for view in prepared.views]
    return [view.clone() for view in prepared.views]


def _refuse_returned(prepared: Prepared, fn: Any, returned: Any) -> None:
    """Raise because a call between graphs returned something.

    Raises:
        BackendError: always, by the name of the backend.
    """
    replay: Any = prepared.replay
    place = [call for call, _ in prepared.calls].index(fn)
    replay.calls[place].fn.backend.refuse_returned(returned)


def run_eagerly(
    step: Captured, batch: Sequence[torch.Tensor], true: dict[str, int], spec: BatchSpec
) -> list[torch.Tensor]:
    """Unpadded, on the batch's own tensors; those in host memory may be refilled at once."""
    pieces = step.compiled.lowered.split.pieces
    device = step.recorder.device
    inputs = step.binding.inputs([_on(device, x) for x in batch], step.constants)
    results = run_program(pieces.program, step.compiled.fns, inputs, true, spec.bounds)
    return [r.clone() if old else r for r, old in zip(results, pieces.output_aliased)]


def _on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A leaf on the device, without a wait: torch keeps pinned memory until it is read."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return pinned.to(device, non_blocking=True)
