"""New values for held leaves: what they do to each, checked before anything is written.

A value is written where the old one is; one of another shape or dtype takes its place: the leaf
gets the new tensor's memory (`leaf.data = new`), so that every tree that holds the leaf has the new
one, and every other function that reads it sees that it moved. Tied weights, leaves that are one
memory, can only be given one value.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch

from fngraph.errors import TreeError
from fngraph.fx.leaves import Leaf, Role, TensorSpec
from fngraph.graphs.addresses import check_places, places
from fngraph.step.binding import Binding
from fngraph.step.given import Given, is_same, lies_in, loaded, memory_of, values_for, write
from fngraph.torch_facts.memory import Bytes, extent, joined, overlaps_itself, storage_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Changes:
    """What new values will do.

    Attributes:
        changes: by position among the bound leaves.
        replaced: positions of those that get other memory.
        leaves: the abstract leaves of all arguments, as they will be.
    """

    binding: Binding
    changes: Mapping[int, Change]
    replaced: frozenset[int]
    leaves: tuple[Leaf, ...]

    @property
    def moved(self) -> set[int]:
        """Indices of the leaves that are, or will be, at other addresses than when bound."""
        binding = self.binding
        where = zip(binding.indices, zip(*places(binding.leaves)), zip(*binding.recorded))
        return {i for i, now, then in where if now != then} | {
            binding.indices[at] for at in self.replaced
        }

    def apply(self) -> None:
        """Write all of it."""
        for change in self.changes.values():
            change.apply()


def changes_of(binding: Binding, held: Mapping[str, Any]) -> Changes:
    """What the new values will do, with nothing written.

    Raises:
        TreeError: another structure, an unknown path, no tensor, or different values for leaves
            that share memory.
        AddressError: a leaf that is not given has moved.
    """
    memory = memory_of(binding.leaves)
    changes = {one.at: _change_of(binding, one, memory) for one in values_for(binding, held)}
    _check_the_rest(binding, changes)
    replaced = frozenset(at for at, change in changes.items() if change.replaces)
    _check_tied(binding, {at: change.one for at, change in changes.items()}, replaced)
    elsewhere = {binding.indices[at] for at in replaced}
    specs = {binding.indices[at]: change.spec for at, change in changes.items()}
    leaves = tuple(
        dataclasses.replace(
            leaf, spec=specs.get(i, leaf.spec), lies=None if i in elsewhere else leaf.lies
        )
        for i, leaf in enumerate(binding.args.leaves)
    )
    return Changes(binding, changes, replaced, leaves)


def _check_the_rest(binding: Binding, changes: Mapping[int, Change]) -> None:
    """Raise `AddressError` if a leaf that is not given has moved: its new place is unknown here."""
    rest = [i for i in range(len(binding.leaves)) if i not in changes]
    sig = binding.args.signature
    held = ", ".join(f"{sig.names[i]}=..." for i in sig.positions(Role.HELD))
    check_places(
        [binding.leaves[i] for i in rest],
        ([binding.recorded[0][i] for i in rest], [binding.recorded[1][i] for i in rest],
         [binding.recorded[2][i] for i in rest]),
        [binding.paths[i] for i in rest],
        f"Rebind it too, step.rebind({held})",
    )  # fmt: skip


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What is to happen to one leaf, and its spec after that. `replaces`: it gets other memory."""

    one: Given
    spec: TensorSpec
    apply: Callable[[], None]
    replaces: bool = False


def _change_of(binding: Binding, one: Given, memory: Sequence[Bytes]) -> Change:
    """Decide, and keep nothing of the value but its spec.

    Args:
        memory: of the bound leaves.

    Raises:
        TreeError: a value that is no tensor, or a leaf that cannot take it.
    """
    target, value = binding.leaves[one.at], loaded(one)
    if is_same(value, target):
        return Change(one, TensorSpec.of(target), lambda: None)
    if lies_in(memory, value):  # writing another leaf may change it first
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


def _check_tied(binding: Binding, values: Mapping[int, Given], replaced: Set[int]) -> None:
    """Raise unless leaves that share memory are given the same values.

    Args:
        values: by index of the leaf.
        replaced: leaves that get memory of their own.

    Raises:
        TreeError: naming two such leaves.
    """
    spans = list(map(storage_bytes, binding.leaves))
    owners: dict[int, list[int]] = {}
    starts = [start for start, _ in joined(spans)]
    for at, (start, end) in enumerate(spans):
        if start < end:
            owners.setdefault(bisect.bisect_right(starts, start), []).append(at)
    for group in owners.values():
        for a, b in itertools.combinations(group, 2):
            if (a in values or b in values) and not _agree(binding, values, replaced, a, b):
                raise TreeError(
                    f"{binding.paths[a]} and {binding.paths[b]} are one memory (tied weights), but "
                    "would get different values. Give both the same tensor"
                )


def _agree(
    binding: Binding, values: Mapping[int, Given], replaced: Set[int], a: int, b: int
) -> bool:
    first, second = binding.leaves[a], binding.leaves[b]
    if not is_same(first, second):
        return not _cross(first, second)
    if a not in values or b not in values:
        return not replaced & {a, b}
    x, y = loaded(values[a]), loaded(values[b])
    alike = x.shape == y.shape and x.dtype is y.dtype
    return is_same(x, y) or (alike and torch.equal(x, y.to(x.device)))


def _cross(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two views of one memory have an element in common."""
    (low, high), (start, end) = sorted(map(_bytes, (a, b)))
    if start >= high or low == high or start == end:
        return False
    if a.dtype is not b.dtype or (start - low) % a.itemsize:
        return True
    marks = torch.zeros((max(high, end) - low) // a.itemsize, dtype=torch.bool, device="cpu")
    at, to = ((x.data_ptr() - low) // a.itemsize for x in (a, b))
    marks.as_strided(a.shape, a.stride(), at).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), to).any())


def _bytes(x: torch.Tensor) -> Bytes:
    """The addresses between which the elements of `x` are."""
    start = x.data_ptr()
    return start, start + extent(x.shape, x.stride()) * x.itemsize
