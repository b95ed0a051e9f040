"""`unpack` on CUDA: one kernel, whose programs take a block of one leaf each.

The slot lies in pinned host memory, so reading it takes two trips over the bus: its words, then
the leaves' bytes. The last program to finish moves the ring on and tells the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

BLOCK = 1024


@triton.jit
def _unpack(table, ring, state, slots, words, leaves, BLOCK: tl.constexpr):
    leaf, block = tl.program_id(0), tl.program_id(1)
    step = tl.load(state)
    row = table + leaf * 5
    nbytes = tl.load(row + 1)
    if block * BLOCK < nbytes:
        target, pad = tl.load(row), tl.load(row + 2)
        item, ramp = tl.load(row + 3), tl.load(row + 4)
        slot = ring + (step % slots) * words
        tokens, stride = tl.load(slot, volatile=True), tl.load(slot + 1, volatile=True)
        source = tl.load(slot + 2 + 2 * leaf, volatile=True)
        true = tl.load(slot + 3 + 2 * leaf, volatile=True)
        at = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        data = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=at < true, other=0)
        counted = tokens + stride * (at // item - true // item + 1)
        word = tl.where(ramp != 0, counted, pad)
        padding = ((word >> (8 * (at % item))) & 255).to(tl.uint8)
        into = target.to(tl.pointer_type(tl.uint8)) + at
        new = (at >= true) | (source != target)  # a leaf may be in its buffer already
        tl.store(into, tl.where(at < true, data, padding), mask=(at < nbytes) & new)
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == leaves * tl.num_programs(1) - 1:
        tl.store(state + 1, 0)
        tl.store(state, step + 1)
        tl.store(tl.load(state + 2).to(tl.pointer_type(tl.int64)), step + 1)


def launch(table: torch.Tensor, ring: torch.Tensor, state: torch.Tensor, nbytes: int) -> None:
    """Launch it on the current stream; no leaf of the key has more than `nbytes` bytes."""
    slots, words = ring.shape
    grid = (len(table), triton.cdiv(nbytes, BLOCK))
    _unpack[grid](table, ring, state, slots, words, len(table), BLOCK=BLOCK)
