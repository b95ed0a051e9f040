"""The graph's own first node: it takes a batch out of a ring slot, pads it, and moves the ring on.

    slot (pinned host memory, int64 words):  tokens, stride, then address and bytes of each leaf

A leaf's address may be in the slot's own memory or on the device; a kernel reads either. So one
captured node stages every kind of batch, and a step costs the host one short write into a slot.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Sequence

import torch

from fngraph.core import BufferPlan, PlannedBuffer
from fngraph.core.buffers import ITEMSIZE, RAMPS, STRIDE
from fngraph.graphs.staging.buffers import Sizes, StaticBuffers, allocate
from fngraph.graphs.staging.ring import HEADER, Ring, make_ring

LIBRARY = torch.library.Library("fngraph", "FRAGMENT")
LIBRARY.define(
    "unpack(Tensor table, Tensor ring, Tensor(a!) state, Tensor(b!)[] buffers, int nbytes) -> ()"
)


def unpacker(static: StaticBuffers, ring: Ring, key: Sizes) -> Callable[[], None]:
    """The node of one key; what it reads and writes is fixed here."""
    rows = []
    for planned, tensor in zip(static.buffer_plan.buffers, static.tensors):
        nbytes = bytes_of(planned, key)
        ramp = RAMPS.get(planned.buffer.pad, 0)
        pad = 0 if ramp else _word(planned.buffer.pad, tensor.dtype)
        rows.append([tensor.data_ptr(), nbytes, pad, tensor.itemsize, ramp])
    table = torch.tensor(rows, dtype=torch.int64, device="cpu").to(ring.state.device)
    largest = max((row[1] for row in rows), default=0)
    args = (table, ring.words, ring.state, list(static.tensors), largest)
    return functools.partial(torch.ops.fngraph.unpack.default, *args)


def padded(
    plan: BufferPlan, leaves: Sequence[torch.Tensor], true: Sizes, stride: int, device: torch.device
) -> list[torch.Tensor]:
    """A batch's leaves at the plan's sizes, in memory of their own: the node runs once."""
    static, ring = allocate(plan, device), make_ring(plan, device)
    ring.put(words_of(plan, true, stride), leaves)
    unpacker(static, ring, plan.sizes)()
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the ring goes
    return list(static.tensors)


def words_of(buffer_plan: BufferPlan, true: Sizes, stride: int) -> list[int]:
    """The words of a batch of sizes `true`; `Ring.put` fills in the addresses, which are 0 here."""
    words = [true["T"], stride]
    for planned in buffer_plan.buffers:
        words += [0, bytes_of(planned, true)]
    return words


def bytes_of(planned: PlannedBuffer, sizes: Sizes) -> int:
    """Bytes of a leaf at these sizes."""
    return math.prod(planned.buffer.shape(sizes)) * ITEMSIZE[planned.buffer.dtype]


def _word(pad: object, dtype: torch.dtype) -> int:
    """The pad's bytes, again and again, as an int64."""
    data = bytes(torch.tensor([pad], dtype=dtype, device="cpu").view(torch.uint8).tolist())
    return int.from_bytes((data * 8)[:8], "little", signed=True)


def _on_cpu(
    table: torch.Tensor, ring: torch.Tensor, state: torch.Tensor, buffers: object, nbytes: int
) -> None:
    step = int(state[0])
    words = ring[step % len(ring)].tolist()
    tokens, stride = words[:HEADER]
    for i, (address, size, pad, item, ramp) in enumerate(table.tolist()):
        source, true = words[HEADER + 2 * i : HEADER + 2 * i + 2]
        ctypes.memmove(address, source, true)
        count = (size - true) // item
        if ramp == RAMPS[STRIDE]:
            values = [tokens + stride * (k + 1) for k in range(count)]
            padding = b"".join(v.to_bytes(item, "little", signed=True) for v in values)
        elif ramp:
            last = ctypes.string_at(source + true - item, item) if true else bytes(item)
            padding = last * count
        else:
            padding = (pad & ((1 << 8 * item) - 1)).to_bytes(item, "little") * count
        ctypes.memmove(address + true, padding, len(padding))
    state[0] = step + 1
    ctypes.c_int64.from_address(int(state[2])).value = step + 1


def _on_cuda(
    table: torch.Tensor, ring: torch.Tensor, state: torch.Tensor, buffers: object, nbytes: int
) -> None:
    from fngraph.graphs.staging.unpack_triton import launch

    launch(table, ring, state, nbytes)


LIBRARY.impl("unpack", _on_cpu, "CPU")
LIBRARY.impl("unpack", _on_cuda, "CUDA")
