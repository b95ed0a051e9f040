"""What Triton's kernels of latent attention share: query rows over a range of compressed rows.

A row of a tile is one query head of one token. A tile reads each row of the cache once for all of
its heads, since the key is the whole row and the value is the row's first part. Tiles of keys begin
at multiples of KEYS and each row's softmax goes over them in order, as in `triton_keys`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from fngraph.ops.triton.keys import LOG2E, Tile, compute_dtype, weigh
from fngraph.ops.triton.launch import power_of_two


@triton.jit
def load_row(
    of, at, there,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
):  # fmt: skip
    """The latent part and the rotated part of rows that begin at `at`; zeros past their ends."""
    d = tl.arange(0, WIDTH)
    e = tl.arange(0, TURN)
    latent = tl.load(
        of + at[:, None] + d[None, :], mask=there[:, None] & (d < RANK)[None, :], other=0.0
    )
    turned = tl.load(
        of + at[:, None] + RANK + e[None, :], mask=there[:, None] & (e < ROPE)[None, :], other=0.0
    )
    return latent, turned


@triton.jit
def attend_rows(
    q, q_at, real, position, begin, end, last, table, cache, by_block, by_slot, scale,
    SIZE: tl.constexpr, RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr,
    TURN: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, FLOAT32: tl.constexpr,
):  # fmt: skip
    """(acc, top, total): weighted latents, largest score and sum of weights of each row.

    Keys begin <= n < end, by multiples of KEYS; none from `last` on is looked at. Scores are in
    powers of two.
    """
    x, x_turned = load_row(q, q_at, real, RANK, WIDTH, ROPE, TURN)
    if FLOAT32:
        x, x_turned = x.to(tl.float32), x_turned.to(tl.float32)
    acc = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    for start in tl.range(begin, end, KEYS):
        n = start + tl.arange(0, KEYS)
        live = n < last
        block = tl.load(table + n // SIZE, mask=live, other=0).to(tl.int64)
        at = block * by_block + n % SIZE * by_slot
        latent, turned = load_row(cache, at, live, RANK, WIDTH, ROPE, TURN)
        latent, turned = latent.to(x.dtype), turned.to(x.dtype)
        scores = tl.dot(x, tl.trans(latent), input_precision="ieee")
        scores = tl.dot(x_turned, tl.trans(turned), scores, input_precision="ieee") * scale
        seen = live[None, :] & (n[None, :] <= position[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        weights, fade, top, total = weigh(scores, top, total)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(x.dtype), latent, acc, input_precision="ieee")
    return acc, top, total


def scale_of(config: Any) -> float:
    """Of the scores, as `attend_rows` takes it."""
    return config.scale * LOG2E


def constants(config: Any, tile: Tile) -> dict[str, Any]:
    """Of both kernels. A tile holds BQ tokens of GROUP heads, as even a share of them as fits."""
    tiles = -(-config.num_heads // tile.rows)
    group = -(-config.num_heads // tiles)
    return {
        "HEADS": config.num_heads,
        "GROUP": group,
        "BQ": tile.rows // group,
        "SIZE": config.block_size,
        "RANK": config.rank,
        "WIDTH": power_of_two(config.rank, at_least=16),
        "ROPE": config.rope_dim,
        "TURN": power_of_two(config.rope_dim, at_least=16),
        "FLOAT32": compute_dtype(config) == torch.float32,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
    }


def tile_of(config: Any, rows: int) -> Tile:
    """For tiles of up to `rows` rows, whose sums, rows x rank in float32, stay in registers.

    At rank 512, 32 keys are 36 KB of shared memory and 64 rows of queries 72 KB. The block table
    is looked up ahead of the keys, which takes two stages more.
    """
    if compute_dtype(config) == torch.float32:  # without tensor cores
        return Tile(16, 16, 8, 1)
    if rows <= 16:
        return Tile(16, 32, 4, 5)  # two programs to a multiprocessor
    return Tile(32, 32, 8, 5) if rows <= 32 else Tile(64, 32, 8, 3)
