"""The ring: pinned host memory in which the next steps' batches wait for their graphs.

Each slot has the words that `unpack` reads and buffers for one batch's leaves. The host fills a
slot while earlier steps still run; one that the device has not yet read is waited for. Nothing is
allocated in a step.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import struct
import time
from collections.abc import Sequence

import torch

from fngraph.core import BufferPlan
from fngraph.core.buffers import RAMPS
from fngraph.errors import TreeError

SLOTS = 4
STATE = 3  # the device's own words: its count, finished programs, where the host reads the count
HEADER = 2  # words before those of the leaves: tokens of the batch, stride of padding offsets


@dataclasses.dataclass(eq=False)
class Ring:
    """Slots of one function's batches. `taken` counts the steps that were handed to the device.

    Attributes:
        words: (slots, words) int64, pinned on CUDA: what `unpack` reads.
        buffers: of each slot, shaped as the buffer plan's, pinned on CUDA.
        zero: one offset of 0, which padding begins at when there is no batch.
        state: the device's own words, see STATE; then those of a slot, as `unpack` has read them.
        told: the device's count as the device last told the host.
        older: the ring that this one replaced, held so that no other batch lies in its memory.
    """

    words: torch.Tensor
    buffers: tuple[tuple[torch.Tensor, ...], ...]
    zero: torch.Tensor
    state: torch.Tensor
    told: torch.Tensor
    taken: int = 0
    older: Ring | None = None

    def __post_init__(self) -> None:
        raw = (ctypes.c_char * (self.words.numel() * 8)).from_address(self.words.data_ptr())
        self.memory = memoryview(raw).cast("B")
        self._read = ctypes.c_int64.from_address(self.told.data_ptr())
        self._struct = struct.Struct(f"<{self.words.shape[1]}q")
        self._device = self.state.get_device()
        self._addresses = [[x.data_ptr() for x in buffers] for buffers in self.buffers]
        self._starts = {address for slot in self._addresses for address in slot if address}
        self._starts |= self.older._starts if self.older is not None else set()
        self._may_negate = [x.is_floating_point() or x.is_complex() for x in self.buffers[0]]
        self._kept: list[torch.Tensor] = []  # copies that the step in flight reads

    def wait(self) -> int:
        """The next slot, once the device has read what was last in it."""
        while self.taken - self._read.value >= SLOTS:
            time.sleep(0)
        return self.taken % SLOTS

    def leaves(self, slot: int, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor] | None:
        """A slot's buffers as leaves of these shapes; None if they do not fit."""
        buffers = self.buffers[slot]
        if any(s and s[0] > len(x) for x, s in zip(buffers, shapes)):
            return None
        return [x[: s[0]] if s else x for x, s in zip(buffers, shapes)]

    def new_leaves(self, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
        """Memory of its own for a batch that fits in no slot, pinned on CUDA too."""
        made = functools.partial(torch.zeros, device="cpu", pin_memory=self._device >= 0)
        return [made(s, dtype=x.dtype) for x, s in zip(self.buffers[0], shapes)]

    def pack(self, words: Sequence[int], leaves: Sequence[torch.Tensor]) -> bytes:
        """A slot's words for leaves in its buffers, as `memory` holds them."""
        filled = list(words)
        filled[HEADER::2] = [leaf.data_ptr() for leaf in leaves]
        return self._struct.pack(*filled)

    def place(self, slot: int) -> slice:
        """Where a slot's words are in `memory`."""
        return slice(slot * self._struct.size, (slot + 1) * self._struct.size)

    def put(self, words: Sequence[int], batch: Sequence[torch.Tensor], own: int = -1) -> None:
        """Hand a batch to the step that must follow: the device's count and ours go together.

        A leaf on the device is read where it is; one in host memory is copied into the slot, so
        that it may be refilled as soon as the call returns, unless it is the slot's own buffer.

        Args:
            words: tokens, stride, then address (to be filled in here) and bytes of each leaf.
            own: the slot in whose buffers leaves may lie, since it was handed out for this step.

        Raises:
            TreeError: a leaf in a buffer, which another step may have overwritten meanwhile.
        """
        slot = self.wait()
        filled = list(words)
        kept = []
        at = HEADER
        for buffer, may_negate, leaf in zip(self._addresses[slot], self._may_negate, batch):
            if not leaf.is_contiguous() or (may_negate and (leaf.is_conj() or leaf.is_neg())):
                leaf = leaf.resolve_conj().resolve_neg().contiguous()
                kept.append(leaf)
            address = leaf.data_ptr()
            where = leaf.get_device()
            if where != self._device or where < 0:
                if where >= 0:  # another device's
                    leaf = leaf.cpu()
                    address = leaf.data_ptr()
                self._check_own(address, own)
                if address != buffer:
                    ctypes.memmove(buffer, address, filled[at + 1])
                    address = buffer
            filled[at] = address
            at += 2
        self._kept = kept
        self._write(slot, filled)

    def takes_in_place(self, batch: Sequence[torch.Tensor]) -> bool:
        """Whether graphs read all of these leaves where they are."""
        return self._device >= 0 and all(
            x.get_device() == self._device and x.is_contiguous() and not (x.is_conj() or x.is_neg())
            for x in batch
        )

    def put_in_place(self, words: Sequence[int], batch: Sequence[torch.Tensor]) -> None:
        """`put`, of leaves that were seen to be read where they are."""
        slot = self.wait()
        filled = list(words)
        filled[HEADER::2] = [leaf.data_ptr() for leaf in batch]
        self._kept = []
        self._write(slot, filled)

    def check_own(self, batch: Sequence[torch.Tensor], own: int) -> None:
        """Raise `TreeError` if a leaf lies in a buffer of another slot than `own`."""
        for leaf in batch:
            self._check_own(leaf.data_ptr(), own)

    def _check_own(self, address: int, own: int) -> None:
        if address in self._starts and (own < 0 or address not in self._addresses[own]):
            raise TreeError(
                "this batch is from an earlier host_batch, or a copy of it; its memory may be "
                "another's by now. One is good for the next step alone, as it is: ask for it with "
                "the spec that you mean, fill it, pass it"
            )

    def put_padding(self, buffer_plan: BufferPlan, query_len: int) -> None:
        """Hand over a batch of no tokens: all of a key is padding, whose offsets begin at 0."""
        slot = self.wait()
        words = [0, query_len]
        for planned, buffer in zip(buffer_plan.buffers, self.buffers[slot]):
            ramp = planned.buffer.pad in RAMPS
            words += [self.zero.data_ptr(), buffer.itemsize if ramp else 0]
        self._write(slot, words)

    def _write(self, slot: int, words: Sequence[int]) -> None:
        self._struct.pack_into(self.memory, slot * self._struct.size, *words)
        self.taken += 1

    def resume(self) -> None:
        """After a step that failed: go on from the device's count, whether it has read or not."""
        self.taken = int(self.state[0])


@torch.inference_mode(False)
def make_ring(buffer_plan: BufferPlan, device: torch.device, older: Ring | None = None) -> Ring:
    """A new ring for batches of `buffer_plan`, which refuses those in buffers of an `older` one."""
    pinned = device.type == "cuda"
    length = HEADER + 2 * len(buffer_plan.buffers)
    made = functools.partial(torch.zeros, device="cpu", pin_memory=pinned)
    told = made(8, dtype=torch.int64)
    buffers = tuple(
        tuple(made(b.shape, dtype=getattr(torch, b.buffer.dtype)) for b in buffer_plan.buffers)
        for _ in range(SLOTS)
    )
    state = torch.tensor([0, 0, told.data_ptr(), *[0] * length], dtype=torch.int64, device="cpu")
    zero = made(1, dtype=torch.int64)
    words = made((SLOTS, length), dtype=torch.int64)
    return Ring(words, buffers, zero, state.to(device), told, older=older)
