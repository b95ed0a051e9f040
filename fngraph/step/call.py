"""What one call does once its key is known: check the batch, stage, replay, own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fngraph.core import BatchSpec, Mode
from fngraph.core.program import run_program
from fngraph.errors import TreeError
from fngraph.fx.arguments import Arguments
from fngraph.graphs.staging.buffers import check_leaves
from fngraph.step.capture import plan_step
from fngraph.step.keys import Keys
from fngraph.step.prepared import HostBatch, Prepared, kinds_of
from fngraph.torch_facts.memory import Bytes, overlaps, storage_bytes
from fngraph.torch_facts.names import InferenceMode, TensorGuards, count_write

FULL = Mode.FULL  # one graph, to which bounds and grad mode are nothing; to find it takes 0.1 us
EXACT = BatchSpec(1, 1, query_len=1)  # stands for a batch that has exact shapes and no counts


def spec_of(keys: Keys, batch: Any) -> BatchSpec:
    """The counts of a batch.

    Raises:
        TreeError: its spec is none.
    """
    field = keys.shared.entry.spec_field
    if field is None:
        return EXACT
    spec = getattr(batch, field, None)
    if type(spec) is BatchSpec:
        return spec
    raise no_spec(keys.executable.args, field, batch)


def no_spec(args: Arguments, field: str, batch: Any) -> TreeError:
    """The error about a batch without counts."""
    if args.batch_type is not None and not hasattr(batch, field):
        expected = args.batch_type.__name__
        return TreeError(
            f"{args.batch_name} is a {type(batch).__name__}, not a {expected}, which says how each "
            f"leaf is padded. Pass {expected}(..., {field}=fg.BatchSpec(num_tokens=..., "
            "num_reqs=...))"
        )
    return TreeError(
        f"{args.batch_name}.{field} is {getattr(batch, field)!r}, not a BatchSpec. Say what the "
        f"batch holds: {field}=fg.BatchSpec(num_tokens=..., num_reqs=...)"
    )


def leaves_of(keys: Keys, batch: Any, prepared: Prepared) -> tuple[Sequence[torch.Tensor], bool]:
    """The leaves of a batch, which must be what its spec says; whether graphs read them in place.

    Leaves that are as those of an earlier batch were are not looked at one by one: 1 us, not 9.

    Raises:
        TreeError: they are not.
    """
    leaves = keys.shared.entry.leaves(batch)
    if prepared.alike is not None and prepared.alike(*leaves):
        return leaves, prepared.in_place
    try:
        right = [kinds_of(x) for x in leaves] == prepared.kinds
    except AttributeError:  # no tensor
        right = False
    if not right:
        check_leaves(keys.executable.plan, leaves, prepared.true)
    prepared.in_place = keys.ring.takes_in_place(leaves)
    prepared.alike = TensorGuards(*leaves, dynamic_dims_sizes=[], dynamic_dims_strides=[]).check
    return leaves, prepared.in_place


def results_of(
    keys: Keys,
    prepared: Prepared,
    spec: BatchSpec,
    batch: Any,
    read: tuple[Sequence[torch.Tensor], bool] | None,
    filled: HostBatch | None,
) -> list[torch.Tensor]:
    """Stage, replay, own.

    Args:
        read: `leaves_of` the batch; None if it is `filled`.
        filled: the batch as `host_batch` handed it out for this step, if it is that one.
    """
    ring, shared = keys.ring, keys.shared
    number = next(shared.numbers)
    if keys.executable.planners:
        plan_step(keys, prepared.chosen, prepared.true, shared.entry.leaves(batch))
    if filled is not None and prepared.replay is not None and filled.is_in_place(ring.taken):
        ring.memory[filled.in_slot.place] = filled.in_slot.words
        ring.taken += 1
    else:
        own = -1 if filled is None else filled.slot
        leaves, in_place = read or leaves_of(keys, batch, prepared)
        if prepared.replay is None:
            ring.check_own(leaves, own)
            results = _run_eagerly(keys, leaves, prepared.true, spec)
            shared.stats.observe(spec.num_tokens, prepared.chosen)
            return results
        if in_place:
            ring.put_in_place(prepared.words, leaves)
        else:
            ring.put(prepared.words, leaves, own)
    prepared.replay.used = number
    bounds = None if prepared.chosen.mode is FULL else spec.bounds
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
    counts = shared.stats.counts
    counts[prepared.counted_as] = counts.get(prepared.counted_as, 0) + 1
    if shared.borrow:  # views of their own, since the caller may change what a view shows
        count_write(prepared.views)  # autograd may have kept what the call before has lent
        return [view.detach() for view in prepared.views]  # `.data` would have a count of its own
    return _owned(prepared.views, shared.binding.inference)


def _owned(views: Sequence[torch.Tensor], inference: bool) -> list[torch.Tensor]:
    """Copies. Nothing changes them but inference mode: no view has a gradient."""
    if torch.is_inference_mode_enabled() is inference:
        return [view.clone() for view in views]
    with InferenceMode(inference):
        return [view.clone() for view in views]


def _refuse_returned(prepared: Prepared, fn: Any, returned: Any) -> None:
    """Raise because a call between graphs returned something.

    Raises:
        BackendError: always, by the name of the backend.
    """
    replay: Any = prepared.replay
    place = [call for call, _ in prepared.calls].index(fn)
    replay.calls[place].fn.backend.refuse_returned(returned)


def _run_eagerly(
    keys: Keys, batch: Sequence[torch.Tensor], true: dict[str, int], spec: BatchSpec
) -> list[torch.Tensor]:
    """Unpadded, on the batch's own tensors; those in host memory may be refilled at once."""
    executable, shared = keys.executable, keys.shared
    device, written = shared.recorder.device, shared.binding.written
    leaves = [_as_staged(_on(device, x), written) for x in batch]
    inputs = shared.binding.inputs(leaves, keys.constants)
    results = run_program(executable.program, executable.fns, inputs, true, spec.bounds)
    return [r.clone() if old else r for r, old in zip(results, executable.output_aliased)]


def _as_staged(x: torch.Tensor, written: Sequence[Bytes]) -> torch.Tensor:
    """A leaf as a static buffer would hold it: dense, in its shape's own order, at an address for
    which kernels are compiled, and in memory that the step does not write, as it does where a batch
    brings a view of the state."""
    if not x.is_contiguous() or x.is_conj() or x.is_neg():
        x = x.resolve_conj().resolve_neg().contiguous()
    apart = written and overlaps(storage_bytes(x), written)
    return x.clone() if apart or x.data_ptr() % ALIGNED else x


ALIGNED = 16  # bytes: Triton compiles another form of a kernel for what is not


def _on(device: torch.device, x: torch.Tensor) -> torch.Tensor:
    """A leaf on the device, without a wait: torch keeps pinned memory until it is read."""
    if device.type == "cpu" or x.device.type != "cpu":
        return x.to(device)
    pinned = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=True).copy_(x)
    return pinned.to(device, non_blocking=True)
