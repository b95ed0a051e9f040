"""Addresses: what a graph was captured with must still be there at every call.

A `Watch` reads the words in which torch keeps where tensors are, of all of them in one call: 1.5 us
for a Llama-1B's 178 leaves, on a CPU that takes 110 for their `places`. Where the words are not
known, these it is.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from fngraph.errors import AddressError
from fngraph.torch_facts.layout import word_addresses

try:  # words.c, where the package's build found a C compiler
    from fngraph.graphs import _words
except ImportError:
    _words = None  # type: ignore[assignment]  # mypy expects a module

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
    pairs = zip(paths, zip(*now), zip(*recorded))
    moved, kinds = zip(*[(path, (_kind(a), _kind(b))) for path, a, b in pairs if a != b])
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    is_now, was = kinds[0]
    if is_now != was:
        raise AddressError(
            f"{moved[0]} is {is_now}, and was {was} when the graphs were captured{more}. Graphs "
            f"use the old memory. {fix}"
        )
    raise AddressError(
        f"{moved[0]}{more} moved since the graphs were captured (a new tensor, .data =, "
        f".to(), resize_). Graphs use the old memory. {fix}"
    )


def _kind(place: tuple[Any, ...]) -> str:
    _, shape, (_, dtype, *_) = place
    return f"{str(dtype).removeprefix('torch.')}{list(shape)}"


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
        self.moved: Callable[[], bool] = _moved(self.tensors)


def _moved(tensors: Sequence[torch.Tensor]) -> Callable[[], bool]:
    """A function that says whether a word is another than now."""
    found = [word_addresses(x) for x in tensors]
    if not found or None in found:
        there = places(tensors)
        return lambda: places(tensors) != there
    return watched(sorted({address for words in found for address in words or ()}))


def watched_in_python(addresses: Sequence[int]) -> Callable[[], bool]:
    """Of 8-byte words at some addresses, in order, a function that says whether one is another than
    now: in one gather, over all memory from the first to the last."""
    low, high = addresses[0], addresses[-1]
    words = np.ctypeslib.as_array((ctypes.c_int64 * ((high - low + 8) // 8)).from_address(low))
    where = np.array([(a - low) // 8 for a in addresses])
    gather = functools.partial(words.__getitem__, where)  # `take` is half as fast
    seen = gather().tobytes()
    return lambda: gather().tobytes() != seen


watched = _words.watched if _words is not None else watched_in_python
