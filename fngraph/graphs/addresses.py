"""Addresses: what a graph was captured with must still be there at every call.

Have any of these tensors moved? One gather over the words in which torch keeps where they are.

`data_ptr()` of each of 178 leaves takes 12 us, as long as all the rest of a step; reading the same
words of all of them at once takes 1.4 us (H200's host). Where torch keeps them is found by looking
for known values in a tensor of our own; if they are not found, `data_ptr()` it is.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fngraph.errors import AddressError
from fngraph.torch_facts.names import neg_view

Places = tuple[list[int], list[torch.Size], list[tuple[Any, ...]]]


def places(tensors: Sequence[torch.Tensor]) -> Places:
    """Where each tensor's elements are and how they are read: addresses, shapes, and the rest.

    Shapes too, since `resize_`, `t_()` and `.data = x.view(...)` change them in place; and dtypes,
    since `.data = x.view(torch.int32)` does.
    """
    return (
        list(map(torch.Tensor.data_ptr, tensors)),
        list(map(torch.Tensor.size, tensors)),
        [(x.stride(), x.dtype, x.is_conj(), x.is_neg()) for x in tensors],
    )


def part(recorded: Places, span: slice) -> Places:
    """The places of some of the tensors."""
    return recorded[0][span], recorded[1][span], recorded[2][span]


WRITE = "Write into it instead, old.copy_(new) or step.rebind(...), or bind and capture again"


def check_places(
    tensors: Sequence[torch.Tensor], recorded: Places, paths: Sequence[str], fix: str = WRITE
) -> None:
    """Raise unless every tensor is where it was.

    Raises:
        AddressError: naming the first leaf that moved, and `fix`.
    """
    now = places(tensors)
    if now == recorded:
        return
    moved = [path for path, a, b in zip(paths, zip(*now), zip(*recorded)) if a != b]
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    raise AddressError(
        f"{moved[0]}{more} moved since the graphs were captured (a new tensor, .data =, "
        f".to(), resize_). Graphs use the old memory. {fix}"
    )


_WORDS = 40  # of a TensorImpl, as far as is looked


class Watch:
    """Where tensors were when it was made. Holds them, since it reads their memory.

    Attributes:
        moved: whether a word has changed. A false alarm is possible (memory that was only resized
            and put back); a move that goes unseen is not.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)
        self._storages = [x.untyped_storage() for x in tensors]  # or their words could be freed
        self.reset()

    def reset(self) -> None:
        """Take the present places as the right ones."""
        now = _reader(self.tensors)
        seen = now()
        self.moved: Callable[[], bool] = lambda: now() != seen


def _reader(tensors: Sequence[torch.Tensor]) -> Callable[[], object]:
    """A function that gives the words now."""
    addresses = sorted({a for x in tensors for a in _addresses(x)})
    if not addresses or any(x.dim() > 5 for x in tensors):
        return lambda: places(tensors)
    low = min(addresses)
    words = np.ctypeslib.as_array(
        (ctypes.c_int64 * ((max(addresses) - low + 8) // 8)).from_address(low)
    )
    where = np.array([(a - low) // 8 for a in addresses])
    gather = functools.partial(words.__getitem__, where)  # `take` is half as fast
    return lambda: gather().tobytes()


def _addresses(x: torch.Tensor) -> list[int]:
    """Of the words that say where the elements of `x` are."""
    found = layout()
    if found is None:
        return []
    impl, storage = x._cdata, x.untyped_storage()._cdata
    held = id(x) + 8 * found.impl
    offsets = [found.storage, found.offset, *found.kinds]
    offsets += [*found.sizes[: x.dim()], *found.strides[: x.dim()]]
    return [held, *(impl + 8 * i for i in offsets), storage + 8 * found.data]


@dataclasses.dataclass(frozen=True, slots=True)
class _Layout:
    """Indices of words.

    Attributes:
        impl: of a Python tensor, where its TensorImpl is.
        storage, offset, sizes, strides: of a TensorImpl.
        kinds: of a TensorImpl, the dtype, and what says that it is conjugated or negative.
        data: of a StorageImpl, where its memory is.
    """

    impl: int
    storage: int
    offset: int
    sizes: range
    strides: range
    kinds: tuple[int, ...]
    data: int


@functools.cache
def layout() -> _Layout | None:
    """Found in two tensors with telling numbers; None where this torch keeps them otherwise."""
    base = torch.empty(1 << 21, dtype=torch.uint8)
    found = set()
    for size, stride, offset in (
        ((1013, 1019), (1031, 3), 1039),
        ((1021, 1033), (1049, 5), 1051),
    ):
        probe = base.as_strided(size, stride, offset)
        words = _words(probe._cdata, _WORDS)
        held = _words(probe.untyped_storage()._cdata, 12)
        spots = [
            [i for i, word in enumerate(words) if word == value]
            for value in (probe.untyped_storage()._cdata, offset, size[0], stride[0])
        ]
        data = [i for i, word in enumerate(held) if word == base.data_ptr()]
        impl = [i for i, word in enumerate(_words(id(probe), 6)) if word == probe._cdata]
        if any(len(spot) != 1 for spot in (*spots, impl)) or not data:
            return None
        (storage,), (at,), (first,), (step,) = spots
        if words[first + 1] != size[1] or words[step + 1] != stride[1]:
            return None
        found.add((impl[0], storage, at, first, step, data[0]))
    if len(found) != 1:
        return None
    impl_at, storage, at, first, step, data_at = found.pop()
    z = torch.empty(8, dtype=torch.complex64)
    pairs = ((base.view(torch.int32), base.view(torch.float32)), (z, z.conj()), (z, neg_view(z)))
    kinds = [_first_other(a, b, range(at + 1, at + 6)) for a, b in pairs]
    if None in kinds:
        return None
    return _Layout(
        impl_at, storage, at, range(first, first + 5), range(step, step + 5),
        tuple(sorted({k for k in kinds if k is not None})), data_at,
    )  # fmt: skip


def _first_other(a: torch.Tensor, b: torch.Tensor, among: range) -> int | None:
    """The first word in which two TensorImpls differ."""
    one, other = _words(a._cdata, _WORDS), _words(b._cdata, _WORDS)
    return next((i for i in among if one[i] != other[i]), None)


def _words(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))
