"""Weights as two vectors: of matrices, which decay, and of gains and biases, which do not.

An optimizer over them is some ten kernels whatever the depth, and its gradients need no loop; a
model sees the tree that it knows, as views. Gradients come back the same way, by one concatenation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

import fngraph as fg
from fngraph.models.weights import naming

ALIGN = 64  # elements: a weight begins where kernels of any dtype read it in their widest words


@fg.struct
class Flat:
    """Of all weights, or of something that each of them has: a moment, a gradient, an average."""

    matrices: Any  # (P,): each weight of two dims or more, and nothing up to the next `ALIGN`
    vectors: Any  # (Q,): the others, likewise


def packed(named: Mapping[str, Tensor]) -> Flat:
    """Weights by name, copied into float32."""
    parts = []
    for names in _names(named):
        flat = [_padded(named[name].detach().float().flatten()) for name in names]
        parts.append(torch.cat(flat))
    return Flat(*parts)


def unpacked(blank: Any, flat: Flat, dtype: torch.dtype | None = None) -> Any:
    """The tree of `blank`, with views of `flat`.

    Args:
        blank: `Params` of meta tensors, as a family has them.
        dtype: what they are cast to, all at once; None: they are views of `flat` itself.
    """
    wanted, found = naming.named(blank), {}
    for vector, names in zip((flat.matrices, flat.vectors), _names(wanted)):
        own = vector if dtype is None else vector.to(dtype)
        parts = own.split_with_sizes([_room(wanted[name]) for name in names])
        for name, part in zip(names, parts):
            shape = wanted[name].shape
            found[name] = part[: math.prod(shape)].view(shape)
    return naming.filled(blank, found)


def _names(named: Mapping[str, Tensor]) -> tuple[list[str], list[str]]:
    """Names of matrices and of vectors."""
    matrices = [name for name, w in named.items() if w.ndim > 1]
    return matrices, [name for name in named if name not in matrices]


def _room(weight: Tensor) -> int:
    return -(-math.prod(weight.shape) // ALIGN) * ALIGN


def _padded(vector: Tensor) -> Tensor:
    return torch.nn.functional.pad(vector, (0, _room(vector) - len(vector)))
