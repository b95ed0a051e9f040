"""Triton attention for uniform batches of any query length: split-KV, in two phases.

Each request's keys are cut into splits of a fixed number of keys, which are merged by log-sum-exp.
How long a split is follows from the block table's width alone, and the grid from static shapes; so
one graph serves every batch of its class, and a row's bits do not depend on the batch around it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops import triton_unified
from fngraph.ops.attention_config import dense
from fngraph.ops.triton_keys import Tile, compute_dtype, options
from fngraph.ops.triton_launch import launch, power_of_two, processors
from fngraph.ops.triton_split import merge_kernel, split_kernel
from fngraph.ops.triton_write import scale_of, write

MAX_ROWS = 64  # query rows of one kv head: more is prefill
MERGED = 32  # splits merged at a time


def run(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    *,
    config: Any,
    host: HostBounds | None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """See `fngraph.ops.attention`. A batch not known to be uniform goes to the unified kernel."""
    write(k_TKD, v_TKD, kv, meta.slot_mapping, k_scale, v_scale)
    T, R = q_THD.shape[0], meta.seq_lens.shape[0]
    Q = host.max_query_len if host is not None else None
    rows = (Q or 0) * (config.num_heads // config.num_kv_heads)
    if Q is None or T != R * Q or rows > MAX_ROWS:
        triton_unified.attend(q_THD, kv, meta, out_THD, config, sinks, k_scale, v_scale)
    else:
        attend(q_THD, kv, meta, out_THD, config, Q, sinks, k_scale, v_scale)


def attend(
    q_THD: Tensor,
    kv: tuple[Tensor, Tensor],
    meta: Any,
    out_THD: Tensor,
    config: Any,
    Q: int,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    how: How | None = None,
) -> None:
    """Attention of R * Q rows, where no request brings more than Q tokens, into all of them."""
    q_THD, (k_cache, v_cache) = dense(q_THD), kv
    R, K, D = meta.seq_lens.shape[0], config.num_kv_heads, config.head_dim
    numbers, constants = options(config, kv)
    rows = Q * constants["GROUP"]
    widest = meta.block_tables.shape[1] * config.block_size
    tile, split, programs, early = how or how_to(config, rows, widest)
    splits = -(-widest // split)
    parts = q_THD.new_empty((R, K, splits, rows, D), dtype=torch.float32)
    tops, totals = parts.new_empty((2, R, K, splits, rows)).unbind()
    by_k, k_step = scale_of(k_scale, q_THD)
    by_v, v_step = scale_of(v_scale, q_THD)
    launch(
        split_kernel,
        (min(R * K * splits, processors(q_THD.device) * programs),),
        (q_THD, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables,
         by_k),
        (parts, tops, totals),
        (R, K, splits, *q_THD.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
         meta.block_tables.stride(0), k_step, *numbers),
        ROWS=tile.rows,
        KEYS=tile.keys,
        Q=Q,
        SPLIT=split,
        REQS=power_of_two(R, at_least=256),
        K_SCALED=k_scale is not None,
        early=early,
        programs=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )  # fmt: skip
    launch(
        merge_kernel,
        (R * Q, config.num_heads),
        (meta.query_start_loc, meta.seq_lens, parts, tops, totals,
         q_THD if sinks is None else sinks, by_v),
        (out_THD,),
        (R, splits, *out_THD.stride()[:2], numbers[2], v_step),
        **{name: constants[name] for name in ("GROUP", "D", "WIDTH", "WINDOW")},
        Q=Q,
        SPLIT=split,
        MERGED=MERGED,
        SINKS=sinks is not None,
        V_SCALED=v_scale is not None,
        early=early,
        num_warps=4,
    )  # fmt: skip


class How(NamedTuple):
    """Static choices of the split kernel: its tile, keys a split, programs a multiprocessor.

    Attributes:
        early: whether both kernels are launched while the one ahead still runs.
    """

    tile: Tile
    split: int
    programs: int
    early: bool = True


def how_to(config: Any, rows: int, widest: int) -> How:
    """By what is the same for every batch; `widest` is what the block table can hold.

    Narrow tiles, so that several programs share a multiprocessor and keep loads in flight. Short
    splits fill the device at batch 1; where requests can be long, fewer cost less to merge.
    """
    rows = power_of_two(rows, at_least=16)
    width = power_of_two(config.head_dim, at_least=16)
    split = next((split for most, split in SPLITS if widest <= most), 1024)
    stages = 1 if compute_dtype(config) == torch.float32 else 5 if width <= 128 else 3
    return How(Tile(rows, 32, 4, stages), split, 4 if rows <= 32 and width <= 128 else 2)


SPLITS = ((1024, 128), (16384, 256), (32768, 512))
