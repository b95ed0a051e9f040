"""Kernels that begin while the one ahead still runs (programmatic dependent launch, Hopper and on).

A kernel with the constant EARLY lets the next one begin first of all, and waits before it reads
what the kernel ahead wrote, or writes what that may read. Since each in a row may begin so, a
kernel may find that several ahead of it still run; once it has waited, all of them have ended.

Before the wait it may read what no such kernel writes: weights that are held, and the integers of a
batch, which are staged or made by kernels that start nothing early. Into the cache that all
processors share it may ask for anything: what is written later is written there.

So it may be the first kernel of a loop's body, too. There it has none ahead in its graph, and waits
for nothing: a body begins when all ahead of its node, or all of the turn before, has ended. What it
reads before the wait no turn writes: passes call weights held that are held leaves of `forward`,
never a carry, which lies in a buffer of the loop's own; and a turn's integers are made by kernels
of torch's or Inductor's, which start nothing early, or by the turn before. The last kernel of a
turn, which tells whether there is another, starts nothing early either.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def overlap(EARLY: tl.constexpr):
    """Let the next kernel begin, and wait for those ahead."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next(EARLY: tl.constexpr):
    """Let the next kernel begin, as soon as every program is here."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(EARLY: tl.constexpr):
    """Until the kernels ahead have ended, and what they wrote can be read."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def ask_for(pointers):
    """Ask for the line of 128 bytes at each, into the cache that all processors share."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def ask_for_rows(rows, D: tl.constexpr):
    """The same for rows of D numbers each."""
    BYTES: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    for i in tl.static_range((D * BYTES + 127) // 128):
        ask_for(rows + i * (128 // BYTES))
