"""New values for held leaves: written where the old ones are, or put in their place.

    step.rebind(params=new)     # check all; trace again if a shape or dtype changes; then write

A leaf of another shape or dtype gets the new tensor's memory (`leaf.data = new`), so that every
tree that holds the leaf has the new one, and every other function that reads it sees that it moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fngraph.errors import TreeError
from fngraph.fx.kinds import overlaps
from fngraph.fx.leaves import Leaf, TensorSpec
from fngraph.graphs.addresses import check_places, places
from fngraph.graphs.watch import Watch
from fngraph.stages import Compiled, trace_function
from fngraph.step.binding import Binding
from fngraph.step.budget import free
from fngraph.step.given import Given, given, is_same, loaded, storages, write
from fngraph.step.keys import capture_ahead
from fngraph.step.ready import forget, make_entry
from fngraph.step.tied import check_tied

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


KEPT = {"replays", "ready", "stats", "siblings", "book"}  # of a step, whatever it is bound to


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is to happen to one leaf, and its spec after that. `replaces`: it gets other memory."""

    one: Given
    spec: TensorSpec
    apply: Callable[[], None]
    replaces: bool = False


def rebind(step: Captured, arguments: Mapping[str, Any]) -> None:
    """See `Captured.rebind`."""
    with step.recorder.turn.taken():
        _rebind(step, arguments)


def _rebind(step: Captured, arguments: Mapping[str, Any]) -> None:
    binding = step.binding
    memory = storages(binding.leaves)
    changes = {one.at: _change(binding, one, memory) for one in given(binding, arguments)}
    _check_the_rest(binding, changes)
    replaced = {at for at, change in changes.items() if change.replaces}
    if replaced:
        step.book.check_awake()  # it may have to be captured again
    check_tied(binding, {at: change.one for at, change in changes.items()}, replaced)
    specs = {binding.indices[at]: change.spec for at, change in changes.items()}
    leaves = [
        dataclasses.replace(leaf, spec=specs.get(i, leaf.spec))
        for i, leaf in enumerate(binding.args.leaves)
    ]
    compiled, same = _retraced(step.compiled, leaves)
    where = zip(binding.indices, zip(*places(binding.leaves)), zip(*binding.recorded))
    moved = {i for i, a, b in where if a != b} | {binding.indices[at] for at in replaced}
    again = not same or bool(
        moved & _read(compiled) and not step.book.asleep
    )  # `wake` does it then
    for change in changes.values():
        change.apply()
    now = dataclasses.replace(
        binding, args=compiled.args, recorded=places(binding.leaves), watch=Watch(binding.leaves)
    )
    if again:
        _recapture(step, compiled, now)
    else:
        _set(step, compiled=compiled, binding=now)
    if moved:
        step.siblings.clear()  # what served another ambient state is made again when needed
        step.hot.state = None
        forget(step)


def _change(binding: Binding, one: Given, memory: set[int]) -> Change:
    """Decide, and keep nothing of the value but its spec.

    Args:
        memory: storages of the bound leaves.

    Raises:
        TreeError: a value that is no tensor, or a leaf that cannot take it.
    """
    target, value = binding.leaves[one.at], loaded(one)
    if is_same(value, target):
        return Change(one, TensorSpec.of(target), lambda: None)
    if storages([value]) & memory:  # writing another leaf may change it first
        kept = value.clone()
        one = dataclasses.replace(one, load=lambda: kept)
    if value.shape == target.shape and value.dtype is target.dtype:
        if overlaps(target):
            raise TreeError(
                f"{one.path}: its elements share memory (strides {target.stride()}), so it cannot "
                "be written element by element. Bind one that can: x.contiguous()"
            )
        return Change(one, TensorSpec.of(target), lambda: write(target, loaded(one)))
    takes_grad = value.is_floating_point() or value.is_complex()
    if target.requires_grad and not target.is_leaf and not takes_grad:
        raise TreeError(f"{one.path} was computed with gradients; bind {one.path}.detach()")
    strides = torch.empty(value.shape, device="meta").stride()
    spec = TensorSpec(tuple(value.shape), value.dtype, strides, target.device)
    return Change(one, spec, lambda: _replace(target, loaded(one)), replaces=True)


def _replace(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give `target` the memory of `value`, which is copied if it is laid out or placed elsewise."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        plain = not (value.is_conj() or value.is_neg()) and value.is_contiguous()
        if (
            value.device != target.device
            or not plain
            or value.is_inference() != target.is_inference()
        ):
            value = torch.empty(value.shape, dtype=value.dtype, device=target.device).copy_(value)
        if target.requires_grad and not (value.is_floating_point() or value.is_complex()):
            target.requires_grad_(False)
        target.data = value


def _check_the_rest(binding: Binding, changes: Mapping[int, Change]) -> None:
    """Raise `AddressError` if a leaf that is not given has moved: its new place is unknown here."""
    rest = [i for i in range(len(binding.leaves)) if i not in changes]
    check_places(
        [binding.leaves[i] for i in rest],
        ([binding.recorded[0][i] for i in rest], [binding.recorded[1][i] for i in rest],
         [binding.recorded[2][i] for i in rest]),
        [binding.paths[i] for i in rest],
        "Rebind it too, step.rebind(params=params)",
    )  # fmt: skip


def _retraced(compiled: Compiled, leaves: Sequence[Leaf]) -> tuple[Compiled, bool]:
    """The function compiled for other leaves, and whether it computes as it did."""
    if list(leaves) == list(compiled.args.leaves):
        return compiled, True
    lowered = compiled.lowered
    old = lowered.split.traced
    args = dataclasses.replace(old.args, leaves=tuple(leaves))
    new = trace_function(args, old.options, old.limits)
    made = new.split().lower(lowered.limits)
    same = (
        new.graph.same_as(old.graph)
        and new.out_tree == old.out_tree
        and new.ambient.kernels == old.ambient.kernels
    )
    return (Compiled(made, compiled.fns), True) if same else (made.compile(), False)


def _read(compiled: Compiled) -> set[int]:
    """Indices of the leaves that some step of the program reads, or that are returned."""
    program = compiled.lowered.split.program
    return {i for step in program.steps for i in step.reads} | set(program.outputs)


def _recapture(step: Captured, compiled: Compiled, binding: Binding) -> None:
    """Memory and graphs anew, in the same pool, of the keys that were captured."""
    from fngraph.step.allocate import anew

    keys = list(step.replays)
    step.recorder.synchronize()  # a step in flight still reads its slot
    free(step, keys)
    step.book.failed.clear()
    step.book.warm.clear()
    made = anew(step, compiled)
    new = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in KEPT}
    donated = make_entry(compiled.args, binding).donated
    entry = dataclasses.replace(made.entry, donated=donated)
    _set(step, **{**new, "binding": binding, "entry": entry})
    capture_ahead(step, [key for key in keys if key in compiled.lowered.table])


def _set(step: Captured, **fields: Any) -> None:
    """A step is one value to its users but for this: it goes on with other weights."""
    for name, value in fields.items():
        object.__setattr__(step, name, value)
