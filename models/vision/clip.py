"""CLIP's image encoder as a pure function, over patches that somebody else has embedded.

Shape letters: R pictures, S places of each, E width, F mlp hidden.

Source: Radford et al., "Learning Transferable Visual Models From Natural Language", 2021.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, affine_names, norm, norm_of
from fngraph.models.vision.parts import Layer, attend_whole, behind_first, layer_of, quick_gelu
from fngraph.models.weights.naming import shape


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of an encoder. Hashable, and part of the structure of its `Params`."""

    num_layers: int = 24
    num_heads: int = 16
    dim: int = 1024
    mlp_dim: int = 4096
    side: int = 16  # positions of the learned table, along each side
    norm_eps: float = 1e-5


@fg.struct
class Params:
    """Weights of an encoder."""

    summary: Tensor  # (E,), the class token
    positions: Tensor  # (1 + side*side, E)
    norm: Affine
    layers: tuple[Layer, ...]
    config: Config = fg.static()


def features(params: Params, patches_RSE: Tensor) -> Tensor:
    """(R, S, E) of patches that lie on a square; the class token's is left out."""
    side = round(patches_RSE.shape[1] ** 0.5)
    first = params.summary.expand(patches_RSE.shape[0], 1, -1)
    x_RSE = torch.cat([first, patches_RSE], dim=1) + behind_first(params.positions, side)
    x_RSE = norm(x_RSE, params.norm, params.config.norm_eps)
    for layer in params.layers:
        x_RSE = encoder_layer(params.config, layer, x_RSE)
    return x_RSE[:, 1:]


@fg.block
def encoder_layer(config: Config, layer: Layer, x_RSE: Tensor) -> Tensor:
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    eps, D = config.norm_eps, config.dim // config.num_heads
    x_RSE = x_RSE + attend_whole(layer.qkv, layer.out, norm(x_RSE, layer.attn_norm, eps), D)
    hidden = quick_gelu(affine(layer.up, norm(x_RSE, layer.mlp_norm, eps)))
    return x_RSE + affine(layer.down, hidden)


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, F, gain = config.dim, config.mlp_dim, norm_of(config.dim)
    layer = layer_of(E, F)
    positions = shape(1 + config.side**2, E)
    return Params(shape(E), positions, gain, (layer,) * config.num_layers, config)


def names(ours: str, theirs: str) -> dict[str, str]:
    """What DeepSeek-OCR's files call the weights, for `loading.Format.names`."""
    layer, block = f"{ours}layers.*.", f"{theirs}transformer.layers.*."
    return {
        f"{ours}summary": f"{theirs}embeddings.class_embedding",
        f"{ours}positions": f"{theirs}embeddings.position_embedding.weight",
        **affine_names(f"{ours}norm", f"{theirs}pre_layrnorm"),
        **affine_names(f"{layer}attn_norm", f"{block}layer_norm1"),
        **affine_names(f"{layer}qkv", f"{block}self_attn.qkv_proj"),
        **affine_names(f"{layer}out", f"{block}self_attn.out_proj"),
        **affine_names(f"{layer}mlp_norm", f"{block}layer_norm2"),
        **affine_names(f"{layer}up", f"{block}mlp.fc1"),
        **affine_names(f"{layer}down", f"{block}mlp.fc2"),
    }
