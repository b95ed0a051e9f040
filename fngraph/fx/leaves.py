"""Leaves: the path, role and abstract value of each, and which tensors can stand for one.

A trace never holds a real tensor. A graph reads and writes dense memory by address, and nothing
else: other kinds are refused, and a donated leaf that shares memory with another one.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fngraph.core import Buffer
from fngraph.errors import AliasError, FieldError, TreeError
from fngraph.torch_facts.memory import overlaps_itself, storage_bytes, storage_key, with_bits
from fngraph.torch_facts.names import no_torch_dispatch, no_torch_function
from fngraph.torch_facts.tracing import FakeTensor


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
        spec: what a held or donated leaf is; None for a staged one.
        buffer: what a staged leaf is declared to be; None for the others.
        padded: whether padding holds what `buffer` says; else it may hold anything, and in
            integers what some true row holds.
        lies: of a leaf that shares a storage with others, which storage, counted from 0, and where
            its first byte is there; None: it does not, or it was traced without memory.
    """

    path: str
    role: Role
    device: torch.device
    spec: TensorSpec | None = None
    buffer: Buffer | None = None
    padded: bool = True
    lies: tuple[int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of a held or donated leaf; 0 for a staged one."""
        return 0 if self.spec is None else math.prod(self.spec.shape) * self.spec.dtype.itemsize

    def fake(self, sizes: Mapping[str, Any]) -> torch.Tensor:
        """An example of this leaf under the current (fake) mode; `sizes` may be symbolic."""
        if self.buffer is not None:
            try:
                shape = self.buffer.shape(sizes)
            except FieldError as error:
                raise FieldError(f"{self.path}: {error}") from None
            return torch.empty(shape, dtype=getattr(torch, self.buffer.dtype), device=self.device)
        assert self.spec is not None
        made = torch.empty_strided(
            self.spec.shape, self.spec.stride, dtype=self.spec.dtype, device=self.device
        )
        return with_bits(made, *self.spec.bits)

    def __repr__(self) -> str:
        return f"{self.path}: {self.role.value} {self.buffer or self.spec}"


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


def check_kind(path: str, tensor: torch.Tensor) -> None:
    """Raise unless `tensor` is plain, strided memory.

    Raises:
        TreeError: with what to pass instead.
    """
    what = _oddity(tensor)
    if what is not None:
        raise TreeError(f"{path} is {what}")


def _oddity(x: torch.Tensor) -> str | None:
    if nn.parameter.is_lazy(x):
        return "a parameter without a shape yet. Run its module once on an example: module(x)"
    if isinstance(x, FakeTensor):
        return "a FakeTensor, which has no memory. To trace without memory, pass fg.like(tree)"
    if x.is_nested:
        return "a nested tensor, of rows of several lengths. Pass its x.values() and x.offsets()"
    if x.is_quantized:
        return "quantized. Pass its integers, x.int_repr(), with scale and zero point as tensors"
    if x.layout is torch.strided:
        return _subclass(type(x))
    name = str(x.layout).removeprefix("torch.").removeprefix("_")
    parts = "its indices and values" if x.layout is torch.sparse_coo else "its parts"
    return f"{name}, not dense: a graph reads dense memory. Pass x.to_dense(), or {parts}"


def _subclass(cls: Any) -> str | None:
    """Subclasses that change what an op means; Parameter, Buffer and plain ones do not."""
    plain: Any = torch.Tensor.__torch_function__
    functions = (plain.__func__, no_torch_function)
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    dispatch = getattr(cls, "__torch_dispatch__", no_torch_dispatch)
    if getattr(cls, "is_plain_memory", False):  # a borrowed result
        return None
    if function in functions and dispatch is no_torch_dispatch:
        return None
    return (
        f"a {cls.__name__}, a tensor subclass with ops of its own, of which a graph would see the "
        "plain memory at best. Pass the plain tensors that it is made of"
    )


def check_memory(path: str, tensor: torch.Tensor, donated: bool) -> None:
    """Raise unless a graph can go on reading `tensor` where it is; and writing it, if donated.

    Raises:
        TreeError: it has no memory. AliasError: donated, and two of its elements share some.
    """
    check_kind(path, tensor)
    if tensor.is_meta:
        raise TreeError(
            f"{path} is on the meta device, where tensors have no memory. Trace with it if you "
            'like, but bind real tensors: module.to_empty(device="cpu"), torch.empty_like(x, '
            'device="cpu")'
        )
    if donated and overlaps_itself(tensor):
        raise AliasError(
            f"{path} is donated, but its elements share memory (strides {tensor.stride()} of "
            f"shape {tuple(tensor.shape)}, from expand or as_strided), so it cannot be written "
            "element by element. Give each element its own: x.contiguous()"
        )


def neighbours(tensors: Sequence[torch.Tensor]) -> list[tuple[int, int] | None]:
    """`Leaf.lies` of each."""
    keys = [storage_key(x) for x in tensors]
    numbers = {key: i for i, key in enumerate(dict.fromkeys(keys))}
    shared = Counter(keys)
    return [
        (numbers[key], int(x.storage_offset()) * x.itemsize) if shared[key] > 1 else None
        for key, x in zip(keys, tensors)
    ]


def check_aliases(leaves: Sequence[Leaf], tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a donated leaf shares memory with any other leaf: a storage, or bytes of it.

    Raises:
        AliasError: naming both paths.
    """
    furthest: dict[bool, tuple[int, int]] = {}  # of all before, and of the donated: end, number
    spans = [(*storage_bytes(x), i) for i, x in enumerate(tensors)]
    for start, end, i in sorted(span for span in spans if span[0] < span[1]):
        donated = leaves[i].role is Role.DONATED
        reached, other = furthest.get(not donated, (0, i))
        if reached > start:
            first, second = sorted((i, other))
            which = leaves[i if donated else other].path
            raise AliasError(
                f"{leaves[first].path} and {leaves[second].path} share memory, and {which} is "
                "donated, so an update of it would change the other. Give each its own memory: "
                "x.clone()"
            )
        for of in (False, True) if donated else (False,):
            furthest[of] = max(furthest.get(of, (0, i)), (end, i))
