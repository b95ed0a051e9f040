"""Parts of vision towers: rotary positions in two dims, attention, learned tables of positions.

Shape letters: P patches of all pictures of a step, S sequences of attention, H heads, D head dim,
E width of the tower, F of an mlp; n taps of a learned table.
"""

from __future__ import annotations

from typing import Any

import torch
from einops import rearrange
from torch import Tensor
from torch.nn.functional import gelu, interpolate, linear, scaled_dot_product_attention

import fngraph as fg
from fngraph.models.families.layers import Affine, affine, matrix_of, norm, norm_of
from fngraph.models.families.rope import Turn, rotate, rotate_neighbours, turn_by


@fg.struct
class Layer:
    """Weights of one layer."""

    attn_norm: Affine
    qkv: Affine  # (3*E, E)
    out: Affine
    mlp_norm: Affine
    up: Affine  # (F, E)
    down: Affine  # (E, F)


def layer_of(E: int, F: int) -> Layer:
    """A layer of meta tensors, of a tower's width and an mlp's."""
    gain = norm_of(E)
    return Layer(gain, matrix_of(3 * E, E), matrix_of(E, E), gain, matrix_of(F, E), matrix_of(E, F))


def turns(positions_P2: Tensor, D: int, *, theta: float = 10_000.0) -> Tensor:
    """(P, 2, D/4) float32, radians: of rows and of columns, each for a quarter of a head."""
    pair = torch.arange(0, D // 2, 2, device=positions_P2.device, dtype=torch.float32)
    return positions_P2[..., None].float() * (1 / theta ** (pair / (D // 2)))


def turn_of(angle: Tensor) -> Turn:
    """By angles (P, D/2) float32."""
    angle = angle[:, None]
    return turn_by(angle.cos(), angle.sin())


def patched(embed: Affine, table_NE: Tensor, batch: Any) -> Tensor:
    """(P, E): a step's patches, embedded, and what a learned table adds by where they are.

    Args:
        embed: (E, ...), whose further dims are a patch's.
        batch: with patches (T, 4, C), and the table's taps and weights (T, 4, n).
    """
    patches, taps, weights = (x.flatten(0, 1) for x in (batch.patches, batch.taps, batch.weights))
    kernel = embed.weight.flatten(1)
    x_PE = linear(patches.to(kernel.dtype), kernel, embed.bias)
    return x_PE + looked_up(table_NE, taps, weights)


@fg.block
def encoder_layer(
    layer: Layer, x_PE: Tensor, D: int, rope: Turn, starts: Tensor, eps: float,
    *, neighbours: bool = False,
) -> Tensor:  # fmt: skip
    """x + attention(norm(x)), then x + mlp(norm(x)); see `attend`."""
    normed_PE = norm(x_PE, layer.attn_norm, eps)
    x_PE = x_PE + attend(layer.qkv, layer.out, normed_PE, D, rope, starts, neighbours=neighbours)
    hidden_PF = gelu(affine(layer.up, norm(x_PE, layer.mlp_norm, eps)), approximate="tanh")
    return x_PE + affine(layer.down, hidden_PF)


def attend(
    qkv: Affine, out: Affine, x_PE: Tensor, D: int, rope: Turn, starts: Tensor,
    *, neighbours: bool = False,
) -> Tensor:  # fmt: skip
    """(P, E): attention of each sequence of patches over itself.

    Args:
        qkv: (3*E, E), queries, keys and values one below another.
        out: (E, E).
        D: of a head.
        rope: turns of queries and keys, computed in float32.
        starts: (S + 1,) where sequences begin, in patches.
        neighbours: whether columns (2i, 2i + 1) turn together, else (i, i + D/2).
    """
    turn = rotate_neighbours if neighbours else rotate
    q, k, v = rearrange(affine(qkv, x_PE), "p (three h d) -> three p h d", three=3, d=D)
    q, k = (turn(x.float(), rope).to(x.dtype) for x in (q, k))
    mixed = fg.ops.varlen_attention(q, k, v, starts)
    return affine(out, mixed.flatten(1))


def looked_up(table_NE: Tensor, index_Pn: Tensor, weight_Pn: Tensor) -> Tensor:
    """(P, E): the sum of each patch's taps of a learned table, in float32, one tap at a time.

    All at once they would take n times the memory of the result.
    """
    parts = zip(index_Pn.unbind(1), weight_Pn.unbind(1))
    found: Any = sum(table_NE[index_P] * weight_P[:, None] for index_P, weight_P in parts)
    return found.to(table_NE.dtype)  # type: ignore[no-any-return]


# --- pictures that are all of one size ------------------------------------------------------------


def attend_whole(qkv: Affine, out: Affine, x_RSE: Tensor, D: int) -> Tensor:
    """(R, S, E): attention of each of R pictures over its own S places; see `attend`."""
    q, k, v = rearrange(affine(qkv, x_RSE), "r s (three h d) -> three r h s d", three=3, d=D)
    return affine(out, rearrange(scaled_dot_product_attention(q, k, v), "r h s d -> r s (h d)"))


def quick_gelu(x: Tensor) -> Tensor:
    """CLIP's approximation of gelu."""
    return x * torch.sigmoid(1.702 * x)


def resized(table_HWE: Tensor, side: int) -> Tensor:
    """(side, side, E): a learned table of positions for pictures of another size, by cubics."""
    if table_HWE.shape[0] == side:
        return table_HWE
    made = interpolate(
        table_HWE.permute(2, 0, 1)[None].float(), size=(side, side), mode="bicubic", antialias=True
    )
    return made[0].permute(1, 2, 0).to(table_HWE.dtype)


def behind_first(table_NE: Tensor, side: int) -> Tensor:
    """(1 + side*side, E): the same of a table whose first row is for no place of the picture."""
    known = round((table_NE.shape[0] - 1) ** 0.5)
    places = resized(table_NE[1:].unflatten(0, (known, known)), side)
    return torch.cat([table_NE[:1], places.flatten(0, 1)])


def embedded(weights: Affine, pixels: Tensor) -> Tensor:
    """(R, y, x, E) of pixels (R, 3, y*size, x*size): a convolution (E, 3, size, size) whose patches
    do not overlap, as one product."""
    size = weights.weight.shape[-1]
    cut = rearrange(pixels, "r c (y p) (x q) -> r y x (c p q)", p=size, q=size)
    kernel = weights.weight.flatten(1)
    return linear(cut.to(kernel.dtype), kernel, weights.bias)


def row_by_row(x: Tensor) -> Tensor:
    """(R, y*x, C) of what a convolution gives, (R, C, y, x).

    Always a copy: which order its result lies in is up to the convolution, and to the size.
    """
    return x.permute(0, 2, 3, 1).clone(memory_format=torch.contiguous_format).flatten(1, 2)
