"""Boxes: which elements of a value are not bare `forward`'s, and where they are in another view.

A box is rows by dim: an element is in it if each of its coordinates is among the rows of that dim.
A dim that is left out counts whole, so {0: {0}} is row 0 and {} is everything.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

Box = Mapping[int, frozenset[int]]
Boxes = tuple[Box, ...]
WHOLE: Boxes = ({},)
_MOST = 8  # boxes of a value; what has more counts as a whole
_MANY = 1 << 14  # rows, or stretches of memory, that are worth telling apart


def joined(boxes: Iterable[Box], shape: Sequence[Any]) -> Boxes:
    """The same elements in few boxes; more of them where they would be many."""
    found: list[Box] = []
    for box in boxes:
        there = {d: _among(rows, shape[d]) for d, rows in sorted(box.items())}
        rest = {d: rows for d, rows in there.items() if not _is_all(rows, shape[d])}
        if not all(rest.values()):
            continue  # no row of some dim
        for i, other in enumerate(found):
            if len(rest) == 1 and rest.keys() == other.keys():  # rows of one dim
                ((d, rows),) = rest.items()
                rest = {d: rows | other[d]}
                rest = {} if _is_all(rest[d], shape[d]) else rest
                del found[i]
                break
        if not any(_within(rest, other) for other in found):
            found = [other for other in found if not _within(other, rest)] + [rest]
    many = len(found) > _MOST or any(len(rows) > _MANY for box in found for rows in box.values())
    return WHOLE if many else tuple(sorted(found, key=str))


def _among(rows: frozenset[int], size: Any) -> frozenset[int]:
    return frozenset(r for r in rows if r < size) if isinstance(size, int) else rows


def _is_all(rows: frozenset[int], size: Any) -> bool:
    return isinstance(size, int) and len(rows) >= size


def is_one(size: Any) -> bool:
    """Whether a dim has one row, at all sizes."""
    return isinstance(size, int) and size == 1


def _within(a: Box, b: Box) -> bool:
    return all(d in a and a[d] <= rows for d, rows in b.items())


def elements(boxes: Boxes, x: torch.Tensor) -> torch.Tensor:
    """Which elements of a tensor are in some box: a bool tensor of its shape."""
    found = torch.zeros(x.shape, dtype=torch.bool, device=x.device)
    for box in boxes:
        at = torch.ones((), dtype=torch.bool, device=x.device)
        for d, rows in box.items():
            here = torch.zeros(x.shape[d], dtype=torch.bool, device=x.device)
            here[[r for r in rows if r < x.shape[d]]] = True
            at = at & here.view(-1, *[1] * (x.dim() - 1 - d))
        found |= at
    return found


def reshaped(boxes: Boxes, groups: Iterable[tuple[range, range]], old: Any, new: Any) -> Boxes:
    """After a row-major reshape.

    Args:
        groups: dims of `old` and of `new` that hold the same elements, as `groups_of` finds them.
    """
    found: list[dict[int, frozenset[int]]] = [{} for _ in boxes]
    for a, b in groups:
        here, there = Layout.dense([old[d] for d in a]), Layout.dense([new[d] for d in b])
        for box, seen in zip(boxes, found):
            part = {d - a.start: box[d] for d in a if d in box}
            to = here.seen_in(part, there) if part else {}
            seen.update({b.start + d: rows for d, rows in (to or {}).items()})
    return joined(found, new)


class Layout:
    """Where the elements of a strided tensor are; sizes in T or R may come first alone."""

    def __init__(self, shape: Sequence[Any], stride: Sequence[int], first: int = 0) -> None:
        self.shape, self.stride, self.first = shape, stride, first
        long = [d for d, s in enumerate(stride) if s and not is_one(shape[d])]
        self.dims = sorted(long, key=lambda d: -stride[d])

    @classmethod
    def dense(cls, shape: Sequence[Any]) -> Layout:
        """Row-major."""
        stride = [1] * len(shape)
        for d in reversed(range(len(shape) - 1)):
            stride[d] = stride[d + 1] * shape[d + 1]
        return cls(shape, stride)

    @classmethod
    def of(cls, x: torch.Tensor) -> Layout | None:
        """A fake's; None if it depends on T or R."""
        numbers = (*x.shape, *x.stride(), x.storage_offset())
        fixed = all(isinstance(n, int) for n in numbers)
        return cls(x.shape, x.stride(), int(x.storage_offset())) if fixed else None

    def seen_in(self, box: Box, other: Layout) -> Box | None:
        """A box of other's that has all elements of one of this; None if there are none there."""
        stretches = self._stretches(box)
        if stretches is None:
            return {}
        parts = [p for stretch in stretches if (p := other._box(*stretch)) is not None]
        if not parts:
            return None
        dims = set.intersection(*(set(p) for p in parts))
        return {d: frozenset().union(*(p[d] for p in parts)) for d in dims}

    def covers(self, box: Box, of: Layout) -> bool:
        """Whether all elements of another's box are this one's: of dense ones alone."""
        if not self._is_dense():
            return False
        last = self.first + self._reach(self.dims)
        stretches = of._stretches(box)
        return stretches is not None and all(self.first <= a and b <= last for a, b in stretches)

    def _is_dense(self) -> bool:
        return all(
            self.stride[d] == self._reach(self.dims[i + 1 :]) + 1 for i, d in enumerate(self.dims)
        )

    def _reach(self, dims: Iterable[int]) -> int:
        """From the first to the last element over some dims."""
        return sum((self.shape[d] - 1) * self.stride[d] for d in dims)

    def _stretches(self, box: Box) -> list[tuple[int, int]] | None:
        """First and last place in memory of each run of elements that a box has; None: many."""
        told = [i for i, d in enumerate(self.dims) if d in box]
        outer = self.dims[: told[-1] + 1] if told else []
        if not all(d in box or isinstance(self.shape[d], int) for d in outer):
            return None
        rows = [sorted(box[d]) if d in box else range(self.shape[d]) for d in outer]
        if math.prod(map(len, rows)) > _MANY:
            return None
        inner = self._reach(self.dims[len(outer) :])
        firsts = (
            self.first + sum(r * self.stride[d] for r, d in zip(at, outer))
            for at in itertools.product(*rows)
        )
        return [(first, first + inner) for first in firsts]

    def _box(self, first: int, last: int) -> Box | None:
        """The rows that a run of memory lies in, from the outermost dim on."""
        found: dict[int, frozenset[int]] = {}
        first, last = first - self.first, last - self.first
        for i, d in enumerate(self.dims):
            step, inner = self.stride[d], self._reach(self.dims[i + 1 :])
            low, high = max(0, -((inner - first) // step)), last // step
            if isinstance(self.shape[d], int):
                high = min(high, self.shape[d] - 1)
            if inner >= step or high - low > _MANY:
                return found
            if low > high:
                return None
            found[d] = frozenset(range(low, high + 1))
            if low < high:
                return found
            first, last = first - low * step, last - low * step
        return found
