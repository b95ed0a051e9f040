"""The tape's memory pool: fixed addresses, blocks that come back when their tensors die, poison.

A block is handed out as a storage of its own over a slice of an arena. When the last tensor on it
is gone the block is free again, at once and in that order, as in a CUDA graph's private pool; so a
later recording that reuses it overwrites it at replay, here as there.
"""

from __future__ import annotations

import bisect
import ctypes
import weakref
from collections.abc import Sequence

import torch

from fngraph.torch_facts.memory import extent, with_bits

POISON = 0xFF  # NaN in every float type, -1 in signed ints, True in bool
_ALIGN = 64
_ARENA = 1 << 20


class Arena:
    """Memory of one recorder.

    Attributes:
        live: address to bytes, of the blocks that are in use.
        handed_out: (address, bytes) of every block since the list was last emptied.
    """

    def __init__(self) -> None:
        self.chunks: list[torch.Tensor] = []
        self.free: list[tuple[int, int]] = []  # (address, bytes), sorted, never adjacent
        self.live: dict[int, int] = {}
        self.handed_out: list[tuple[int, int]] = []

    @property
    def nbytes(self) -> int:
        """Bytes that the pool holds, used or free."""
        return sum(chunk.numel() for chunk in self.chunks)

    @torch.inference_mode(False)
    def empty(
        self, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype
    ) -> torch.Tensor:
        """A tensor on a block of its own; the block is freed with the last view of it."""
        if 0 in shape:
            return torch.empty_strided(shape, stride, dtype=dtype)
        size = -(-extent(shape, stride) * dtype.itemsize // _ALIGN) * _ALIGN
        address = self._take(size)
        window = memoryview((ctypes.c_uint8 * size).from_address(address))
        weakref.finalize(window, self._release, address).atexit = False
        block = torch.frombuffer(window, dtype=torch.uint8)  # its storage keeps `window`
        return torch.empty(0, dtype=dtype).set_(block.untyped_storage(), 0, shape, stride)

    @torch.inference_mode(False)
    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping its block in use. Memory that is not ours is aliased."""
        address = tensor.data_ptr()
        for chunk in self.chunks:
            offset = address - chunk.data_ptr()
            if 0 <= offset < chunk.numel() and tensor.numel():
                offset //= tensor.itemsize
                alias = torch.empty(0, dtype=tensor.dtype)
                alias.set_(chunk.untyped_storage(), offset, tensor.shape, tensor.stride())
                return with_bits(alias, tensor.is_conj(), tensor.is_neg())
        return tensor.detach()

    def _take(self, size: int) -> int:
        fits = [(free, address) for address, free in self.free if free >= size]
        if not fits:
            chunk = torch.full((max(size, _ARENA),), POISON, dtype=torch.uint8)
            self.chunks.append(chunk)
            self._give(chunk.data_ptr(), chunk.numel())
            return self._take(size)
        free, address = min(fits)
        self.free.remove((address, free))
        if free > size:
            bisect.insort(self.free, (address + size, free - size))
        self.live[address] = size
        self.handed_out.append((address, size))
        return address

    def _release(self, address: int) -> None:
        self._give(address, self.live.pop(address))

    def _give(self, address: int, size: int) -> None:
        """Put a block back, joined with its free neighbors (never across chunks)."""
        starts = {chunk.data_ptr() for chunk in self.chunks}
        i = bisect.bisect(self.free, (address, 0))
        if i < len(self.free) and address + size == self.free[i][0] not in starts:
            size += self.free.pop(i)[1]
        if i and sum(self.free[i - 1]) == address not in starts:
            address, before = self.free.pop(i - 1)
            size += before
            i -= 1
        self.free.insert(i, (address, size))

    def windows(self, ranges: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
        """Byte tensors over `ranges` (address, bytes), joined where they touch or overlap."""
        joined: list[list[int]] = []
        for start, size in sorted(ranges):
            touches = joined and start == joined[-1][1] and not self._is_start(start)
            if joined and (start < joined[-1][1] or touches):
                joined[-1][1] = max(joined[-1][1], start + size)
            else:
                joined.append([start, start + size])
        found = []
        for start, end in joined:
            (chunk,) = (c for c in self.chunks if 0 <= start - c.data_ptr() < c.numel())
            found.append(chunk[start - chunk.data_ptr() : end - chunk.data_ptr()])
        return found

    def _is_start(self, address: int) -> bool:
        return any(chunk.data_ptr() == address for chunk in self.chunks)


def subtract(
    ranges: Sequence[tuple[int, int]], holes: Sequence[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The parts of `ranges` that lie in none of `holes`, all as (address, bytes)."""
    left = [(start, start + size) for start, size in ranges]
    for hole, size in holes:
        end = hole + size
        left = [
            part
            for a, b in left
            for part in ((a, min(b, hole)), (max(a, end), b))
            if part[0] < part[1]
        ]
    return [(a, b - a) for a, b in left]
