"""Adapters (LoRA): slots of held leaves that are stacked along their first dim.

A graph reads the stacked leaf where it is, and each row of a batch says which slot is its own; so
an adapter comes and goes without a capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from fngraph.errors import TreeError
from fngraph.fx.kinds import overlaps
from fngraph.step.given import given, loaded, storages, write

if TYPE_CHECKING:
    from fngraph.step.binding import Binding
    from fngraph.step.captured import Captured


def load_slot(step: Captured, slot: int, arguments: Mapping[str, Any]) -> None:
    """See `Captured.load_slot`."""
    with step.recorder.turn.taken():
        _load_slot(step.binding, slot, arguments)


def _load_slot(binding: Binding, slot: int, arguments: Mapping[str, Any]) -> None:
    binding.check()
    memory = storages(binding.leaves)
    targets = []
    for one in given(binding, arguments):
        stacked, value = binding.leaves[one.at], loaded(one)
        if type(slot) is not int or not stacked.dim() or not 0 <= slot < len(stacked):
            slots = len(stacked) if stacked.dim() else 0
            raise TreeError(f"{one.path} has {slots} slots, counted from 0; slot={slot!r} is none")
        if value.shape != stacked.shape[1:] or value.dtype is not stacked.dtype:
            want, got = _text(stacked[0]), _text(value)
            raise TreeError(f"{one.path}: a slot of it is {want}, given {got}")
        if overlaps(stacked):
            raise TreeError(f"{one.path}: its slots share memory (strides {stacked.stride()})")
        copy = value.clone() if storages([value]) & memory else None
        targets.append((one, stacked[slot], copy))
    for one, target, copy in targets:
        write(target, loaded(one) if copy is None else copy)


def _text(x: torch.Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"
