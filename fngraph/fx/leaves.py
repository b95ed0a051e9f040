"""Leaves as the tracer sees them: a path, a role and an abstract value; never a real tensor."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import Any

import torch

from fngraph.core import Buffer


class Role(enum.Enum):
    """What a graphified function may do with an argument, and who owns its memory."""

    HELD = "held"  # read in place, by address
    DONATED = "donated"  # updated in place and returned
    STAGED = "staged"  # copied into static buffers and padded at each step


@dataclasses.dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor without its memory: shape, dtype, strides, device and how it is read.

    `fg.like` makes them.

    Attributes:
        bits: whether it is a conjugate view, and a negative one.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    stride: tuple[int, ...]
    device: torch.device
    bits: tuple[bool, bool] = (False, False)

    @classmethod
    def of(cls, tensor: torch.Tensor | TensorSpec) -> TensorSpec:
        """The spec of a tensor; a spec is its own."""
        if isinstance(tensor, TensorSpec):
            return tensor
        bits = tensor.is_conj(), tensor.is_neg()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.stride(), tensor.device, bits)

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{dtype}[{', '.join(map(str, self.shape))}]@{self.device}"


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf of the flattened arguments.

    Attributes:
        path: how the user reaches it, e.g. `params.layers[0].wq`.
        spec: of a held or donated leaf; None for a staged one.
        buffer: of a staged leaf; None for the others.
    """

    path: str
    role: Role
    device: torch.device
    spec: TensorSpec | None = None
    buffer: Buffer | None = None

    @property
    def nbytes(self) -> int:
        """Of a held or donated leaf; 0 for a staged one."""
        return 0 if self.spec is None else math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def fake(self, sizes: Mapping[str, Any]) -> torch.Tensor:
        """An example of this leaf under the current (fake) mode; `sizes` may be symbolic."""
        if self.buffer is not None:
            shape = self.buffer.shape(sizes)
            return torch.empty(shape, dtype=getattr(torch, self.buffer.dtype), device=self.device)
        assert self.spec is not None
        made = torch.empty_strided(
            self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device=self.device
        )
        conj, neg = self.spec.bits
        made = torch._conj(made) if conj else made
        return torch._neg_view(made) if neg else made

    def __repr__(self) -> str:
        return f"{self.path}: {self.role.value} {self.buffer or self.spec}"


def storage_key(tensor: torch.Tensor) -> int:
    """Which storage a tensor lives in, the same for all its views."""
    return tensor.untyped_storage()._cdata


def place(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where a tensor is, for comparison with the same tensor later."""
    shape = tuple(map(str, (*tensor.shape, *tensor.stride(), tensor.untyped_storage().nbytes())))
    return storage_key(tensor), shape, tensor.storage_offset()


def same_place(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two fakes are the same elements of one storage, in the same order, read alike."""
    if storage_key(a) != storage_key(b) or a.storage_offset() != b.storage_offset():
        return False
    if a.is_conj() != b.is_conj() or a.is_neg() != b.is_neg():  # views that differ in a bit
        return False
    return a.shape == b.shape and same_strides(a, b)


def same_strides(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one shape are laid out alike; a dim of one has no stride."""
    return all(n == 1 or s == t for n, s, t in zip(a.shape, a.stride(), b.stride()))
