"""Pictures in a prompt: which tokens are whose, and where each of them is.

A picture is a run of `image`, one token in the vocabulary, as long as it has output tokens; a video
one run of `video` a frame, with text (its timestamps) between them or none. Worked out on the host.
Shape letters: S tokens of the prompt, N rows of a token.

Source: Qwen3-VL, 2025, as transformers has it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

import fngraph as fg
from fngraph.models.vision.grids import Picture


class Marks(NamedTuple):
    """The tokens that stand for pictures."""

    image: int
    video: int


class Frame(NamedTuple):
    """An image, or a frame of a video.

    Attributes:
        picture: its number among the prompt's.
        token: that stands for it.
        rows, columns: of output tokens.
    """

    picture: int
    token: int
    rows: int
    columns: int


def positions(tokens: Sequence[int], pictures: Sequence[Picture], marks: Marks) -> Tensor:
    """(S, 3) int64: time, row and column of each token of a prompt; the next one is at max + 1.

    Text counts up on all three. A frame is at one time, its tokens at their rows and columns from
    there on, and what follows is beyond its longer side.

    Args:
        pictures: in the order in which they come.

    Raises:
        SpecError: runs of tokens that are not those of the pictures.
    """
    coming, parts, at, place = frames(pictures, marks), [torch.empty(0, 3).long()], 0, 0
    while place < len(tokens):
        if tokens[place] not in marks:
            parts.append(torch.full((1, 3), at))
            at, place = at + 1, place + 1
            continue
        frame = next(coming, None)
        if frame is None:
            raise fg.errors.SpecError(
                f"tokens[{place}] is {tokens[place]}, a picture's, after all tokens of the "
                f"{len(pictures)} that were passed. Pass the picture, or take the token out"
            )
        stop = place + frame.rows * frame.columns
        if list(tokens[place:stop]) != [frame.token] * (stop - place):
            raise fg.errors.SpecError(
                f"tokens[{place}:{stop}] have to be {frame.token}, {_told(frame, pictures)}, and "
                "are not. Write the token once for each output token, and pass pictures in order"
            )
        grid = torch.cartesian_prod(torch.arange(frame.rows), torch.arange(frame.columns))
        parts.append(pad(grid, (1, 0)) + at)
        at, place = at + max(frame.rows, frame.columns), stop
    if (left := next(coming, None)) is not None:
        raise fg.errors.SpecError(
            f"the prompt ends before {_told(left, pictures)}. Write {left.token} "
            f"{left.rows * left.columns} times where it is to be seen"
        )
    return torch.cat(parts)


def frames(pictures: Sequence[Picture], marks: Marks, merge: int = 2) -> Iterator[Frame]:
    """The runs of tokens that these pictures are in a prompt, in order.

    Args:
        merge: patches of an output token, along each side.

    Raises:
        SpecError: an image of several frames.
    """
    for number, (_, (t, h, w), modality) in enumerate(pictures):
        if modality == "image" and t > 1:
            raise fg.errors.SpecError(
                f"pictures[{number}] is an image of {t} frames, grid {(t, h, w)}. Pass "
                'Picture(..., modality="video")'
            )
        token = marks.video if modality == "video" else marks.image
        for _ in range(t):
            yield Frame(number, token, h // merge, w // merge)


def _told(frame: Frame, pictures: Sequence[Picture]) -> str:
    kind = "a frame of a video" if pictures[frame.picture].modality == "video" else "an image"
    return f"pictures[{frame.picture}], {kind} of grid {pictures[frame.picture].grid}"
