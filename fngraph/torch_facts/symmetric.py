"""Torch's private names of memory that processes read of each other, and what is made of them.

Read in torch 2.11 and 2.13. `torch.distributed._symmetric_memory` may change, as it says of itself.
"""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fngraph.torch_facts.names import is_capturing

ON_ONE_DEVICE = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"
"""An environment variable of torch's: "1" lets several processes share a device, for tests."""
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"


@contextlib.contextmanager
def _without_multicast() -> Iterator[None]:
    """A context in which torch makes no multicast objects over NVLink for such memory: nothing here
    reads by them."""
    before = os.environ.get(_NO_MULTICAST)
    os.environ[_NO_MULTICAST] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_NO_MULTICAST]
        else:
            os.environ[_NO_MULTICAST] = before


def share(group: str, size: int, device: torch.device) -> tuple[Tensor, list[int], Any]:
    """A block of zeros, where each process of a group has its own, as this one reads them, and what
    keeps all of them alive. All of the group call it at once.

    Raises:
        RuntimeError: they cannot, as torch says.
    """
    symmetric = _symmetric()
    with _without_multicast():
        own = symmetric.empty(size, dtype=torch.uint8, device=device)
        own.zero_()
        torch.cuda.synchronize(device)  # before a peer may write
        handle = symmetric.rendezvous(own, group)
    # addresses are of allocations; a tensor may lie further on in one, in all of them alike
    further = own.data_ptr() - handle.buffer_ptrs[handle.rank]
    return own, [at + further for at in handle.buffer_ptrs], handle


def matmul_all_to_all(x: Tensor, w: Tensor, size: int, group: str, kept: list[Any]) -> Tensor:
    """What every process's product has for this one: (n, k, N), in the order of ranks. Of n
    processes the r-th gets the r-th block of k of the rows of each (n * k, K) @ (K, N).

    Args:
        size: n.
        kept: while a graph is captured, the memory that it goes through is added.
    """
    blocks = x.chunk(size)
    made = x.new_empty(len(x), w.shape[1])

    def multiply(rank: int, out: Tensor) -> None:
        torch.ops.aten.mm.out(blocks[rank], w, out=out)

    with _through_workspace(group, kept) as symmetric:
        symmetric._pipelined_produce_and_all2all(multiply, made, group)
    return made.unflatten(0, (size, -1))


def all_gather_matmul(
    x: Tensor, weights: Sequence[Tensor], group: str, kept: list[Any]
) -> Sequence[Tensor]:
    """Every process's rows, one behind the other, times each weight.

    Args:
        kept: while a graph is captured, the memory that it goes through is added.
    """
    with _through_workspace(group, kept):  # what needs multicast is where A is not asked for
        made: Sequence[Tensor] = torch.ops.symm_mem.fused_all_gather_matmul(
            x, list(weights), 0, group, return_A=True
        )[1]
    return made


@contextlib.contextmanager
def _through_workspace(group: str, kept: list[Any]) -> Iterator[Any]:
    """Torch's module. It goes through memory that it has for a group, and lets go of where a later
    call wants more; a graph has its address. So what is captured through is added to `kept`."""
    symmetric = _symmetric()
    with _without_multicast():
        yield symmetric
    now = symmetric._group_name_to_workspace_tensor.get(group)
    if is_capturing() and now is not None and all(now is not one for one in kept):
        kept.append(now)


def forget_workspace(group: str) -> None:
    """Have torch make that memory anew: what it has is of another group that had the name."""
    _symmetric()._group_name_to_workspace_tensor.pop(group, None)


def _symmetric() -> Any:
    return importlib.import_module("torch.distributed._symmetric_memory")  # which defines the ops
