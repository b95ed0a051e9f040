"""Pages: a view of the whole picture at one size, and crops of it at another; a path for each.

Every view makes the same number of output tokens, and so does every crop. Shape letters: R views or
crops, V pixels along a view, C along a crop.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

import fngraph as fg


class Page(NamedTuple):
    """One picture.

    Attributes:
        view: (3, V, V) float32, the whole of it.
        crops: (columns * rows, 3, C, C) float32, row by row; (0, 3, C, C) where it has none.
        grid: columns and rows of crops.
    """

    view: Tensor
    crops: Tensor
    grid: tuple[int, int] = (0, 0)


@fg.struct
class Views:
    """One step's views."""

    pixels: Tensor = fg.buffer("R 3 V V", "float32")
    spec: fg.BatchSpec = fg.host()


@fg.struct
class Crops:
    """One step's crops, those of each page one after another."""

    pixels: Tensor = fg.buffer("R 3 C C", "float32")
    spec: fg.BatchSpec = fg.host()


class Sizes(NamedTuple):
    """What views and crops of a model are like.

    Attributes:
        view, crop: pixels along a side.
        view_tokens, crop_tokens: output tokens of one.
    """

    view: int
    crop: int
    view_tokens: int
    crop_tokens: int


def measure(sizes: Sizes, page: Page) -> fg.Measured:
    """Output tokens of the paths "global" and "local"; a crop is a sequence of its own.

    Raises:
        SpecError: pixels that are not of these sizes, or crops that are not those of the grid.
    """
    columns, rows = page.grid
    wanted = {
        "view": (3, sizes.view, sizes.view),
        "crops": (columns * rows, 3, sizes.crop, sizes.crop),
    }
    for name, shape in wanted.items():
        if (got := tuple(getattr(page, name).shape)) != shape:
            raise fg.errors.SpecError(
                f"a page of {columns} x {rows} crops has {name} of shape {got}. Pass {shape}: "
                "pixels, resized and cut by the model's processor"
            )
    tokens = {"global": sizes.view_tokens, "local": columns * rows * sizes.crop_tokens}
    return fg.Measured("image", tokens)


def collate(sizes: Sizes, path: str, pages: Sequence[Page]) -> Any:
    """The batch of a path, on the CPU; its keys are uniform, so many tokens a view or crop."""
    if path == "global":
        pixels, tokens = torch.stack([page.view for page in pages]), sizes.view_tokens
    else:
        pixels, tokens = torch.cat([page.crops for page in pages]), sizes.crop_tokens
    R = len(pixels)
    spec = fg.BatchSpec(R * tokens, R, query_len=tokens)
    return Views(pixels, spec) if path == "global" else Crops(pixels, spec)


def encoder(
    sizes: Sizes, see_views: Any, see_crops: Any, assemble: Any, max_tokens: int
) -> fg.EncoderModel:
    """An encoder of pages, with the paths "global" and "local".

    Args:
        see_views, see_crops: the `forward` of each path.
        assemble: (rows by path, page) -> a page's rows.
        max_tokens: output tokens of the largest graph of each path.
    """
    views, crops = sizes.view_tokens, sizes.crop_tokens
    return fg.EncoderModel(
        paths={
            "global": fg.EncoderPath(see_views, views, unit=views),
            "local": fg.EncoderPath(see_crops, crops, allow_zero=True, unit=crops),
        },
        measure=functools.partial(measure, sizes),
        collate=functools.partial(collate, sizes),
        token_range=(min(views, crops), max_tokens),
        postprocess=assemble,
        dims={"V": sizes.view, "C": sizes.crop},
    )
