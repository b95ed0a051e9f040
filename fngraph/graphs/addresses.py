"""Addresses: what a graph was captured with must still be there at every call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fngraph.errors import AddressError

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
