"""Slots of a cache, written and read in plain torch: no host sync, and -1 writes nothing.

A cache is (num_blocks, block_size, ...); slot s is row `s % block_size` of block `s // block_size`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

AT_ONCE = 1 << 27
"""Elements of a cache that rows of a batch gather at a time, keys alone."""


def write_cache(
    cache: Tensor, new: Tensor, slot_mapping: Tensor, scale: Tensor | None = None
) -> None:
    """cache[slot] = new / scale for each token whose slot is not -1; nothing else changes.

    `index_put` cannot skip rows, so a skipped row repeats the write of the first real one; if
    there is none, every row writes back what slot 0 holds.

    Args:
        cache: (num_blocks, block_size, ...), such as one of the pair that attention gets.
        new: (T, ...) what each token brings; what is out of range in fp8 is its largest number.
        slot_mapping: (T,) whole numbers, -1 for a token that is written nowhere.
        scale: () or, of a cache of (..., K, D), (K,); None: 1.
    """
    T = slot_mapping.shape[0]
    if type(T) is int and T == 0:  # a symbol, in a trace, is not asked
        return
    rows = _bytes(cache.view(cache.shape[0] * cache.shape[1], *cache.shape[2:]))
    real_T = slot_mapping >= 0
    first = real_T.long().argmax()
    source_T = torch.where(real_T, torch.arange(slot_mapping.shape[0], device=cache.device), first)
    slot_T = slot_mapping[source_T].clamp(min=0)
    value = torch.where(
        real_T.any(), _bytes(rounded(new[source_T], cache.dtype, scale)), rows[slot_T]
    )
    rows.index_put_((slot_T,), value)


def read_cache(cache: Tensor, blocks: Tensor, dtype: torch.dtype) -> Tensor:
    """cache[blocks] in `dtype`, without its scale."""
    found = _bytes(cache)[blocks]
    if cache.dtype.itemsize == 1:
        found = found.view(cache.dtype)
    return found.to(dtype)


def times_scale(found: Tensor, scale: Tensor | None) -> Tensor:
    """What a cache holds, (..., K, D), times the scale of its kv heads.

    It comes after a mask: a NaN that nobody sees would be one in the gradient of the scale.
    """
    return found if scale is None else found * scale.to(found.dtype).view(-1, 1)


def some_at_a_time(n: int, block_tables: Tensor, cache: Tensor) -> Iterator[slice]:
    """`n` rows of a batch cut into as many as may gather the blocks of their requests at once."""
    return parts_of(n, block_tables.shape[1] * math.prod(cache.shape[1:]))


def parts_of(n: int, wide: int) -> Iterator[slice]:
    """`n` rows cut into as many as may make `wide` numbers each at once."""
    size = max(1, AT_ONCE // max(1, wide))
    return (slice(first, first + size) for first in range(0, n, size))


def rounded(x: Tensor, dtype: torch.dtype, scale: Tensor | None = None) -> Tensor:
    """x / scale in the cache's dtype; in fp8, which has no infinity, as far as its range goes."""
    if scale is not None:
        x = x.float() / scale.float().view(-1, *[1] * (x.dim() - 2))
    if dtype.itemsize == 1:
        x = x.float().clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    return x.to(dtype)


def _bytes(x: Tensor) -> Tensor:
    """fp8 as bytes, since torch cannot index it everywhere; anything else as it is."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x
