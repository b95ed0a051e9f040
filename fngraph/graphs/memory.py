"""Memory that is put aside and put back: donated leaves over a warm-up, storages over a sleep."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Sequence

import torch

from fngraph.errors import CaptureError
from fngraph.torch_facts.memory import storage_key, with_bits
from fngraph.torch_facts.names import copy_all

LOG = logging.getLogger("fngraph")
Emptied = list[tuple[torch.Tensor, int]]
ON_DEVICE = 8 << 20
"""Bytes that are put aside where they are. More goes to the host, or the state of a training step
would need its memory twice, beside what the step itself needs."""


@contextlib.contextmanager
def kept(tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """What these tensors hold comes back bit for bit, however the body ends."""
    if not tensors:
        yield
        return
    # without conjugate and negative bits, which `copy_all` refuses
    stored = [with_bits(x, x.is_conj(), x.is_neg()) for x in tensors]
    nbytes = sum(x.numel() * x.itemsize for x in stored)
    saved = [x.clone() if nbytes <= ON_DEVICE else x.to("cpu", copy=True) for x in stored]
    try:
        yield
    finally:
        with torch.no_grad():
            copy_all(stored, saved)  # one call: an interrupt falls not between


@contextlib.contextmanager
def preserved(written: Sequence[torch.Tensor]) -> Iterator[None]:
    """`kept`, of donated leaves: their bytes are announced.

    Raises:
        CaptureError: no memory for the copies. Nothing has been written then.
    """
    nbytes = sum(x.numel() * x.itemsize for x in written)
    if written:
        LOG.info("saving %d donated leaves, %d bytes, over the warm-up", len(written), nbytes)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(kept(written))
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise CaptureError(
                f"no memory for copies of {len(written)} donated leaves, {nbytes} bytes, which a "
                "warm-up writes other than through null slots. Leave more memory free, or write "
                "the leaf by a primitive whose padding writes nowhere"
            ) from error
        yield


def empty(tensors: Sequence[torch.Tensor]) -> Emptied:
    """Give the tensors' memory back; the tensors stay, for `fill_again`.

    Raises:
        CaptureError: memory that torch does not own. Nothing is given back then.
    """
    storages = {storage_key(x): x for x in tensors}
    fixed = [x for x in storages.values() if not x.untyped_storage().resizable()]
    if fixed:
        raise CaptureError(
            f"the memory of a tensor {list(fixed[0].shape)} {fixed[0].dtype} is not torch's own "
            "(mapped from a file, or NumPy's), so it cannot be given back. Clone it first"
        )
    emptied = [(x, x.untyped_storage().nbytes()) for x in storages.values()]
    for tensor, _ in emptied:
        tensor.untyped_storage().resize_(0)
    return emptied


def fill_again(emptied: Emptied) -> None:
    """Zeros for each emptied tensor, at addresses that may be others.

    Raises:
        CaptureError: too little memory. It may be called again.
    """
    for tensor, nbytes in emptied:
        storage = tensor.untyped_storage()
        if storage.nbytes() == nbytes:
            continue
        try:
            storage.resize_(nbytes)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise CaptureError(f"no memory to wake up: {nbytes} bytes are asked for") from error
        with torch.inference_mode(False):
            whole = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        whole.set_(storage, 0, (nbytes,), (1,)).zero_()
