"""Batches that lie in the ring's slots, for the caller to fill where the graph reads them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from fngraph.core import BatchSpec
from fngraph.core.trees import is_frozen
from fngraph.errors import TreeError
from fngraph.graphs.addresses import Watch
from fngraph.graphs.staging.ring import SLOTS
from fngraph.step.changed_rows import ChangedRows
from fngraph.step.prepared import Prepared, prepare
from fngraph.step.tables import put_changed

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


@dataclasses.dataclass(frozen=True, slots=True)
class SlotBatch:
    """A slot of the ring, seen as a batch of some counts.

    Attributes:
        fields: of the batch, but for its spec.
        watch: over its leaves.
        frozen: whether no leaf of it can be replaced.
        place: of the slot's words in the ring's memory.
        words: which they are.
    """

    fields: dict[str, Any]
    watch: Watch
    frozen: bool
    place: slice
    words: bytes


class HostBatch(NamedTuple):
    """A batch that `host_batch` has handed out, for the step that the ring's `taken` counts."""

    batch: Any
    spec: BatchSpec
    prepared: Prepared | None  # None once it is forgotten
    in_slot: SlotBatch
    taken: int

    @property
    def slot(self) -> int:
        """Of the ring."""
        return self.taken % SLOTS

    def is_in_place(self, taken: int) -> bool:
        """Whether the step that now follows can read it where it is."""
        return self.taken == taken and self.in_slot.frozen and not self.in_slot.watch.moved()


def host_batch(step: Captured, /, spec: BatchSpec, **changed: ChangedRows) -> Any:
    """A batch in the ring's next slot, in pinned memory on CUDA: fill its leaves, and pass it.

    Its contents are whatever was last in the slot. It is good for one step, the next one.

    Args:
        changed: for fields with rows="changed", what takes the place of the whole leaf.

    Raises:
        TreeError: a function without a spec, whose batches have exact shapes; or a field that
            takes no `ChangedRows`.
    """
    args, field, ring = step.compiled.args, step.entry.spec_field, step.ring
    if field is None or args.batch_type is None:
        raise TreeError("host_batch needs a batch with a spec; this one has exact shapes")
    with step.recorder.turn.lock:
        prepared = step.prepared.get(spec[:7]) or prepare(step, spec)
        slot = ring.wait()
        in_slot = prepared.slots.get(slot) or _slot_batch(step, prepared, slot)
        if in_slot is None:  # an eager batch beyond the largest key
            leaves = ring.new_leaves([shape for shape, *_ in prepared.kinds])
            batch = dataclasses.replace(args.batch_over(leaves), **{field: spec})
        else:
            batch = object.__new__(args.batch_type)
            batch.__dict__.update(in_slot.fields)
            batch.__dict__[field] = spec
            step.last_call.host_batch = HostBatch(batch, spec, prepared, in_slot, ring.taken)
    if changed:
        put_changed(step.tables, batch, changed)
    return batch


def _slot_batch(step: Captured, prepared: Prepared, slot: int) -> SlotBatch | None:
    leaves = step.ring.leaves(slot, [shape for shape, *_ in prepared.kinds])
    if leaves is None:
        return None
    batch = step.compiled.args.batch_over(leaves)
    frozen = is_frozen(batch) and step.tables is None  # whose rows are also device state
    place, words = step.ring.place(slot), step.ring.pack(prepared.words, leaves)
    in_slot = prepared.slots[slot] = SlotBatch(vars(batch), Watch(leaves), frozen, place, words)
    return in_slot
