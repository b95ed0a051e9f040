"""Values for held leaves, as a tree or by path: matched with the leaves, loaded one by one.

`slot_writes` writes them into slots of leaves that are stacked along their first dim (adapters): a
graph reads the stacked leaf where it is, and each row of a batch says which slot is its own; so an
adapter comes and goes without a capture.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from fngraph.core import trees
from fngraph.core.text import did_you_mean
from fngraph.errors import TreeError
from fngraph.fx.leaves import Role, TensorSpec, check_memory
from fngraph.step.binding import Binding, flatten_as
from fngraph.torch_facts.memory import (
    Bytes,
    joined,
    kind_of,
    overlaps,
    overlaps_itself,
    storage_bytes,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """A new value for the held leaf at `at` of the binding; `load` may read it from a file."""

    at: int
    path: str
    load: Callable[[], torch.Tensor]


def values_for(binding: Binding, arguments: Mapping[str, Any]) -> list[Given]:
    """The held leaves that `arguments` has values for.

    Args:
        arguments: by name of a held parameter, a tree of the bound structure, or a mapping from
            some of its paths, as errors write them (`params["layers"][0].wq`), to tensors.

    Raises:
        TreeError: an argument that is not held, another structure, or a path that is none.
    """
    signature = binding.args.signature
    held = {signature.names[i]: i for i in signature.positions(Role.HELD)}
    found: list[Given] = []
    for name, value in arguments.items():
        if name not in held:
            raise TreeError(f"{name!r} is not held; held are {list(held)}")
        span = binding.spans[held[name]]
        places = dict(zip(binding.paths[span], range(span.start, span.stop)))
        if isinstance(value, Mapping) and _is_by_path(value, places, name):
            get = value.__getitem__
            found += [Given(places[path], path, partial(get, path)) for path in value]
            continue
        trees.register_dataclasses(value)
        value = trees.ordered_as(value, binding.args.treedefs[held[name]])
        flat = flatten_as(binding.args, held[name], value)
        found += [
            Given(at, path, partial(_itself, x)) for (path, at), x in zip(places.items(), flat)
        ]
    return found


def _itself(value: Any) -> Any:
    return value


def _is_by_path(value: Mapping[Any, Any], places: Mapping[str, int], name: str) -> bool:
    """Whether the keys are paths: each begins with the argument's own name."""

    def is_path(key: Any) -> bool:
        return key in places or (isinstance(key, str) and key.startswith((f"{name}[", f"{name}.")))

    if not value or not all(map(is_path, value)):
        return False
    unknown = [path for path in value if path not in places]
    if unknown:
        some = ", ".join(list(places)[:3])
        near = did_you_mean(unknown[0], places)
        raise TreeError(
            f"no such leaves: {', '.join(unknown)}.{near} Paths are written {some}, ..."
        )
    return True


def loaded(one: Given) -> torch.Tensor:
    """The value: a tensor with memory.

    Raises:
        TreeError: it is none.
    """
    value = one.load()
    if not isinstance(value, torch.Tensor):
        raise TreeError(f"{one.path}: expected a tensor, got {type(value).__name__}")
    check_memory(one.path, value, donated=False)
    return value


def is_same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same elements of one memory, read alike."""
    return (
        a.device == b.device
        and a.data_ptr() == b.data_ptr()
        and TensorSpec.of(a) == TensorSpec.of(b)
    )


def memory_of(tensors: Iterable[torch.Tensor]) -> list[Bytes]:
    """The memory that tensors are in, for `lies_in`."""
    return joined(map(storage_bytes, tensors))


def lies_in(memory: Sequence[Bytes], x: torch.Tensor) -> bool:
    """Whether a tensor shares memory with those of which that is."""
    return overlaps(storage_bytes(x), memory)


def write(target: torch.Tensor, value: torch.Tensor) -> None:
    """Copy into a held leaf where it is, whatever mode the caller or the leaf is in."""
    with torch.inference_mode(target.is_inference()), torch.no_grad():
        target.detach().copy_(value)


def slot_writes(
    binding: Binding, slot: Any, held: Mapping[str, Any]
) -> list[tuple[torch.Tensor, Callable[[], torch.Tensor]]]:
    """What to write where, for values of one slot: leaf k goes into `leaf_k[slot]`.

    Raises:
        TreeError: nothing, another structure, a slot that is none, or another shape or dtype.
    """
    if not held:
        raise TreeError(
            f"load_slot({slot!r}) has nothing to load. Pass it by its argument's name: "
            f"load_slot({slot!r}, adapters=tree)"
        )
    leaves = binding.leaves
    memory = memory_of(leaves)
    writes: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
    for one in values_for(binding, held):
        stacked, value = leaves[one.at], loaded(one)
        if type(slot) is not int or not stacked.dim() or not 0 <= slot < len(stacked):
            slots = len(stacked) if stacked.dim() else 0
            raise TreeError(f"{one.path} has {slots} slots, counted from 0; slot={slot!r} is none")
        if value.shape != stacked.shape[1:] or value.dtype is not stacked.dtype:
            want, got = kind_of(stacked[0]), kind_of(value)
            raise TreeError(f"{one.path}: a slot of it is {want}, given {got}")
        if overlaps_itself(stacked):
            raise TreeError(f"{one.path}: its slots share memory (strides {stacked.stride()})")
        if lies_in(memory, value):  # writing another leaf may change it first
            writes.append((stacked[slot], partial(_itself, value.clone())))
        else:
            writes.append((stacked[slot], partial(loaded, one)))
    return writes
