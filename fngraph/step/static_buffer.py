"""A batch leaf's own static buffer, for whoever can write it where graphs read it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from fngraph.core import BatchDescriptor, Mode
from fngraph.errors import SpecError, TreeError
from fngraph.step.warm import sizes_of

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def static_buffer(step: Captured, descriptor: BatchDescriptor, leaf: str) -> torch.Tensor:
    """The static buffer of a batch leaf as a key reads it: its leading rows, on the device.

    What writes there (a receive from another rank, the kernel that samples) need not be
    copied: pass the true rows of it as the leaf, of a batch that runs as that key.

        key = step.dispatch(spec).descriptor
        x = step.static_buffer(key, "hidden")[: spec.num_tokens]
        dist.recv(x, src=rank - 1)
        step(cache, Batch(hidden=x, ..., spec=spec))

    Pass its leading rows, from the first one on, and write it on the stream of the steps (or
    one that waits for it): the step before still reads it. Padding is written beyond the true
    rows. The buffers are those of the current ambient state (autocast, ...), and new ones
    after a `rebind` that captured again.

    Args:
        leaf: the field's name, or the path: "hidden" or "batch.hidden".

    Raises:
        SpecError: not a key of the table. TreeError: no such leaf. SleepError: while it sleeps.
    """
    step = step.under_ambient()
    step.book.check_awake()
    if not any((mode, descriptor) in step.table for mode in (Mode.FULL, Mode.PIECEWISE)):
        raise SpecError(
            f"{descriptor!r} is no key of this step. Ask for the one that a batch runs as: "
            "step.dispatch(spec).descriptor"
        )
    name = step.compiled.args.batch_name
    paths = [planned.path for planned in step.static.buffer_plan.buffers]
    path = leaf if leaf in paths else f"{name}.{leaf}"
    if path not in paths:
        raise TreeError(f"{leaf!r} is no leaf of {name}; there are {', '.join(paths)}")
    return step.static.views(sizes_of(step, descriptor))[paths.index(path)]
