"""`unpack` on CUDA: two kernels. One reads the slot's words, the other the leaves that they name.

The slot lies in pinned host memory, and a read of it goes over the bus: 2 us alone, but some 15,000
a millisecond in all. So one program reads the words once, into device memory; where every program
of the second kernel read them for itself, a batch of 64 requests and 512 blocks took 1.4 ms instead
of 11 us (H200). The last program to finish moves the ring on and tells the host.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from fngraph.core.buffers import LAST, RAMPS, STRIDE
from fngraph.graphs.staging.ring import STATE

BLOCK = 1024  # bytes of a program; of large leaves 16 times as many
LARGE = 1 << 20  # bytes; a decode batch's leaves have far fewer


@triton.jit
def _read_slot(ring, state, slots, words, STATE: tl.constexpr, WORDS: tl.constexpr):
    """The slot's words, to behind the state."""
    at = tl.arange(0, WORDS)
    slot = ring + (tl.load(state) % slots) * words
    found = tl.load(slot + at, mask=at < words, other=0, cache_modifier=".cv")
    tl.store(state + STATE + at, found, mask=at < words)


@triton.jit
def _unpack(
    table, state, leaves,
    STATE: tl.constexpr, STRIDE: tl.constexpr, LAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program takes a block of one leaf: by 4 bytes where that is aligned, else byte by byte."""
    block, leaf = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row, words = table + leaf * 5, state + STATE
    nbytes = tl.load(row + 1)
    if block * BLOCK < nbytes:
        target, pad, item, ramp = (
            tl.load(row), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4)
        )  # fmt: skip
        tokens, stride = tl.load(words), tl.load(words + 1)
        source, true = tl.load(words + 2 + 2 * leaf), tl.load(words + 3 + 2 * leaf)
        if ((source | target | true | nbytes) & 3) == 0:
            at4 = block * (BLOCK // 4) + tl.arange(0, BLOCK // 4)
            given4 = at4 < true // 4
            data4 = tl.load(source.to(tl.pointer_type(tl.int32)) + at4, mask=given4, other=0)
            wide = tl.maximum(item // 4, 1)  # of an item, in 4 bytes
            counted4 = tokens + stride * (at4 // wide - true // 4 // wide + 1)
            word4 = tl.where(ramp == STRIDE, counted4, pad)
            word4 = tl.where(at4 % wide == 1, word4 >> 32, word4).to(tl.int32)
            last4 = source.to(tl.pointer_type(tl.int32)) + (true - item) // 4 + at4 % wide
            repeats4 = (at4 >= 0) & (ramp == LAST) & (true > 0)
            word4 = tl.where(repeats4, tl.load(last4, mask=repeats4, other=0), word4)
            new4 = (at4 < nbytes // 4) & (~given4 | (source != target))  # it may be there already
            into4 = target.to(tl.pointer_type(tl.int32)) + at4
            tl.store(into4, tl.where(given4, data4, word4), mask=new4)
        else:
            at = block * BLOCK + tl.arange(0, BLOCK)
            given = at < true
            data = tl.load(source.to(tl.pointer_type(tl.uint8)) + at, mask=given, other=0)
            counted = tokens + stride * (at // item - true // item + 1)
            word = tl.where(ramp == STRIDE, counted, pad) >> (8 * (at % item))
            last = source.to(tl.pointer_type(tl.uint8)) + true - item + at % item
            repeats = (at >= 0) & (ramp == LAST) & (true > 0)
            word = tl.where(repeats, tl.load(last, mask=repeats, other=0).to(tl.int64), word)
            new = (at < nbytes) & (~given | (source != target))
            into = target.to(tl.pointer_type(tl.uint8)) + at
            tl.store(into, tl.where(given, data, (word & 255).to(tl.uint8)), mask=new)
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1) == leaves * tl.num_programs(0) - 1:
        tl.store(state + 1, 0)
        step = tl.load(state) + 1
        tl.store(state, step)
        tl.store(tl.load(state + 2).to(tl.pointer_type(tl.int64)), step)


def launch(table: torch.Tensor, ring: torch.Tensor, state: torch.Tensor, nbytes: int) -> None:
    """Launch them on the current stream; no leaf of the key has more than `nbytes` bytes."""
    slots, words = ring.shape
    padded = triton.next_power_of_2(words)
    _read_slot[(1,)](ring, state, slots, words, STATE=STATE, WORDS=padded, num_warps=1)
    block, warps = (BLOCK, 4) if nbytes <= LARGE else (16 * BLOCK, 8)
    grid = (triton.cdiv(nbytes, block), len(table))  # of its second number CUDA takes 65,535
    ramps = RAMPS[STRIDE], RAMPS[LAST]
    _unpack[grid](table, state, len(table), STATE, *ramps, block, num_warps=warps)
