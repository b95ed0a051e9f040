"""Aliases: a donated leaf may share its storage with no other leaf."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fngraph.errors import AliasError
from fngraph.fx.leaves import Leaf, Role


def check_aliases(leaves: Sequence[Leaf], tensors: Sequence[torch.Tensor]) -> None:
    """Raise if a donated leaf shares its storage with any other leaf.

    Raises:
        AliasError: naming both paths.
    """
    owner: dict[int, Leaf] = {}
    for leaf, tensor in zip(leaves, tensors):
        address = tensor.untyped_storage().data_ptr()
        if address == 0:  # no memory: empty, or on the meta device
            continue
        first = owner.setdefault(address, leaf)
        donated = [x.path for x in (leaf, first) if x.role is Role.DONATED]
        if first is not leaf and donated:
            raise AliasError(
                f"{first.path} and {leaf.path} share one storage, and {donated[0]} is donated, so "
                "an update of it would change the other. Give each its own memory: x.clone()"
            )
