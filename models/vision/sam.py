"""SAM's image encoder as a pure function, with the strided ends that DeepSeek-OCR gave it.

Most layers attend within windows, some over the whole picture; both know by how many rows and
columns two places are apart. Shape letters: R pictures, Y = X places along a side, E width, D head
dim, H heads, W a window's places along a side.

Source: Kirillov et al., "Segment Anything", 2023; Wei et al., "DeepSeek-OCR", 2025.
"""

from __future__ import annotations

import dataclasses

import torch
from einops import einsum, rearrange
from torch import Tensor
from torch.nn.functional import conv2d, gelu, interpolate, pad, scaled_dot_product_attention

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, affine_names, matrix_of, norm, norm_of
from fngraph.models.vision.parts import embedded, resized
from fngraph.models.weights.naming import shape

EPS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """Sizes of an encoder. Hashable, and part of the structure of its `Params`."""

    num_layers: int = 12
    num_heads: int = 12
    dim: int = 768
    mlp_dim: int = 3072
    patch_size: int = 16
    side: int = 64  # positions of the learned table, along each side
    window: int = 14
    whole: tuple[int, ...] = (2, 5, 8, 11)  # layers that attend over the whole picture
    neck_dim: int = 256
    out_dims: tuple[int, int] = (512, 1024)  # each at half the places along a side


@fg.struct
class Layer:
    """Weights of one layer."""

    attn_norm: Affine
    qkv: Affine  # (3*E, E)
    out: Affine
    by_rows: Tensor  # (2*Y - 1, D), or W in place of Y: for places so many rows apart
    by_columns: Tensor
    mlp_norm: Affine
    up: Affine
    down: Affine


@fg.struct
class Params:
    """Weights of an encoder; convolutions as (out, in, rows, columns)."""

    embed: Affine
    positions: Tensor  # (1, side, side, E)
    layers: tuple[Layer, ...]
    narrow: Tensor
    narrow_norm: Affine
    mix: Tensor
    mix_norm: Affine
    half: Tensor
    quarter: Tensor
    config: Config = fg.static()


def features(params: Params, pixels: Tensor) -> Tensor:
    """(R, out_dims[1], y, x): of pixels (R, 3, ...), 4 patches along a side to a place."""
    config, x_RYXE = params.config, embedded(params.embed, pixels)
    x_RYXE = x_RYXE + resized(params.positions[0], x_RYXE.shape[1])
    for i, layer in enumerate(params.layers):
        x_RYXE = encoder_layer(config, layer, x_RYXE, i in config.whole)
    x = by_place(conv2d(x_RYXE.permute(0, 3, 1, 2), params.narrow), params.narrow_norm)
    x = by_place(conv2d(x, params.mix, padding=1), params.mix_norm)
    return conv2d(conv2d(x, params.half, stride=2, padding=1), params.quarter, stride=2, padding=1)


def by_place(x: Tensor, weights: Affine) -> Tensor:
    """Layer norm over the channels of each place of (R, channels, Y, X)."""
    return norm(x.permute(0, 2, 3, 1), weights, EPS).permute(0, 3, 1, 2)


@fg.block
def encoder_layer(config: Config, layer: Layer, x_RYXE: Tensor, whole: bool) -> Tensor:
    """x + attention(norm(x)), in windows if not over the whole; then x + mlp(norm(x))."""
    side, W = x_RYXE.shape[1], config.window
    mixed = norm(x_RYXE, layer.attn_norm, EPS)
    if whole:
        mixed = attend(config, layer, mixed)
    else:
        mixed = pad(mixed, (0, 0, 0, -side % W, 0, -side % W))
        n = mixed.shape[1] // W
        windows = rearrange(mixed, "r (a y) (b x) e -> (r a b) y x e", a=n, b=n)
        windows = attend(config, layer, windows)
        mixed = rearrange(windows, "(r a b) y x e -> r (a y) (b x) e", a=n, b=n)
        mixed = mixed[:, :side, :side]
    x_RYXE = x_RYXE + mixed
    return x_RYXE + affine(layer.down, gelu(affine(layer.up, norm(x_RYXE, layer.mlp_norm, EPS))))


def attend(config: Config, layer: Layer, x_RYXE: Tensor) -> Tensor:
    """(R, Y, X, E): attention of all places, with what a query makes of the way to each key."""
    side = x_RYXE.shape[1]
    q, k, v = rearrange(
        affine(layer.qkv, x_RYXE), "r y x (three h d) -> three r h (y x) d",
        three=3, h=config.num_heads,
    )  # fmt: skip
    q_grid = q.unflatten(2, (side, side))
    up = einsum(q_grid, apart(layer.by_rows, side), "r h y x d, y k d -> r h y x k")
    along = einsum(q_grid, apart(layer.by_columns, side), "r h y x d, x k d -> r h y x k")
    bias = (up[..., :, None] + along[..., None, :]).flatten(4, 5).flatten(2, 3)
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=bias)
    return affine(layer.out, rearrange(mixed, "r h (y x) d -> r y x (h d)", y=side))


def apart(table_ND: Tensor, side: int) -> Tensor:
    """(side, side, D): the row of a table of distances for each query and key along one axis."""
    if table_ND.shape[0] != 2 * side - 1:
        stretched = interpolate(table_ND.t()[None].float(), size=2 * side - 1, mode="linear")
        table_ND = stretched[0].t().to(table_ND.dtype)
    place = torch.arange(side, device=table_ND.device)
    return table_ND[place[:, None] - place + side - 1]


def blank(config: Config) -> Params:
    """`Params` of meta tensors: the one list of weights that init and files go by."""
    E, N, (half, quarter) = config.dim, config.neck_dim, config.out_dims
    gain, D = norm_of(E), E // config.num_heads

    def layer(i: int) -> Layer:
        table = shape(2 * (config.side if i in config.whole else config.window) - 1, D)
        return Layer(
            gain, matrix_of(3 * E, E), matrix_of(E, E), table, table, gain,
            matrix_of(config.mlp_dim, E), matrix_of(E, config.mlp_dim),
        )  # fmt: skip

    return Params(
        Affine(shape(E, 3, config.patch_size, config.patch_size), shape(E)),
        shape(1, config.side, config.side, E), tuple(map(layer, range(config.num_layers))),
        shape(N, E, 1, 1), norm_of(N), shape(N, N, 3, 3), norm_of(N), shape(half, N, 3, 3),
        shape(quarter, half, 3, 3), config,
    )  # fmt: skip


def names(ours: str, theirs: str) -> dict[str, str]:
    """What DeepSeek-OCR's files call the weights, for `loading.Format.names`."""
    layer, block = f"{ours}layers.*.", f"{theirs}blocks.*."
    return {
        **affine_names(f"{ours}embed", f"{theirs}patch_embed.proj"),
        f"{ours}positions": f"{theirs}pos_embed",
        **affine_names(f"{layer}attn_norm", f"{block}norm1"),
        **affine_names(f"{layer}qkv", f"{block}attn.qkv"),
        **affine_names(f"{layer}out", f"{block}attn.proj"),
        f"{layer}by_rows": f"{block}attn.rel_pos_h",
        f"{layer}by_columns": f"{block}attn.rel_pos_w",
        **affine_names(f"{layer}mlp_norm", f"{block}norm2"),
        **affine_names(f"{layer}up", f"{block}mlp.lin1"),
        **affine_names(f"{layer}down", f"{block}mlp.lin2"),
        f"{ours}narrow": f"{theirs}neck.0.weight",
        **affine_names(f"{ours}narrow_norm", f"{theirs}neck.1"),
        f"{ours}mix": f"{theirs}neck.2.weight",
        **affine_names(f"{ours}mix_norm", f"{theirs}neck.3"),
        f"{ours}half": f"{theirs}net_2.weight",
        f"{ours}quarter": f"{theirs}net_3.weight",
    }
