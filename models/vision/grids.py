"""Pictures as grids of patches: orders, positions and offsets, worked out on the host.

What depends on how tall and wide a picture is cannot be in a graph; it is staged, a row for each
patch. Letters: N patches of one picture, `merge` x `merge` of which become an output token and lie
side by side; n taps of a learned table of `side` x `side` positions.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg

MERGE = 2  # patches of a token, along each side, where nothing else is said


class Picture(NamedTuple):
    """An image or a video, cut into patches.

    Attributes:
        patches: (N, C) float32, as the model's processor lays them.
        grid: frames, rows and columns, in patches; N is their product.
        modality: "image" or "video".
    """

    patches: Tensor
    grid: tuple[int, int, int]
    modality: str = "image"


def measured(picture: Picture, merge: int, width: int) -> fg.Measured:
    """What a picture brings to the one path of an encoder: a sequence for each frame.

    Args:
        merge: patches of an output token, along each side.
        width: C, numbers of a patch.

    Raises:
        SpecError: patches that are not those of the grid.
    """
    t, h, w = picture.grid
    if min(picture.grid) < 1 or h % merge or w % merge:
        raise fg.errors.SpecError(
            f"a picture of grid {picture.grid}: {merge} x {merge} patches become a token, so that "
            f"rows and columns are multiples of {merge}, and at least one frame. Resize it first"
        )
    if tuple(picture.patches.shape) != (t * h * w, width):
        raise fg.errors.SpecError(
            f"a picture of grid {picture.grid} has patches of shape "
            f"{tuple(picture.patches.shape)}. Pass ({t * h * w}, {width}): a row for each patch"
        )
    tokens, sequences = {"default": t * h * w // merge**2}, {"default": t}
    return fg.Measured(picture.modality, tokens, sequences, t if picture.modality == "video" else 0)


@functools.lru_cache(maxsize=512)
def positions(h: int, w: int, merge: int = 1) -> Tensor:
    """(h*w, 2) int64: the row and the column of each patch, merged ones side by side."""
    at = torch.cartesian_prod(torch.arange(h), torch.arange(w))
    return at.view(h // merge, merge, w // merge, merge, 2).transpose(1, 2).reshape(-1, 2)


@functools.lru_cache(maxsize=512)
def merged_order(h: int, w: int, merge: int) -> Tensor:
    """(h*w,) int64: the numbers, row by row, of patches whose merged ones are side by side."""
    row, column = positions(h, w, merge).unbind(1)
    return row * w + column


@functools.lru_cache(maxsize=512)
def taps(
    h: int, w: int, side: int, *, merge: int = 1, cubic: bool = False, corners: bool = False
) -> tuple[Tensor, Tensor]:
    """Where each patch reads a learned table of (side*side, E), resized to h x w, and how much.

    Args:
        cubic: by the cubic of 4 x 4 neighbours, a = -0.75, in place of the linear of 2 x 2.
        corners: whether corners lie on corners, else centres of patches in proportion.

    Returns:
        (h*w, n) int64 and float32, n = 4 or 16; weights are as `F.interpolate` has them.
    """
    (rows, up), (columns, along) = (_taps_of_axis(size, side, cubic, corners) for size in (h, w))
    return _each_with_each(rows * side, columns, torch.add, merge), _each_with_each(
        up, along, torch.mul, merge
    )


def _each_with_each(rows: Tensor, columns: Tensor, op: Any, merge: int) -> Tensor:
    """(h*w, n*n) of (h, n) and (w, n): `op` of a row's and a column's, merged patches side by side.

    What lies within a token is spread out first, so that the one large operation has long rows.
    """
    n, inner = rows.shape[1], merge**2 * rows.shape[1] ** 2
    up = rows.view(-1, 1, merge, 1, n, 1).expand(-1, 1, merge, merge, n, n)
    along = columns.view(1, -1, 1, merge, 1, n).expand(1, -1, merge, merge, n, n)
    made: Tensor = op(up.reshape(-1, 1, inner), along.reshape(1, -1, inner))
    return made.view(-1, n * n)


def _taps_of_axis(size: int, side: int, cubic: bool, corners: bool) -> tuple[Tensor, Tensor]:
    """Of `size` places along an axis of `side`: (size, 2 or 4), numbers and weights."""
    place = torch.arange(size, dtype=torch.float32)
    if corners:
        place = place * (side - 1) / max(size - 1, 1)
    else:
        place = (place + 0.5) * side / size - 0.5
    below = place.floor()
    near = torch.arange(-1, 3) if cubic else torch.arange(2)
    distance = (place[:, None] - below[:, None] - near).abs()
    if cubic:
        a = -0.75
        inner = ((a + 2) * distance - (a + 3)) * distance * distance + 1
        outer = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
        weight = torch.where(distance <= 1, inner, outer)
    else:
        weight = (1 - distance).clamp(min=0)
    return (below.long()[:, None] + near).clamp(0, side - 1), weight


def by_token(x: Tensor) -> Tensor:
    """(T, 4, ...) of (4*T, ...)."""
    return x.unflatten(0, (-1, MERGE**2))


def offsets(lengths: Iterable[int]) -> Tensor:
    """(S + 1,) int32: where sequences of these lengths begin, and the end of the last."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


def frames(pictures: Sequence[Picture]) -> list[int]:
    """Patches of each frame of each picture."""
    return [h * w for t, h, w in (picture.grid for picture in pictures) for _ in range(t)]


def over_frames(pictures: Sequence[Picture], of: list[Tensor]) -> Tensor:
    """What is known of one frame of each picture, for all of its frames, end to end."""
    repeated = [
        x.repeat(picture.grid[0], *[1] * (x.ndim - 1)) if picture.grid[0] > 1 else x
        for picture, x in zip(pictures, of, strict=True)
    ]
    return joined(repeated)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Parts end to end; of one picture its own memory, since a step stages its leaves by copy."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
