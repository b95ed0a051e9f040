"""Addresses: what a graph was captured with must still be there at every call."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fngraph.errors import AddressError

_data_ptr = torch.Tensor.data_ptr


def addresses(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Where each tensor's data is."""
    return list(map(_data_ptr, tensors))


def check_addresses(
    tensors: Sequence[torch.Tensor], recorded: Sequence[int], paths: Sequence[str]
) -> None:
    """Raise unless every tensor is where it was.

    Raises:
        AddressError: naming the first leaf that moved.
    """
    now = addresses(tensors)
    if now == recorded:
        return
    moved = [path for path, a, b in zip(paths, now, recorded) if a != b]
    more = f" and {len(moved) - 1} more" if len(moved) > 1 else ""
    raise AddressError(
        f"{moved[0]}{more} moved since the graphs were captured (a new tensor, .data =, "
        ".to(), resize_). Graphs read the old memory. Write into it instead: "
        "old.copy_(new), or bind and capture again"
    )
