"""Which steps are verified: one in each window of them, at a place that a hash of its number says.

A fixed stride would meet the same phase of traffic again and again (each hundredth step a prefill);
so would a seed that nobody knows not be found again. The number of the step alone decides, in
every process alike.
"""

from __future__ import annotations

_MASK = (1 << 64) - 1


def verified_in(window: int, share: float) -> int:
    """The step that is verified among those of a window, all counted: windows from 0, steps from 1.

    Of n steps floor(n * share) are, or one more, and any two of them are less than 2 / share apart.
    """
    start, stop = int(window / share), int((window + 1) / share)
    return start + 1 + _hash(window) % (stop - start)


def _hash(number: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea and Flood, 2014): each bit depends on all."""
    x = (number * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & _MASK
    x = ((x ^ x >> 30) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ x >> 27) * 0x94D049BB133111EB) & _MASK
    return x ^ x >> 31
