"""Where tensors lie in memory: their storage, the bytes that they span, what they share; and of
what kind they are."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from fngraph.torch_facts.names import conj_view, neg_view


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lives in, the same for all its views; fakes have one too."""
    return tensor.untyped_storage()._cdata


def storage_addresses(tensors: Iterable[torch.Tensor]) -> set[int]:
    """Where the storages of tensors begin; 0 stands for those without memory."""
    return {x.untyped_storage().data_ptr() for x in tensors}


Bytes = tuple[int, int]  # the address of the first one, and of the one past the last


def storage_bytes(x: torch.Tensor) -> Bytes:
    """The memory of a tensor's storage, as addresses: two storages may lie over the same bytes, as
    those of `torch.from_numpy` do."""
    storage = x.untyped_storage()
    start = storage.data_ptr()
    return start, start + (storage.nbytes() if start else 0)


def joined(spans: Iterable[Bytes]) -> list[Bytes]:
    """The same bytes in ranges that do not touch, in order; what has none is left out."""
    found: list[Bytes] = []
    for start, end in sorted(spans):
        if found and start < found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif start < end:
            found.append((start, end))
    return found


def overlaps(span: Bytes, ranges: Sequence[Bytes]) -> bool:
    """Whether some byte is in one of `ranges`, which are `joined`."""
    at = bisect.bisect_left(ranges, (span[1], 0)) - 1  # the last that begins before the end
    return at >= 0 and span[0] < span[1] and ranges[at][1] > span[0]


def extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first one of a strided tensor to the one past its last."""
    return 0 if 0 in shape else 1 + sum((n - 1) * s for n, s in zip(shape, stride))


def span(x: torch.Tensor) -> tuple[int, int]:
    """First byte of a tensor in its storage, and the one past its last."""
    first = int(x.storage_offset())
    return first * x.itemsize, (first + extent(x.shape, x.stride())) * x.itemsize


def overlap(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fakes of one storage may have an element in common; yes where it is not known."""
    if not (is_static(a) and is_static(b)):
        return True
    (start, stop), (first, last) = span(a), span(b)
    return max(start, first) < min(stop, last)


def is_static(x: torch.Tensor) -> bool:
    """Whether the place of a fake in its storage is numbers alone."""
    return all(isinstance(n, int) for n in (*x.shape, *x.stride(), x.storage_offset()))


def overlaps_itself(x: torch.Tensor) -> bool:
    """Whether two indices may lead to one element (as they do in an expanded tensor): some stride
    is within the reach of the smaller ones."""
    if 0 in x.shape:
        return False
    reach = 0
    for stride, n in sorted((s, n) for n, s in zip(x.shape, x.stride()) if n != 1):
        if stride <= reach:
            return True
        reach += (n - 1) * stride
    return False


def with_bits(x: torch.Tensor, conj: Any, neg: Any) -> torch.Tensor:
    """A view whose conjugate and negative bits are turned around where told."""
    x = conj_view(x) if conj else x
    return neg_view(x) if neg else x


def kind_of(x: torch.Tensor) -> str:
    """Dtype and shape as text: "float32[3, 8]"."""
    return f"{str(x.dtype).removeprefix('torch.')}{list(x.shape)}"


def other_kind(into: torch.Tensor, made: torch.Tensor) -> str:
    """What is wrong where a result is not of the kind that torch's rule said at the trace; "" where
    it is. A copy would repeat the elements of a smaller one, and convert them."""
    if (into.shape, into.dtype) == (made.shape, made.dtype):
        return ""
    return (
        f"is {kind_of(made)}, and torch's rule for it says {kind_of(into)}: some op's rule is "
        f"wrong in torch {torch.__version__}. Write that op another way"
    )
