"""What a new value does to one held leaf: it is written where the old one is, or takes its place.

A leaf of another shape or dtype gets the new tensor's memory (`leaf.data = new`), so that every
tree that holds the leaf has the new one, and every other function that reads it sees that it moved.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from fngraph.errors import TreeError
from fngraph.fx.leaves import TensorSpec
from fngraph.step.binding import Binding
from fngraph.step.given import Given, is_same, loaded, storages, write
from fngraph.torch_facts.memory import overlaps_itself


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is to happen to one leaf, and its spec after that. `replaces`: it gets other memory."""

    one: Given
    spec: TensorSpec
    apply: Callable[[], None]
    replaces: bool = False


def change_of(binding: Binding, one: Given, memory: set[int]) -> Change:
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
        if overlaps_itself(target):
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
