"""Tied weights: held leaves that are one memory, and so can only be given one value."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING

import torch

from fngraph.errors import TreeError
from fngraph.step.given import Given, is_same, loaded

if TYPE_CHECKING:
    from fngraph.step.binding import Binding


def check_tied(binding: Binding, values: Mapping[int, Given], replaced: Set[int]) -> None:
    """Raise unless leaves that share memory are given the same values.

    Args:
        values: by index of the leaf.
        replaced: leaves that get memory of their own.

    Raises:
        TreeError: naming two such leaves.
    """
    owners: dict[int, list[int]] = {}
    for at, leaf in enumerate(binding.leaves):
        owners.setdefault(leaf.untyped_storage().data_ptr(), []).append(at)
    owners.pop(0, None)
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
    """Whether two views of one storage have an element in common."""
    (low, high), (start, end) = sorted(map(_reach, (a, b)))
    if start >= high or low == high or start == end:
        return False
    if a.dtype is not b.dtype:
        return True
    marks = torch.zeros(a.untyped_storage().nbytes() // a.itemsize, dtype=torch.bool, device="cpu")
    marks.as_strided(a.shape, a.stride(), a.storage_offset()).fill_(True)
    return bool(marks.as_strided(b.shape, b.stride(), b.storage_offset()).any())


def _reach(x: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one past its last."""
    low = int(x.storage_offset())
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride())) if x.numel() else 0
    return low * x.itemsize, (low + int(span)) * x.itemsize
