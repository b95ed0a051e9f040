"""What may come out of `forward`: tensors of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fngraph.errors import ClosureError, OutputError
from fngraph.fx.leaves import Leaf, Role, storage_key


def check_values(outputs: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise unless every output leaf is a tensor that `forward` computed.

    Raises:
        OutputError: something other than a tensor. ClosureError: a tensor from outside.
    """
    for path, value in zip(paths, outputs):
        if not isinstance(value, torch.Tensor):
            raise OutputError(
                f"forward returns {path} = {value!r}, a {type(value).__name__}, which a graph "
                "would freeze. Return tensors only; sizes are known from batch.spec outside"
            )
        if not isinstance(value, FakeTensor):
            raise ClosureError(
                f"forward returns {path}, {tuple(value.shape)} {value.dtype}, which was not passed "
                "to it. Make it an argument, and return a copy of it: x.clone()"
            )


def check_owned(
    results: Sequence[fx.Node], paths: Sequence[str], owners: Mapping[int, Leaf]
) -> None:
    """Raise if an output is memory of an argument that was not donated.

    Raises:
        OutputError: naming the argument.
    """
    for node, path in zip(results, paths):
        leaf = owners.get(storage_key(node.meta["val"]))
        if leaf is not None and leaf.role is not Role.DONATED:
            raise OutputError(
                f"forward returns {leaf.path} itself or a view of it as {path}. It is "
                f"{leaf.role.value}: its memory is rewritten under the caller's feet. Return a "
                "copy: x.clone()"
            )
