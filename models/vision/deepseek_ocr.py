"""DeepSeek-OCR's encoder as pure functions of two paths: a view of the page, and crops of it.

SAM's features are the patches of CLIP, and both together are a place's. A view of 1024 pixels makes
16 rows of 16 places, each row with a newline behind it: 272 tokens; a crop of 640 pixels makes 100.
The crops of a page are put together row by row, newlines behind them, before its view, and a
separator ends it. Shape letters: R views or crops, s places along a side, E width of both towers
together, G width of the language model.

Source: Wei et al., "DeepSeek-OCR", 2025, and the modules published with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from einops import rearrange
from torch import Tensor

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, affine_names, matrix_of
from fngraph.models.vision import clip, pages, sam
from fngraph.models.vision.pages import Crops, Page, Sizes, Views
from fngraph.models.vision.parts import row_by_row
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape

STRIDE = 4  # patches of a place, along each side


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of an encoder, as published. Hashable, and part of the structure of its `Params`."""

    sam: sam.Config = dataclasses.field(default_factory=sam.Config)
    clip: clip.Config = dataclasses.field(default_factory=clip.Config)
    out_dim: int = 1280  # G
    view: int = 1024  # pixels along a side
    crop: int = 640

    @property
    def num_layers(self) -> int:
        """Of both towers."""
        return self.sam.num_layers + self.clip.num_layers

    @property
    def sizes(self) -> Sizes:
        """What views and crops are like."""
        s, c = (pixels // self.sam.patch_size // STRIDE for pixels in (self.view, self.crop))
        return Sizes(self.view, self.crop, s * (s + 1), c * c)


@fg.struct
class Params:
    """Weights of an encoder."""

    sam: sam.Params
    clip: clip.Params
    out: Affine  # (G, E)
    newline: Tensor  # (G,)
    separator: Tensor  # (G,)
    config: Config = fg.static()


def forward_views(params: Params, batch: Views) -> Tensor:
    """(T, G): of each view its rows of places, a newline behind each; T = R*s*(s + 1)."""
    return with_newlines(params, places(params, batch.pixels)).flatten(0, 2)


def forward_crops(params: Params, batch: Crops) -> Tensor:
    """(T, G): of each crop its places, row by row; T = R*s*s."""
    return places(params, batch.pixels).flatten(0, 2)


def places(params: Params, pixels: Tensor) -> Tensor:
    """(R, s, s, G) of pixels (R, 3, ...)."""
    seen = sam.features(params.sam, pixels)
    side, patches_RSE = seen.shape[2], row_by_row(seen)
    both_RSE = torch.cat([clip.features(params.clip, patches_RSE), patches_RSE], dim=-1)
    return affine(params.out, both_RSE).unflatten(1, (side, side))


def with_newlines(params: Params, x: Tensor) -> Tensor:
    """A newline behind each row of (..., rows, columns, G)."""
    return torch.cat([x, params.newline.expand(*x.shape[:-2], 1, -1)], dim=-2)


# --- on the host ----------------------------------------------------------------------------------


def encoder(config: Config, params: Params, *, max_tokens: int = 13_824) -> fg.EncoderModel:
    """What `fg.graphify_encoder` makes graphs of; its items are `pages.Page`s.

    Args:
        params: whose newline and separator join the rows of a page.
        max_tokens: output tokens of the largest graph of each path.
    """
    join = functools.partial(assemble, params)
    return pages.encoder(config.sizes, forward_views, forward_crops, join, max_tokens)


def assemble(params: Params, outputs: Mapping[str, Tensor], page: Page) -> Tensor:
    """(tokens, G) of a page: its crops as one picture, if it has any, its view, the separator."""
    parts = [outputs["global"], params.separator[None]]
    if "local" in outputs:
        columns, rows = page.grid
        side = round(params.config.sizes.crop_tokens**0.5)
        whole = rearrange(
            outputs["local"], "(a b y x) g -> (a y) (b x) g", a=rows, b=columns, y=side, x=side
        )
        parts.insert(0, with_newlines(params, whole).flatten(0, 1))
    return torch.cat(parts)


# --- weights --------------------------------------------------------------------------------------


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    wide, G = config.clip.dim + config.sam.out_dims[1], config.out_dim
    return Params(
        sam.blank(config.sam), clip.blank(config.clip), matrix_of(G, wide), shape(G), shape(G),
        config,
    )  # fmt: skip


init_params = functools.partial(
    naming.init_params, blank, vectors={"bias": 0.0}
)  # config, *, seed, device, dtype

NAMES = {  # as in the published files
    **sam.names("sam.", "model.sam_model."),
    **clip.names("clip.", "model.vision_model."),
    **affine_names("out", "model.projector.layers"),
    "newline": "model.image_newline",
    "separator": "model.view_seperator",
}
SKIPPED = (
    "model.vision_model.embeddings.patch_embedding.*",  # SAM's features are in their place
    "model.vision_model.embeddings.position_ids",
    "model.layers.*", "model.embed_tokens.*", "model.norm.*", "lm_head.*",
)  # fmt: skip
from_state = functools.partial(
    loading.from_state, blank, NAMES, skipped=SKIPPED
)  # config, state, *, device, dtype -> params
