"""Adapters (LoRA): slots of held leaves that are stacked along their first dim.

A graph reads the stacked leaf where it is, and each row of a batch says which slot is its own; so
an adapter comes and goes without a capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from fngraph.errors import TreeError
from fngraph.step.given import given, loaded, storages, write
from fngraph.torch_facts.memory import overlaps_itself

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def load_slot(step: Captured, /, slot: int, **held: Any) -> None:
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
    with step.recorder.turn.taken():
        step.binding.check()
        leaves = step.binding.leaves
        memory = storages(leaves)
        targets = []
        for one in given(step.binding, held):
            stacked, value = leaves[one.at], loaded(one)
            if type(slot) is not int or not stacked.dim() or not 0 <= slot < len(stacked):
                slots = len(stacked) if stacked.dim() else 0
                raise TreeError(
                    f"{one.path} has {slots} slots, counted from 0; slot={slot!r} is none"
                )
            if value.shape != stacked.shape[1:] or value.dtype is not stacked.dtype:
                want, got = _text(stacked[0]), _text(value)
                raise TreeError(f"{one.path}: a slot of it is {want}, given {got}")
            if overlaps_itself(stacked):
                raise TreeError(f"{one.path}: its slots share memory (strides {stacked.stride()})")
            copy = value.clone() if storages([value]) & memory else None
            targets.append((one, stacked[slot], copy))
        for one, target, copy in targets:
            write(target, loaded(one) if copy is None else copy)


def _text(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
