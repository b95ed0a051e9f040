"""Blocks of the cache as a value: which are free, which are shared, which tokens a block holds.

A block has a name once a whole block of prompt tokens is written to it: the name of the block
before it, and its own tokens. Requests whose prompts begin alike find each other's blocks by these
names, exactly, as in a tree. A named block is full, so it is never written again; it is free when
the last request that holds it lets go.

Arrays and dicts in here are never written: what changes is copied, once for all that a step does.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

Name = tuple[Any, bytes]  # (the block before it, or who may share the first one; its tokens)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """All blocks of a cache.

    Attributes:
        num_blocks: how many there are.
        free: int32, those that nobody holds; the last is taken first.
        holders: block -> how many requests hold it, where it is more than one.
        named: name -> block.
        names: block -> name.
    """

    num_blocks: int
    free: np.ndarray
    holders: Mapping[int, int] = dataclasses.field(default_factory=dict)
    named: Mapping[Name, int] = dataclasses.field(default_factory=dict)
    names: Mapping[int, Name] = dataclasses.field(default_factory=dict)


def new_pool(num_blocks: int) -> Pool:
    """A pool of free blocks; 0 is taken first."""
    return Pool(num_blocks, np.arange(num_blocks - 1, -1, -1, dtype=np.int32))


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def take(pool: Pool, count: int) -> tuple[Pool, list[int]]:
    """So many free blocks, which must be there."""
    left = len(pool.free) - count
    assert left >= 0, f"{count} blocks of {len(pool.free)} free ones"
    return dataclasses.replace(pool, free=pool.free[:left]), pool.free[left:][::-1].tolist()


def share(pool: Pool, blocks: Iterable[int]) -> Pool:
    """One more request holds each of these."""
    holders = dict(pool.holders)
    for block in blocks:
        holders[block] = holders.get(block, 1) + 1
    return dataclasses.replace(pool, holders=holders)


def release(pool: Pool, blocks: Iterable[int]) -> Pool:
    """One request fewer holds each of these, or as many fewer as it is given times."""
    holders, freed = dict(pool.holders), []
    for block in blocks:
        others = holders.pop(block, 1) - 1
        if others > 1:
            holders[block] = others
        elif not others:
            freed.append(block)
    named, names = pool.named, pool.names
    if any(block in names for block in freed):
        named, names = dict(named), dict(names)
        for block in freed:
            if block in names:
                del named[names.pop(block)]
    free = np.concatenate([pool.free, np.asarray(freed, np.int32)])
    return dataclasses.replace(pool, free=free, holders=holders, named=named, names=names)


def find_prefix(pool: Pool, tokens: np.ndarray, block_size: int, root: Any) -> list[int]:
    """The named blocks that hold the first tokens, as far as they go.

    Args:
        tokens: those that may be shared; what is left over of a last block is not.
        root: who may share: texts under different adapters never do (and a slot's adapter stays
            while any request has it: `ability.check_unused`).
    """
    found: list[int] = []
    if pool.named:
        before: Any = (root,)
        for start in range(0, len(tokens) - block_size + 1, block_size):
            block = pool.named.get((before, tokens[start : start + block_size].tobytes()))
            if block is None:
                break
            found.append(block)
            before = block
    return found


def give_names(
    pool: Pool, blocks: np.ndarray, tokens: np.ndarray, block_size: int, root: Any, first: int
) -> Pool:
    """Name the blocks that `tokens` fill, from block number `first` on.

    Where another request's block has the name already, as the last one of two equal prompts, this
    one stays without.
    """
    named, names = dict(pool.named), dict(pool.names)
    for i in range(first, len(tokens) // block_size):
        before: Any = int(blocks[i - 1]) if i else (root,)
        block = int(blocks[i])
        name = (before, tokens[i * block_size : (i + 1) * block_size].tobytes())
        if named.setdefault(name, block) != block:
            break
        names[block] = name
    return dataclasses.replace(pool, named=named, names=names)
