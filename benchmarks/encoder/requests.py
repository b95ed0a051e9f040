"""Requests of pictures as values: sizes are drawn, patches are cut out of one memory.

Sizes are round ones of our own, as a chat's are (half of the images above half a megapixel), not
measured on anybody's users. Letters: N patches, C numbers of a patch.
"""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

from torch import Tensor

from fngraph.models.vision.grids import Picture

Grid = tuple[int, int, int]
PIXELS, SPREAD, ASPECT = 0.5e6, 0.9, 0.35  # median, and deviations of the logarithms
ALONE = 0.7  # of requests bring one image
MOST_IMAGES = 8


@dataclasses.dataclass(frozen=True)
class Request:
    """Pictures that come together.

    Attributes:
        grids: frames, rows and columns of patches.
        memory: (most patches, C), whose first rows any picture is.
    """

    grids: tuple[Grid, ...]
    memory: Tensor
    modality: str = "image"

    @property
    def patches(self) -> int:
        """Of all pictures."""
        return sum(map(math.prod, self.grids))

    def items(self) -> list[Any]:
        """The pictures."""
        return [Picture(self.memory[: math.prod(grid)], grid, self.modality) for grid in self.grids]


def chat(tower: Any, many: int, seed: int) -> list[Request]:
    """Mostly one image, sometimes several."""
    rng = random.Random(seed)
    requests = []
    for _ in range(many):
        images = 1 if rng.random() < ALONE else rng.randint(2, MOST_IMAGES)
        requests.append(Request(tuple(_image(tower, rng) for _ in range(images)), tower.memory))
    return requests


def _image(tower: Any, rng: random.Random) -> Grid:
    pixels = tower.pixels * math.exp(SPREAD * rng.gauss(0, 1))
    wide = math.exp(ASPECT * rng.gauss(0, 1))
    side = tower.side  # pixels of a token
    rows, columns = (max(1, round(math.sqrt(pixels * x) / side)) for x in (1 / wide, wide))
    shrink = min(1.0, math.sqrt(tower.budgets[-1] / (rows * columns)))
    return 1, 2 * max(1, int(rows * shrink)), 2 * max(1, int(columns * shrink))


def videos(tower: Any, many: int, seed: int) -> list[Request]:
    """One video: 4 to 16 frames of a quarter of the median image."""
    rng = random.Random(seed)
    requests = []
    for _ in range(many):
        side = max(1, round(math.sqrt(tower.pixels / 4) / tower.side))
        frames = min(rng.randint(4, 16), max(1, tower.budgets[-1] // side**2))
        requests.append(Request(((frames, 2 * side, 2 * side),), tower.memory, "video"))
    return requests


def squares(tower: Any, many: int, seed: int) -> list[Request]:
    """20 images of 336 x 336: 11 tokens along a side of 32 pixels; of a small tower, 3."""
    side = 2 * (336 // tower.side if tower.pixels == PIXELS else 3)
    return [Request(((1, side, side),) * 20, tower.memory)] * many
