"""Triton attention for uniform batches of any query length: split-KV, in one phase or two.

Each request's keys are cut into splits and spans of a fixed number of keys, whose sums are folded
in one order. How long they are follows from the block table's width alone; how many programs share
them, from static shapes too, and changes no bit. So one graph serves every batch of its class, and
a row's bits do not depend on the batch around it or on the size that served it.
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
from fngraph.ops.triton_merge import SPLITS, empty, merge
from fngraph.ops.triton_split import split_kernel
from fngraph.ops.triton_write import scale_of, write

MAX_ROWS = 64  # query rows of one kv head: more is prefill


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
    if not R:
        return
    numbers, constants = options(config, kv)
    rows = Q * constants["GROUP"]
    widest = meta.block_tables.shape[1] * config.block_size
    how = how or how_to(config, rows, widest, R * K, processors(q_THD.device))
    tile, split, programs, many, each, early = how
    units = how.units(widest)
    each = min(each or units, units)
    final = units == 1
    sums = None if final else empty(q_THD, R, K, units, rows, D)
    by_k, k_step = scale_of(k_scale, q_THD)
    by_v, v_step = scale_of(v_scale, q_THD)
    launch(
        split_kernel,
        (R * K * each,),
        (q_THD, k_cache, v_cache, meta.query_start_loc, meta.seq_lens, meta.block_tables,
         q_THD if sinks is None else sinks, by_k, by_v),
        (*(sums or (out_THD,) * 3), out_THD),
        (R, K, units, each, many or 0, *q_THD.stride()[:2],
         *k_cache.stride()[:3], *v_cache.stride()[:3], meta.block_tables.stride(0),
         *out_THD.stride()[:2], k_step, v_step, *numbers),
        ROWS=tile.rows,
        KEYS=tile.keys,
        Q=Q,
        SPLIT=split,
        SPAN=split if many is None else split * SPLITS,
        SHARED=each < units,
        FINAL=final,
        K_SCALED=k_scale is not None,
        V_SCALED=v_scale is not None,
        SINKS=sinks is not None,
        early=early,
        programs=programs,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        **constants,
    )  # fmt: skip
    if sums is not None:
        merge(
            sums, meta, out_THD, Q, split, many,
            window=config.window, sinks=sinks, v_scale=None if v_scale is None else (by_v, v_step),
            early=early,
        )  # fmt: skip


class How(NamedTuple):
    """Static choices of the split kernel. Bits depend on `split` and the tile's keys alone.

    Attributes:
        tile: query rows and keys of a product, and how its kernel is compiled.
        split: keys of a split, a multiple of the tile's.
        programs: that a multiprocessor's registers are to hold.
        many: splits of a request, beyond which its programs take whole spans; None: never.
        each: programs that share the units of a request and a kv head; None: one for each unit.
        early: whether both kernels are launched while the one ahead still runs.
    """

    tile: Tile
    split: int
    programs: int
    many: int | None
    each: int | None = None
    early: bool = True

    def units(self, widest: int) -> int:
        """The most that a request has of them under a block table of so many keys."""
        splits = -(-widest // self.split)
        return splits if self.many is None else max(min(self.many, splits), -(-splits // SPLITS))


def how_to(config: Any, rows: int, widest: int, pairs: int, places: int) -> How:
    """By static shapes: `widest` keys in the block table, `pairs` of a request and a kv head.

    Requests go by spans where spans alone fill the multiprocessors (`places`), if all requests were
    as long. Splits and keys follow from `widest` and the config: bits are the same for any R.
    """
    rows = power_of_two(rows, at_least=16)
    width = power_of_two(config.head_dim, at_least=16)
    split = next(split for most, split in LENGTHS if widest <= most)
    splits = -(-widest // split)
    many = 0 if pairs >= places else SPLITS * places // pairs
    if compute_dtype(config) == torch.float32:
        tile = Tile(rows, 32, 4, 1)
    elif width > 128 or rows > 16 or pairs * splits <= places:  # few programs: 1 x 512 gains 6 %
        tile = Tile(rows, 32, 4, 3)
    else:
        tile = Tile(rows, 32, 2, 3)
    how = How(tile, split, 4 if rows <= 32 and width <= 128 else 2, None)
    if many >= splits:
        return how
    how = how._replace(many=many)
    return how._replace(each=shared(how.units(widest), -(-splits // SPLITS), pairs, places))


def shared(units: int, spans: int, pairs: int, places: int) -> int | None:
    """Programs of a pair that take its units in turn; None: as many as units.

    As many as spans, and at least FILL a multiprocessor; if these come to over MOST each, as many
    fewer as make whole turns.
    """
    enough = max(spans, FILL * places // pairs)
    turns = -(-enough * pairs // (MOST * places))
    each = -(-enough // turns)
    return each if each < units else None


# Keys in the table, in a split: on an H200 1 x 4096 takes 8.5 us by 128, 9.8 by 256; 1 x 32768
# 40 by 512, 51 by 256.
LENGTHS = ((4096, 128), (16384, 256), (float("inf"), 512))
# Programs of a multiprocessor: 8 x 4096 takes 40 us by 2, 44 by 4; 64 x 512 in a table for 131072
# 52 by 64, 61 by 124.
FILL, MOST = 2, 64
