"""Tiles of tokens of one request each, over a grid that fits every batch.

Tile i of a request holds its tokens i * SIZE and on. With tiles rounded up, request r's tiles begin
at `starts[r] // SIZE + r` at the earliest; a program finds its request by counting the requests
that begin no later than itself. The rows past the last request count as one more, of length 0. So
T // SIZE + R + 1 tiles serve any batch of T tokens, R requests.
"""

from __future__ import annotations

import triton
import triton.language as tl

from fngraph.ops.triton.launching import power_of_two


@triton.jit
def find(starts, tile, R, SIZE: tl.constexpr, REQS: tl.constexpr):
    """Request of a tile, R past the last one; the request's first token, and the tile's."""
    i = tl.arange(0, REQS)
    begins = tl.load(starts + i, mask=i <= R, other=0)
    r = tl.sum(((i <= R) & (begins // SIZE + i <= tile)).to(tl.int32), 0) - 1
    begin = tl.load(starts + r)
    return r, begin, begin + (tile - (begin // SIZE + r)) * SIZE


@triton.jit
def find_with_keys(starts, lens, tile, T, R, SIZE: tl.constexpr, REQS: tl.constexpr):
    """Request of a tile, the tile's first token, the end of the request's tokens, its length."""
    r, _, first = find(starts, tile, R, SIZE, REQS)
    end = T
    length = 0
    if r < R:
        end = tl.load(starts + r + 1).to(tl.int32)
        length = tl.load(lens + r).to(tl.int32)  # of 64 bits where the user's are
    return r, first, end, length


def tiles(T: int, R: int, size: int) -> int:
    """Tiles of `size` tokens that serve any batch of T tokens and R requests."""
    return T // size + R + 1


def lanes(R: int) -> int:
    """REQS of `find`: what holds the R + 1 offsets, alike for most numbers of requests."""
    return power_of_two(R + 1, at_least=256)
