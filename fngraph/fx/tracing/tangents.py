"""Forward-mode tangents that are zero, of a symbolic size.

What has no tangent gets a zero one that takes no memory, and torch's kernels for such tensors (in
C++) fix every size that they see. While a trace runs, these stand in for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fngraph.torch_facts.names import tree_map
from fngraph.torch_facts.tracing import DispatchKey

aten = torch.ops.aten


@contextlib.contextmanager
def symbolic_zeros() -> Iterator[None]:
    """While it lasts, ops on zero tangents keep T and R symbolic."""
    for op, kernel in _KERNELS.items():
        op.py_kernels[DispatchKey.ZeroTensor] = kernel
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op in _KERNELS:
            op.py_kernels.pop(DispatchKey.ZeroTensor, None)
            op._dispatch_cache.clear()


def _is_zero(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x._is_zerotensor()


def _full(x: Any, value: int = 0) -> Any:
    return torch.full(x.shape, value, dtype=x.dtype, device=x.device)


def _product(a: Any, b: Any) -> Any:
    return aten.mul.Tensor(_full(a), _full(b))  # what is zero stays so: 0 * inf would be NaN


def _quotient(a: Any, b: Any) -> Any:
    return aten.div.Tensor(_full(a), _full(b, 0 if _is_zero(b) else 1))


def _given_memory(op: Any) -> Any:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        return op(*tree_map(lambda x: _full(x) if _is_zero(x) else x, args), **kwargs)

    return kernel


_LINEAR = (
    "add", "sub", "neg", "mm", "bmm", "mv", "dot", "addmm", "addmv", "baddbmm", "where", "cat",
    "stack", "lerp", "masked_fill", "masked_scatter", "index_put", "index_add", "index_copy",
    "index_fill", "scatter", "scatter_add", "slice_scatter", "select_scatter", "diagonal_scatter",
    "clone", "_to_copy", "copy", "sum", "view", "_unsafe_view", "expand", "permute", "transpose",
    "t", "unsqueeze", "squeeze", "slice", "select", "index", "gather", "index_select", "embedding",
    "constant_pad_nd", "convolution", "flip", "roll", "repeat", "cumsum", "mean", "addcmul",
)  # fmt: skip
_KERNELS = {
    op: _given_memory(op)
    for name in _LINEAR
    for packet in (getattr(aten, name),)
    for op in (getattr(packet, overload) for overload in packet.overloads())
    if not op._schema.is_mutable
} | {aten.mul.Tensor: _product, aten.div.Tensor: _quotient}
