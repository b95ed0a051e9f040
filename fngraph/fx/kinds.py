"""Kinds of tensors: a graph reads and writes dense memory by address, and nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C import _disabled_torch_dispatch_impl, _disabled_torch_function_impl
from torch._subclasses.fake_tensor import FakeTensor

from fngraph.errors import AliasError, TreeError


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
    functions = (plain.__func__, _disabled_torch_function_impl)
    function = getattr(cls.__torch_function__, "__func__", cls.__torch_function__)
    dispatch = getattr(cls, "__torch_dispatch__", _disabled_torch_dispatch_impl)
    if getattr(cls, "is_plain_memory", False):  # a borrowed result
        return None
    if function in functions and dispatch is _disabled_torch_dispatch_impl:
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
    if donated and overlaps(tensor):
        raise AliasError(
            f"{path} is donated, but its elements share memory (strides {tensor.stride()} of "
            f"shape {tuple(tensor.shape)}, from expand or as_strided), so it cannot be written "
            "element by element. Give each element its own: x.contiguous()"
        )


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether some stride is within the reach of the smaller ones."""
    reach = 1
    dims = [(s, n) for s, n in zip(tensor.stride(), tensor.shape) if n > 1]
    for stride, size in sorted(dims) if tensor.numel() else ():
        if stride < reach:
            return True
        reach += stride * (size - 1)
    return False
