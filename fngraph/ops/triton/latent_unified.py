"""Triton's latent attention for any mix of prefill and decode: see `triton_tiles`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops.paged.config import dense
from fngraph.ops.triton.keys import Tile
from fngraph.ops.triton.latent import attend_rows, constants, scale_of, tile_of
from fngraph.ops.triton.launch import launch
from fngraph.ops.triton.tiles import find_with_keys, lanes, tiles
from fngraph.ops.triton.write import write_rows


@triton.jit
def latent_unified_kernel(
    q, cache, starts, lens, tables, out, T, R,
    q_row, q_head, by_block, by_slot, table_row, out_row, out_head, scale,
    HEADS: tl.constexpr, GROUP: tl.constexpr, BQ: tl.constexpr, SIZE: tl.constexpr,
    RANK: tl.constexpr, WIDTH: tl.constexpr, ROPE: tl.constexpr, TURN: tl.constexpr,
    FLOAT32: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, REQS: tl.constexpr,
):  # fmt: skip
    """One tile of tokens and heads, over all the keys that it sees."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # late tokens see most keys: they go first
    r, first_token, end, length = find_with_keys(starts, lens, tile, T, R, BQ, REQS)
    if first_token < end:
        m = tl.arange(0, ROWS)
        token = first_token + m // GROUP
        head = tl.program_id(0) * GROUP + m % GROUP
        real = (m < BQ * GROUP) & (token < end) & (token < T) & (head < HEADS)
        d = tl.arange(0, WIDTH)
        at = token.to(tl.int64) * out_row + head.to(tl.int64) * out_head
        into = out + at[:, None] + d[None, :]
        there = real[:, None] & (d < RANK)[None, :]
        if length > 0:
            last = tl.minimum(length, length - (end - first_token) + BQ)
            acc, _, total = attend_rows(
                q, token.to(tl.int64) * q_row + head.to(tl.int64) * q_head, real,
                length - (end - token), 0, last, last, tables + r.to(tl.int64) * table_row,
                cache, by_block, by_slot, scale,
                SIZE, RANK, WIDTH, ROPE, TURN, ROWS, KEYS, FLOAT32,
            )  # fmt: skip
            result = acc / tl.where(total > 0, total, 1.0)[:, None]
            tl.store(into, result.to(out.dtype.element_ty), mask=there)
        else:
            tl.store(into, tl.zeros((ROWS, WIDTH), out.dtype.element_ty), mask=there)


def run(
    q_THC: Tensor,
    new_TC: Tensor,
    cache: Tensor,
    meta: Any,
    out_THL: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
) -> None:
    """See `fngraph.ops.mla`; shape letters are listed there."""
    write_rows(new_TC, cache, meta.slot_mapping)
    attend(q_THC, cache, meta, out_THL, config)


def attend(
    q_THC: Tensor,
    cache: Tensor,
    meta: Any,
    out_THL: Tensor,
    config: Any,
    tile: Tile | None = None,
) -> None:
    """Latent attention over a cache that holds this step's rows, into all of `out_THL`."""
    q_THC = dense(q_THC)
    T, R = q_THC.shape[0], meta.seq_lens.shape[0]
    tile = tile or tile_of(config, 64)
    known = constants(config, tile)
    launch(
        latent_unified_kernel,
        (-(-config.num_heads // known["GROUP"]), tiles(T, R, known["BQ"])),
        (q_THC, cache, meta.query_start_loc, meta.seq_lens, meta.block_tables),
        (out_THL,),
        (T, R, *q_THC.stride()[:2], *cache.stride()[:2], meta.block_tables.stride(0),
         *out_THL.stride()[:2], scale_of(config)),
        REQS=lanes(R),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **known,
    )  # fmt: skip
