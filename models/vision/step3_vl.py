"""Step3-VL's encoder as pure functions of two paths: the whole image, and patches cut out of it.

Four class tokens, which are alike, and the places of an image; each layer adds the norm of what it
computes; two strided convolutions leave 13 x 13 places of an image of 728 pixels, 169 tokens, and 9
x 9 of a patch of 504, 81 tokens. Shape letters: R images or patches, S places of each, E width, F
mlp hidden, O channels of the first convolution, G width of the language model.

Source: StepFun, "Step-3 is Large yet Affordable", 2025, and the modules published with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import conv2d, linear

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, affine_names, matrix_of, norm, norm_of
from fngraph.models.vision import pages
from fngraph.models.vision.pages import Crops, Page, Sizes, Views
from fngraph.models.vision.parts import attend_whole, behind_first, embedded, quick_gelu, row_by_row
from fngraph.models.weights import loading, naming
from fngraph.models.weights.naming import shape

FIRST = 4  # class tokens in front


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of an encoder, as published. Hashable, and part of the structure of its `Params`."""

    num_layers: int = 63
    num_heads: int = 16
    dim: int = 1792  # E
    mlp_dim: int = 15_360  # F
    mid_dim: int = 4096  # O
    out_dim: int = 7168  # G
    patch_size: int = 14  # pixels along a side
    view: int = 728  # pixels along a side of the whole image
    crop: int = 504  # of a patch cut out of it
    norm_eps: float = 1e-6

    @property
    def sizes(self) -> Sizes:
        """What images and patches are like."""
        view, crop = (
            (pixels // self.patch_size // 2 + 1) // 2 for pixels in (self.view, self.crop)
        )
        return Sizes(self.view, self.crop, view**2, crop**2)


@fg.struct
class Layer:
    """Weights of one layer."""

    qkv: Affine  # (3*E, E)
    out: Affine
    attn_norm: Affine
    up: Affine  # (F, E)
    down: Affine  # (E, F)
    mlp_norm: Affine


@fg.struct
class Params:
    """Weights of an encoder; convolutions as (out, in, rows, columns)."""

    embed: Affine  # (E, 3, patch_size, patch_size)
    summary: Tensor  # (1, E), the class token
    positions: Tensor  # (1 + places of the whole image, E)
    layers: tuple[Layer, ...]
    half: Affine  # (O, E, 2, 2)
    quarter: Affine  # (2*O, O, 3, 3)
    out: Tensor  # (G, 2*O)
    config: Config = fg.static()


def forward_views(params: Params, batch: Views) -> Tensor:
    """(T, G): of each whole image its places, row by row; T is R times 169."""
    return places(params, batch.pixels)


def forward_crops(params: Params, batch: Crops) -> Tensor:
    """(T, G): of each patch its places, row by row; T is R times 81."""
    return places(params, batch.pixels)


def places(params: Params, pixels: Tensor) -> Tensor:
    """(R * places, G) of pixels (R, 3, ...)."""
    config, patches_RYXE = params.config, embedded(params.embed, pixels)
    side, first = patches_RYXE.shape[1], params.summary.expand(patches_RYXE.shape[0], 1, -1)
    x_RSE = torch.cat([first, patches_RYXE.flatten(1, 2)], dim=1)
    x_RSE = x_RSE + behind_first(params.positions, side)
    x_RSE = torch.cat([x_RSE[:, :1].expand(-1, FIRST - 1, -1), x_RSE], dim=1)
    for layer in params.layers:
        x_RSE = encoder_layer(config, layer, x_RSE)
    x = x_RSE[:, FIRST:].transpose(1, 2).unflatten(2, (side, side))
    x = conv2d(x, params.half.weight, params.half.bias, stride=2)
    x = conv2d(x, params.quarter.weight, params.quarter.bias, stride=2, padding=1)
    return linear(row_by_row(x), params.out).flatten(0, 1)


@fg.block
def encoder_layer(config: Config, layer: Layer, x_RSE: Tensor) -> Tensor:
    """x + norm(attention(x)), then x + norm(mlp(x))."""
    eps, D = config.norm_eps, config.dim // config.num_heads
    x_RSE = x_RSE + norm(attend_whole(layer.qkv, layer.out, x_RSE, D), layer.attn_norm, eps)
    hidden = quick_gelu(affine(layer.up, x_RSE))
    return x_RSE + norm(affine(layer.down, hidden), layer.mlp_norm, eps)


# --- on the host ----------------------------------------------------------------------------------


def encoder(config: Config, *, max_tokens: int = 8192) -> fg.EncoderModel:
    """What `fg.graphify_encoder` makes graphs of; its items are `pages.Page`s.

    Args:
        max_tokens: output tokens of the largest graph of each path.
    """
    return pages.encoder(config.sizes, forward_views, forward_crops, assemble, max_tokens)


def assemble(outputs: Mapping[str, Tensor], page: Page) -> Tensor:
    """(tokens, G) of an image: its patches, one after another, then the whole."""
    return torch.cat([outputs[path] for path in ("local", "global") if path in outputs])


# --- weights --------------------------------------------------------------------------------------


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F, mid, size = config.dim, config.mlp_dim, config.mid_dim, config.patch_size
    gain = norm_of(E)
    layer = Layer(
        matrix_of(3 * E, E), matrix_of(E, E), gain, matrix_of(F, E), matrix_of(E, F), gain
    )
    return Params(
        Affine(shape(E, 3, size, size), shape(E)), shape(1, E),
        shape(1 + (config.view // size) ** 2, E), (layer,) * config.num_layers,
        Affine(shape(mid, E, 2, 2), shape(mid)), Affine(shape(2 * mid, mid, 3, 3), shape(2 * mid)),
        shape(config.out_dim, 2 * mid), config,
    )  # fmt: skip


init_params = functools.partial(
    naming.init_params, blank, vectors={"bias": 0.0}
)  # config, *, seed, device, dtype

BLOCK = "vision_model.transformer.layers.*."
NAMES = {  # as in the published files
    **affine_names("embed", "vision_model.embeddings.patch_embedding"),
    "summary": "vision_model.embeddings.class_embedding",
    "positions": "vision_model.embeddings.position_embedding.weight",
    **affine_names("layers.*.qkv", f"{BLOCK}self_attn.qkv_proj"),
    **affine_names("layers.*.out", f"{BLOCK}self_attn.out_proj"),
    **affine_names("layers.*.attn_norm", f"{BLOCK}layer_norm1"),
    **affine_names("layers.*.up", f"{BLOCK}mlp.fc1"),
    **affine_names("layers.*.down", f"{BLOCK}mlp.fc2"),
    **affine_names("layers.*.mlp_norm", f"{BLOCK}layer_norm2"),
    **affine_names("half", "vit_downsampler"),
    **affine_names("quarter", "vit_downsampler2"),
    "out": "vit_large_projector.weight",
}
from_state = functools.partial(
    loading.from_state, blank, NAMES,
    skipped=("model.*", "lm_head.*", "vision_model.embeddings.position_ids"),
)  # fmt: skip  # config, state, *, device, dtype -> params
