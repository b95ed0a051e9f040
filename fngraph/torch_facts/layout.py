"""In which words torch keeps where a tensor's elements are, in C++.

Found by looking for known values in tensors of our own, so no version is assumed; where they are
not found, nothing is said.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from operator import and_, or_

import torch

from fngraph.torch_facts.names import neg_view

_WORDS = 40  # of a TensorImpl, as far as is looked; memory behind it may hold anything
_STORAGE_WORDS = 12
_HEAD_WORDS = 6  # of a Python tensor
_KIND_WORDS = 5  # behind the offset, among which the dtype is, and what says how it is read
_DIMS = 5  # sizes and strides of more are kept elsewhere
_PROBES = 16  # tensors that are looked at: what is there by chance is not in all of them


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Indices of words.

    Attributes:
        impl: of a Python tensor, where its TensorImpl is.
        storage, offset, dims, sizes, strides: of a TensorImpl; `dims` is how many there are.
        kinds: of a TensorImpl, the dtype, and what says that it is conjugated or negative.
        data: of a StorageImpl, where its memory is.
    """

    impl: int
    storage: int
    offset: int
    dims: int
    sizes: range
    strides: range
    kinds: tuple[int, ...]
    data: int


def word_addresses(x: torch.Tensor) -> list[int] | None:
    """Addresses of the words that say where the elements of `x` are; None where it is not known."""
    found = _find()
    if found is None or x.dim() > _DIMS:
        return None
    impl, storage = x._cdata, x.untyped_storage()._cdata
    offsets = [found.storage, found.offset, found.dims, *found.kinds]
    offsets += [*found.sizes[: x.dim()], *found.strides[: x.dim()]]
    return [id(x) + 8 * found.impl, *(impl + 8 * i for i in offsets), storage + 8 * found.data]


@functools.cache
def _find() -> _Layout | None:
    """Found in tensors with telling numbers; None where this torch keeps them otherwise.

    A word is where the number is in all of them, or where all of one kind differ from all of
    another: a number that lies there by chance, in bytes that nobody wrote or that were another
    tensor's, lies there in some alone.
    """
    base = torch.empty(1 << 21, dtype=torch.uint8)
    z = torch.empty(8, dtype=torch.complex64)
    storage = base.untyped_storage()._cdata
    probes = []  # with what their words say; none lies where another one was, since all are kept
    for i in range(0, 2 * _PROBES, 2):
        size, stride, offset = (1013 + i, 811 + i), (1151 + i, 3 + i), 1301 + i
        x = base.as_strided(size, stride, offset)
        probes.append((x, (storage, offset, *size, *stride)))
    where = [_places([(x._cdata, says[k]) for x, says in probes], _WORDS) for k in range(6)]
    nested = [
        base.as_strided([2] * dims, [1] * dims) for dims in (*range(1, _DIMS + 1), 3, 1, 5, 2)
    ]
    where.append(_places([(x._cdata, x.dim()) for x in nested], _WORDS))
    impl = _places([(id(x), x._cdata) for x, _ in probes], _HEAD_WORDS)
    stored = [torch.empty(1) for _ in probes]
    data = _places([(x.untyped_storage()._cdata, x.data_ptr()) for x in stored], _STORAGE_WORDS)
    if any(len(places) != 1 for places in (*where, impl)) or not data:
        return None
    storage_at, offset_at, size_at, next_size, stride_at, next_stride, dims_at = map(min, where)
    if (next_size, next_stride) != (size_at + 1, stride_at + 1):
        return None
    among = range(offset_at + 1, offset_at + 1 + _KIND_WORDS)
    found = [
        _telling(one, other, among)
        for one, other in (
            (lambda: base.view(torch.int32), lambda: base.view(torch.float32)),
            (z.detach, z.conj),
            (z.detach, lambda: neg_view(z)),
        )
    ]
    if not all(found):
        return None
    kinds = set.union(*found)
    sizes, strides = range(size_at, size_at + _DIMS), range(stride_at, stride_at + _DIMS)
    told = tuple(sorted(kinds))
    return _Layout(min(impl), storage_at, offset_at, dims_at, sizes, strides, told, min(data))


def _places(wanted: Sequence[tuple[int, int]], count: int) -> set[int]:
    """Which of the `count` words at each address are the value that is wanted there."""
    return set.intersection(
        *[{i for i, word in enumerate(_words(at, count)) if word == x} for at, x in wanted]
    )


def _telling(
    one: Callable[[], torch.Tensor], other: Callable[[], torch.Tensor], among: range
) -> set[int]:
    """Which words of a TensorImpl tell one kind of tensor from another: they have a bit that is set
    in all of the one and in none of the other. The two are made by turns, one first and then the
    other, so that neither has the same neighbours in memory each time."""
    made: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
    for i in range(_PROBES):
        for kind in (i % 2, 1 - i % 2):
            made[kind].append((one, other)[kind]())
    a, b = [[_words(x._cdata, _WORDS) for x in kind] for kind in made]
    found = set()
    for i in among:
        (all_a, any_a), (all_b, any_b) = [
            [functools.reduce(by, (words[i] for words in kind)) for by in (and_, or_)]
            for kind in (a, b)
        ]
        if all_a & ~any_b or all_b & ~any_a:
            found.add(i)
    return found


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))
