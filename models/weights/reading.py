"""What a process keeps of the tensors of a folder, and no more, read into memory of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fngraph.models.weights import fp8_folders
from fngraph.models.weights.files import Stored
from fngraph.models.weights.fp8 import Fp8Weight, misfits
from fngraph.models.weights.sharding import Copy, Share
from fngraph.models.weights.splits import Block

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
}
"""As safetensors calls them."""


def read_part(
    share: Share, name: str, x: Tensor, stored: Sequence[Stored],
    device: torch.device | str, dtype: torch.dtype | None,
) -> Any:  # fmt: skip
    """What stands for the part of a weight, of a tensor or of several that are stacked.

    Args:
        x: of the whole weight's shape.
        dtype: None: that in which it is stored.
    """
    copy = stacking(stored) if x.ndim > len(stored[0].shape) else stored[0].copy_part
    dtype = dtype or DTYPES[stored[0].kind]
    made = share.part(name, x.shape, copy, device=device, dtype=dtype)
    return share.standing(name, made, x.shape)


def read_fp8_part(
    share: Share, name: str, place: fp8_folders.Place, files: Mapping[str, Stored],
    device: torch.device | str,
) -> Any:  # fmt: skip
    """What stands for the part of a weight that is stored in fp8."""
    values = files[place.values]
    kind: Any = {"device": device, "dtype": DTYPES[values.kind]}
    part = share.part(name, place.shape, values.copy_part, **kind)
    scale, by = fp8_folders.read_scales(place, lambda n: files[n].whole(), device)
    made = Fp8Weight(part, share.scales(name, place.shape, scale), by)
    return share.standing(name, made, place.shape)


def stacking(stored: Sequence[Stored]) -> Copy:
    """Of tensors of one shape, as of one with a dim more in front."""

    def copy(block: Block, to: Tensor) -> None:
        first, *rest = block
        for one, its in zip(stored[first], to, strict=True):
            one.copy_part(tuple(rest), its)

    return copy


def too_small(share: Share, places: Mapping[str, fp8_folders.Place]) -> list[str]:
    """A line for each weight in fp8 whose part tensor cores cannot take."""
    return [
        line
        for name, place in places.items()
        for line in misfits(
            f"this process's part of {place.values}", share.shape(name, place.shape)
        )
    ]


def equal_parts(
    share: Share, ours: Mapping[str, str], files: Mapping[str, Stored]
) -> Callable[[str, str], bool]:
    """Whether of two tensors of one shape what this process has is the same.

    Args:
        ours: by the files' name, our name of those that are read.
    """

    def equal(name: str, of: str) -> bool:
        if files[name].shape != files[of].shape:
            return False
        kind: Any = {"device": "cpu", "dtype": DTYPES[files[of].kind]}
        one, other = (
            share.part(ours[of], files[of].shape, files[n].copy_part, **kind) for n in (name, of)
        )
        return torch.equal(one, other)

    return equal
