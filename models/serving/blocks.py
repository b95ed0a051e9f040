"""Blocks of the cache as a value: which are free, which are shared, which tokens a block holds.

A block has a name once a whole block of tokens is written to it: the name of the block before it,
and its own tokens. Texts that begin alike find each other's blocks by these names, exactly, as in a
tree. A named block is full, so it is never written again while it has its name.

A block is free when the last request that holds it lets go. It keeps its name, and is found by it,
until it is taken for other tokens: nameless blocks are taken first, then those that nobody has held
for the longest. Whoever holds a block holds those before it, so that of a text the end goes first.

Maps in here are persistent (rpds): a change makes a new one at the cost of the change. Arrays are
never written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
from rpds import HashTrieMap

Name = tuple[Any, bytes]  # (the block before it, or who may share the first one; its tokens)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Pool:
    """All blocks of a cache.

    Attributes:
        num_blocks: how many there are.
        free: int32, those that nobody holds; the last is taken first.
        block_size: tokens of a block that has a name; 0: none ever has.
        holders: block -> how many requests hold it, where it is more than one.
        named: name -> block.
        names: block -> name.
    """

    num_blocks: int
    free: np.ndarray
    block_size: int = 0
    holders: HashTrieMap[int, int] = dataclasses.field(default_factory=HashTrieMap)
    named: HashTrieMap[Name, int] = dataclasses.field(default_factory=HashTrieMap)
    names: HashTrieMap[int, Name] = dataclasses.field(default_factory=HashTrieMap)

    @property
    def kept(self) -> int:
        """Free blocks that still have their names."""
        return sum(block in self.names for block in self.free.tolist())


def new_pool(num_blocks: int, block_size: int = 0) -> Pool:
    """A pool of free blocks; 0 is taken first."""
    return Pool(num_blocks, np.arange(num_blocks - 1, -1, -1, dtype=np.int32), block_size)


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-num_tokens // block_size)


def take(pool: Pool, count: int) -> tuple[Pool, list[int]]:
    """So many free blocks, which must be there; they have no names any more."""
    left = len(pool.free) - count
    assert left >= 0, f"{count} blocks of {len(pool.free)} free ones"
    taken = pool.free[left:][::-1].tolist()
    return dataclasses.replace(unname(pool, taken), free=pool.free[:left]), taken


def unname(pool: Pool, blocks: Iterable[int]) -> Pool:
    """These blocks are found no more. Blocks behind them must not be either."""
    named, names = pool.named, pool.names
    gone = [block for block in blocks if block in names]
    for block in gone:
        named, names = named.remove(names[block]), names.remove(block)
    return dataclasses.replace(pool, named=named, names=names) if gone else pool


def share(pool: Pool, blocks: list[int]) -> Pool:
    """One more request holds each of these, of which some may be free."""
    at = np.isin(pool.free, blocks)
    free = set(pool.free[at].tolist())
    holders = pool.holders
    for block in blocks:
        if block not in free:
            holders = holders.insert(block, holders.get(block, 1) + 1)
    rest = pool.free[~at] if free else pool.free
    return dataclasses.replace(pool, free=rest, holders=holders)


def release(pool: Pool, *held: Iterable[int]) -> Pool:
    """Requests that hold these blocks, each in the order of its text, let go of them."""
    holders = pool.holders
    kept: list[int] = []
    others: list[int] = []
    for blocks in held:
        named: list[int] = []
        for block in blocks:
            more = holders.get(block, 1) - 1
            if more > 1:
                holders = holders.insert(block, more)
            elif more:
                holders = holders.remove(block)
            else:
                (named if block in pool.names else others).append(block)
        kept = named + kept  # the end of a text before its beginning, who let go first before all
    free = np.concatenate([np.asarray(kept, np.int32), pool.free, np.asarray(others, np.int32)])
    return dataclasses.replace(pool, free=free, holders=holders)


def find_prefix(pool: Pool, tokens: np.ndarray, block_size: int, root: Any) -> list[int]:
    """The named blocks that hold the first tokens, as far as they go.

    Args:
        tokens: those that may be shared; what is left over of a last block is not.
        root: who may share: texts under different adapters never do (and a slot's adapter stays
            while blocks of it are named: `ability.check_unused`).
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
    one stays without, and so do those behind it.
    """
    named, names = pool.named, pool.names
    for i in range(first, len(tokens) // block_size):
        before: Any = int(blocks[i - 1]) if i else (root,)
        name = (before, tokens[i * block_size : (i + 1) * block_size].tobytes())
        if (i and before not in names) or name in named:
            break
        block = int(blocks[i])
        named, names = named.insert(name, block), names.insert(block, name)
    return dataclasses.replace(pool, named=named, names=names)


def behind(pool: Pool, before: Iterable[Any]) -> list[int]:
    """The named blocks that come after these, at whatever distance; (root,) is before them all."""
    next_of: dict[Any, list[int]] = {}
    for block, (ahead, _) in pool.names.items():
        next_of.setdefault(ahead, []).append(block)
    found, left = [], list(before)
    while left:
        after = next_of.get(left.pop(), [])
        found += after
        left += after
    return found
