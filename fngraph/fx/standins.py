"""Values with which a trace goes on after a refusal (`fg.check`): of the right type, no more."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map


def scalar(tensor: torch.Tensor) -> Any:
    """What `.item()` might give."""
    if tensor.dtype is torch.bool:
        return True
    return 1j if tensor.is_complex() else 1.0 if tensor.is_floating_point() else 1


def array(tensor: torch.Tensor) -> Any:
    """What `.numpy()` might give."""
    import numpy

    return numpy.full([example(n) for n in tensor.shape], scalar(tensor))


def example(size: Any) -> int:
    """A size as the number that it is in the example; 2 where it depends on values."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def fixed(result: Any) -> Any:
    """Fresh tensors in place of those whose shapes depend on values."""
    return tree_map(
        lambda x: x.new_empty([example(n) for n in x.shape]) if torch.is_tensor(x) else x, result
    )
