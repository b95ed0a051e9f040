"""What the compiler is told of strides that are no multiples of 16."""

from __future__ import annotations

import math

import triton
import triton.language as tl


@triton.jit
def by_step(stride, STEP: tl.constexpr):
    """The same number, of which the compiler is told that it is a multiple of STEP.

    Of multiples of 16 Triton tells it. Of heads of 72 or 120 numbers it knows nothing else, reads
    them two bytes at a time, and waits for each tile where it would have asked for it ahead.
    """
    if STEP > 1 and STEP < 16:
        return stride // STEP * STEP
    return stride


def step_of(*strides: int) -> int:
    """The largest power of two up to 16 by which all of these can be divided."""
    return math.gcd(16, *strides)
