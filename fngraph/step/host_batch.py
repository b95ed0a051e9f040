"""Batches over memory that graphs read: the ring's slots, for the caller to fill; static buffers,
for whoever can write them on the device.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fngraph.core import BatchDescriptor, BatchSpec, Mode
from fngraph.core.spec import COUNTS
from fngraph.core.text import did_you_mean
from fngraph.core.trees import is_frozen
from fngraph.errors import SpecError, TreeError
from fngraph.graphs.addresses import Watch
from fngraph.step.keys import Keys
from fngraph.step.prepared import HostBatch, Prepared, SlotBatch


def next_batch(keys: Keys, spec: BatchSpec) -> Any:
    """A batch of these counts in the ring's next slot; in memory of its own if it fits in none.

    Raises:
        TreeError: a function without a spec, whose batches have exact shapes.
    """
    args, field, ring = keys.executable.args, keys.shared.entry.spec_field, keys.ring
    if field is None or args.batch_type is None:
        raise TreeError("host_batch needs a batch with a spec; this one has exact shapes")
    prepared = keys.prepared.get(spec[COUNTS]) or keys.prepare(spec)
    slot = ring.wait()
    in_slot = prepared.slots.get(slot)
    if in_slot is None or in_slot.watch.moved():  # the caller has turned or replaced a leaf of it
        in_slot = _slot_batch(keys, prepared, slot)
    if in_slot is None:  # an eager batch beyond the largest key
        leaves = ring.new_leaves([shape for shape, *_ in prepared.kinds])
        return dataclasses.replace(args.batch_over(leaves), **{field: spec})
    batch: Any = object.__new__(args.batch_type)
    batch.__dict__.update(in_slot.fields)
    batch.__dict__[field] = spec
    keys.handed = HostBatch(batch, spec, prepared, in_slot, ring.taken)
    return batch


def _slot_batch(keys: Keys, prepared: Prepared, slot: int) -> SlotBatch | None:
    ring = keys.ring
    leaves = ring.leaves(slot, [shape for shape, *_ in prepared.kinds])
    if leaves is None:
        return None
    batch = keys.executable.args.batch_over(leaves)
    frozen = is_frozen(batch) and keys.shared.tables is None  # whose rows are also device state
    place, words = ring.place(slot), ring.pack(prepared.words, leaves)
    in_slot = prepared.slots[slot] = SlotBatch(vars(batch), Watch(leaves), frozen, place, words)
    return in_slot


def buffer_of(keys: Keys, descriptor: BatchDescriptor, leaf: str) -> torch.Tensor:
    """See `Step.static_buffer`."""
    keys.check_awake()
    executable = keys.executable
    if not any((mode, descriptor) in executable.table for mode in (Mode.FULL, Mode.PIECEWISE)):
        raise SpecError(
            f"{descriptor!r} is no key of this step. Ask for the one that a batch runs as: "
            "step.dispatch(spec).descriptor"
        )
    name = executable.args.batch_name
    paths = [planned.path for planned in executable.plan.buffers]
    path = leaf if leaf in paths else f"{name}.{leaf}"
    if path not in paths:
        near = did_you_mean(path, paths)
        raise TreeError(f"{leaf!r} is no leaf of {name}; there are {', '.join(paths)}.{near}")
    return keys.static.views(executable.sizes(descriptor))[paths.index(path)]
