"""One call of a `Captured` step: read the arguments, check, dispatch, stage, replay, own."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from fngraph.core import BatchSpec, Mode, dispatch
from fngraph.core.program import run
from fngraph.core.where import user_line
from fngraph.errors import TransformError, TreeError
from fngraph.graphs.staging import check_leaves, true_sizes
from fngraph.step import keys
from fngraph.step.ready import CALLED, MOST_READY, Ready, make_ready

if TYPE_CHECKING:
    from fngraph.step.captured import Captured

EXACT = BatchSpec(1, 1, query_len=1)  # stands for a batch that has exact shapes and no counts


def call(step: Captured, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    entry = step.entry
    if kwargs or len(args) != entry.count:
        args = tuple(step.compiled.args.signature.values(args, kwargs, *CALLED))
    containers = {}
    for at, position, bound in entry.donated:
        value = args[at]
        if value is not bound:
            step.binding.check_argument(position, value)
        containers[position] = value
    value = args[entry.staged_at]
    batch = entry.leaves(value)
    spec = EXACT if entry.spec_field is None else getattr(value, entry.spec_field, None)
    if type(spec) is not BatchSpec:
        _refuse_spec(step, spec)
    step.binding.check()
    ready = step.ready.get(spec[:7])
    if ready is None:
        ready = _prepare(step, spec)
    shapes = [getattr(x, "shape", None) for x in batch]
    kinds = [(x.dtype, x.layout, x.is_meta) for x in batch] if shapes == ready.shapes else None
    if kinds != entry.kinds:
        check_leaves(step.static.plan, batch, ready.true)
    if _is_settled(step):
        results = _results(step, ready, batch, spec)
    else:
        with step.fixed_ambient():
            results = _results(step, ready, batch, spec)
    step.stats.observe(spec[0], ready.chosen)  # as it ran: a key that fails to capture runs eagerly
    return step.assemble(results, containers)


def host_batch(step: Captured, spec: BatchSpec) -> Any:
    """A batch in the ring's next slot, in pinned memory on CUDA: fill its leaves, and pass it.

    Its contents are whatever was last in the slot. It is good for one step, the next one.

    Raises:
        TreeError: a function without a spec, whose batches have exact shapes.
    """
    field = step.entry.spec_field
    if field is None:
        raise TreeError("host_batch needs a batch with a spec; this one has exact shapes")
    ready = step.ready.get(spec[:7]) or _prepare(step, spec)
    slot = step.ring.wait()
    batch = ready.slots.get(slot)
    if batch is None:
        leaves = step.ring.leaves(slot, ready.shapes)
        batch = ready.slots[slot] = step.compiled.args.batch_over(leaves)
    filled = copy.copy(batch)
    filled.__dict__[field] = spec
    return filled


def _prepare(step: Captured, spec: BatchSpec) -> Ready:
    """All that the counts of a batch decide, kept for the next one that has the same."""
    step.book.check_awake()  # no call is found ready while it sleeps
    step.limits.check(spec)
    chosen = dispatch(step.table, spec)
    true = true_sizes(spec, step.limits.dims)
    with step.fixed_ambient():
        ready = make_ready(step.static.plan, chosen, true, step.outputs, step.cut)
    if len(step.ready) >= MOST_READY:
        step.ready.clear()
    step.ready[spec[:7]] = ready
    return ready


def _refuse_spec(step: Captured, spec: object) -> NoReturn:
    field = step.entry.spec_field
    raise TreeError(
        f"{step.compiled.args.batch_name}.{field} is {spec!r}, not a BatchSpec. Say what the "
        f"batch holds: {field}=fg.BatchSpec(num_tokens=..., num_reqs=...)"
    )


def _results(
    step: Captured, ready: Ready, batch: Sequence[torch.Tensor], spec: BatchSpec
) -> Sequence[torch.Tensor]:
    if ready.replay is None and ready.chosen.mode is not Mode.NONE:
        keys.make_ready(step, ready, spec)
    replay = ready.replay
    if replay is None:
        return run_eagerly(step, batch, ready.true, spec)
    step.ring.put(ready.words, batch)
    replay.used = step.ring.taken
    try:
        replay(ready.true, spec.host)
    except BaseException:
        step.ring.resume()
        raise
    return ready.views if step.borrow else [view.clone() for view in ready.views]


def _is_settled(step: Captured) -> bool:
    """Whether the caller's own state is the one that steps run under."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled() is not step.binding.inference
        or torch.is_autocast_enabled(step.recorder.device.type)
    )


def run_eagerly(
    step: Captured, batch: Sequence[torch.Tensor], true: dict[str, int], spec: BatchSpec
) -> list[torch.Tensor]:
    """Eagerly, unpadded, on the batch's own tensors."""
    pieces = step.compiled.lowered.split.pieces
    device = step.recorder.device
    inputs = step.binding.inputs([x.to(device) for x in batch], step.constants)
    results = run(pieces.program, step.compiled.fns, inputs, true, spec.host)
    return [r.clone() if old else r for r, old in zip(results, pieces.output_aliased)]


def check_no_transform() -> None:
    """Raise if a `torch.func` transform goes over a whole step: it would see constants.

    Raises:
        TransformError: always then.
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError(
            f"{user_line()}: a torch.func transform goes over a graphified function, whose results "
            "are constants to it. Put the transform inside: fg.graphify(torch.func.vmap(f)), or "
            "call torch.func.grad(f) in the function that is graphified"
        )
