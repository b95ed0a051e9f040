"""Memory of an axis's processes, which all of them reach: how it is laid out, and for what sizes.

Each process has one such block, and knows where all of them are. In it, per program of a kernel:
signals, one of each process, two slots for rows, and two for each peer's words, which take turns.
A program meets the programs of its number in the other processes, and nobody else, so what it
writes is read by those alone, wherever in a batch it works. It writes a slot, its own or one of
each peer, hears of theirs, and reads. It comes back to a slot two turns later: by then all have
heard of it once more, and so have read what was there. In two shots slots are as long as rows: all
meet once more at the end, as the next call may lay other slots over these.

Everything here is made once an axis, before any graph is captured, and stays where it is.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

PROGRAMS = 64
"""Of a kernel in one shot at most, and so many have room for the longest rows in two shots."""
MOST_PROGRAMS = 256
"""Of a kernel at most: so many run beside each other on an H100, two a processor. They start in
order, and none waits for one of a higher number."""
ROW_BYTES = 32 << 10
"""The longest row: 16,384 numbers in half precision."""
SIGNAL_BYTES = 8  # a number that only grows
WORDS_BYTES = 2 * ROW_BYTES
"""Of a row in words, half of each of which says in which turn it was written."""

ONE_SHOT, TWO_SHOT, APART = "one_shot", "two_shot", "apart"

LARGEST: dict[int, tuple[int, int]] = {
    2: (2 << 20, 64 << 20),
    3: (512 << 10, 4 << 20),
    4: (256 << 10, 4 << 20),
    5: (256 << 10, 4 << 20),
    6: (128 << 10, 2 << 20),
    7: (128 << 10, 2 << 20),
    8: (128 << 10, 2 << 20),
}
"""By processes: the bytes of a tensor up to which each sends all peers all it has (`ONE_SHOT`), and
up to which each sums its own rows, which the others then read (`TWO_SHOT`); beyond, the collective
and what follows are launched apart (`APART`). Of n processes one gets n - 1 tensors in one shot
and 2 (n - 1) / n in two, by more programs at once. Measured of two alone, rows of 8 and of 16 KiB,
up to 64 MiB, where two shots take 0.8 of what the collective and the norm take apart."""


@dataclasses.dataclass(frozen=True, eq=False)
class SymmetricMemory:
    """The blocks of an axis's processes, as one of them sees them.

    Attributes:
        own: this process's block, bytes; zeros at first.
        addresses: (n,) int64 on the device: where each process's block is, as this one reads it.
        turns: (MOST_PROGRAMS,) int64: how often each program has used its slots.
        rank, size: of this process along the axis, and how many there are.
        wait_s: how long a program waits for its peers before it ends the device's work.
        kept: what must live as long as the group's graphs, which have addresses of it.
    """

    own: Tensor
    addresses: Tensor
    turns: Tensor
    rank: int
    size: int
    wait_s: int
    kept: list[Any] = dataclasses.field(default_factory=list)

    def way(self, rows: int, row_bytes: int) -> str:
        """How as many rows are summed: `ONE_SHOT`, `TWO_SHOT` or `APART`."""
        return way_of(rows, row_bytes, self.size)


def way_of(rows: int, row_bytes: int, size: int) -> str:
    """How so many rows are summed over so many processes."""
    if row_bytes > ROW_BYTES or size not in LARGEST:
        return APART
    one, two = LARGEST[size]
    total = rows * row_bytes
    return ONE_SHOT if total <= one else TWO_SHOT if total <= two else APART


def place_bytes(row_bytes: int) -> int:
    """Of a row's place in a slot for two shots: each begins at a multiple of 16 bytes."""
    return -(-row_bytes // 16) * 16


def slot_bytes(row_bytes: int, size: int) -> int:
    """Of one slot for two shots: places of a row of each process and of a sum."""
    return place_bytes(row_bytes) * (size + 1)


def programs_for(row_bytes: int, size: int) -> int:
    """Of a kernel in two shots at most: the shorter rows are, the more slots there are."""
    return min(MOST_PROGRAMS, PROGRAMS * slot_bytes(ROW_BYTES, size) // slot_bytes(row_bytes, size))


def signals_bytes(size: int) -> int:
    """Of all signals, which come before the slots."""
    return MOST_PROGRAMS * size * SIGNAL_BYTES


def words_at(size: int) -> int:
    """Where words begin, behind signals and slots: (2, PROGRAMS, size - 1) times a row's."""
    return signals_bytes(size) + 2 * PROGRAMS * slot_bytes(ROW_BYTES, size)


def block_bytes(size: int) -> int:
    """Of a process's block."""
    return words_at(size) + 2 * PROGRAMS * (size - 1) * WORDS_BYTES
