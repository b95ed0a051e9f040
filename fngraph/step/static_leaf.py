"""A batch leaf's own static buffer, for whoever can write it where graphs read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fngraph.core import BatchDescriptor, Mode, key_sizes
from fngraph.errors import SpecError, TreeError

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def static_leaf(step: Captured, descriptor: BatchDescriptor, leaf: str) -> torch.Tensor:
    """See `Captured.static_buffer`."""
    step.book.check_awake()
    if not any((mode, descriptor) in step.table for mode in (Mode.FULL, Mode.PIECEWISE)):
        raise SpecError(
            f"{descriptor!r} is no key of this step. Ask for the one that a batch runs as: "
            "step.dispatch(spec).descriptor"
        )
    name = step.compiled.args.batch_name
    paths = [planned.path for planned in step.static.plan.buffers]
    path = leaf if leaf in paths else f"{name}.{leaf}"
    if path not in paths:
        raise TreeError(f"{leaf!r} is no leaf of {name}; there are {', '.join(paths)}")
    limits = step.limits
    sizes = key_sizes(descriptor.num_tokens, descriptor.num_reqs, limits.max_reqs, limits.dims)
    return step.static.views(sizes)[paths.index(path)]
