"""Vision towers of transformers over tiles of one size: InternVL and Llama 4.

A picture is cut into tiles, each of which makes the same number of output tokens, so that keys are
uniform. Shape letters: T output tokens, R tiles, S pixels along a tile, E width of the output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import functional_call

import fngraph as fg
from fngraph.errors import SpecError


@fg.struct
class Tiles:
    """One step's tiles."""

    pixels: Tensor = fg.buffer("R 3 S S", "float32")
    spec: fg.BatchSpec = fg.host()


class Tiled(NamedTuple):
    """What a tower over tiles is like.

    Attributes:
        size: pixels along a tile, S.
        tokens: output tokens of one.
        run: the owner and pixels (R, 3, S, S) -> (R, tokens, E).
    """

    size: int
    tokens: int
    run: Callable[[Any, Tensor], Tensor]


def tiled(owner: Any) -> Tiled | None:
    """What is known of an owner's tower; None: it is no model that is known here."""
    return _internvl(owner) or _llama4(owner)


def _internvl(owner: Any) -> Tiled | None:
    """InternVL: features of a layer, four places of which are put into one, and the projector."""
    config: Any = getattr(owner, "config", None)
    if getattr(config, "model_type", "") != "internvl" or not hasattr(owner, "vision_tower"):
        return None
    (size, _), (patch, _) = config.vision_config.image_size, config.vision_config.patch_size
    return Tiled(
        size, int(size // patch * config.downsample_ratio) ** 2,
        lambda owner, pixels: owner.get_image_features(pixels, return_dict=True).pooler_output,
    )  # fmt: skip


def _llama4(owner: Any) -> Tiled | None:
    """Llama 4: its vision model, which puts places together itself, and the projector."""
    if not hasattr(owner, "vision_model") or not hasattr(owner, "multi_modal_projector"):
        return None
    config = owner.vision_model.config
    if config.model_type != "llama4_vision_model":
        return None
    side = int(config.image_size // config.patch_size * config.pixel_shuffle_ratio)
    return Tiled(
        config.image_size, side**2,
        lambda owner, pixels: owner.multi_modal_projector(
            owner.vision_model(pixels, return_dict=True).last_hidden_state
        ),
    )  # fmt: skip


class _Running(torch.nn.Module):
    """A model of which a part is called, with weights by name."""

    def __init__(self, owner: Any, run: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.owner, self.run = owner, run

    def forward(self, pixels: Tensor) -> Tensor:
        return self.run(self.owner, pixels)


def over_tiles(owner: Any, tower: Tiled, max_tokens: int) -> fg.EncoderModel:
    """The encoder, whose items are tiles (k, 3, S, S) and whose weights go by the owner's names."""
    size, tokens, run = tower
    running = _Running(owner, run)

    def forward(params: dict[str, Tensor], batch: Tiles) -> Tensor:
        held = {f"owner.{name}": x for name, x in params.items()}
        dtype = next(iter(params.values())).dtype
        return functional_call(running, held, (batch.pixels.to(dtype),)).flatten(0, 1)

    forward.__annotations__["batch"] = Tiles

    def measure(item: Tensor) -> fg.Measured:
        if item.shape[1:] != (3, size, size):
            raise SpecError(
                f"tiles of shape {tuple(item.shape)}. Pass ({len(item)}, 3, {size}, {size}), as "
                "the model's processor cuts them"
            )
        return fg.Measured("image", {"default": len(item) * tokens})

    def collate(path: str, items: Sequence[Tensor]) -> Tiles:
        pixels = torch.cat(list(items))
        spec = fg.BatchSpec(len(pixels) * tokens, len(pixels), query_len=tokens)
        return Tiles(pixels=pixels, spec=spec)

    return fg.EncoderModel(
        paths={"default": fg.EncoderPath(forward, tokens, unit=tokens)}, measure=measure,
        collate=collate, token_range=(min(tokens, max_tokens), max_tokens), dims={"S": size},
    )  # fmt: skip
