"""New values for held leaves: checked, traced again if a shape or dtype changes, then written."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fngraph.fx.leaves import Leaf
from fngraph.graphs.addresses import Watch, check_places, places
from fngraph.stages import Compiled, trace_function
from fngraph.step.ahead import capture_ahead
from fngraph.step.binding import Binding
from fngraph.step.budget import free
from fngraph.step.change import Change, change_of
from fngraph.step.entry import make_entry
from fngraph.step.given import given, storages
from fngraph.step.prepared import forget
from fngraph.step.tied import check_tied

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


KEPT = {"replays", "prepared", "stats", "siblings", "book"}  # of a step, whatever it is bound to


def rebind(step: Captured, /, **held: Any) -> None:
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
        FnGraphError: `forward` refuses the new shapes, or torch does, in its own words. Nothing
            has been written.
        CaptureError: a key cannot be captured again; the others are, or will be when needed.
    """
    with step.recorder.turn.taken():
        binding = step.binding
        memory = storages(binding.leaves)
        changes = {one.at: change_of(binding, one, memory) for one in given(binding, held)}
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
        reads_moved = bool(moved & _read(compiled)) and not step.book.asleep  # `wake` does it then
        for change in changes.values():
            change.apply()
        at, watch = places(binding.leaves), Watch(binding.leaves)
        now = dataclasses.replace(binding, args=compiled.args, recorded=at, watch=watch)
        if reads_moved or not same:
            _recapture(step, compiled, now)
        else:
            _set(step, compiled=compiled, binding=now)
        if moved:
            step.siblings.clear()  # what served another ambient state is made again when needed
            step.last_call.ambient = None
            forget(step)


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
    return {i for step in program.instructions for i in step.reads} | set(program.outputs)


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
