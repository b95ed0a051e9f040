"""Host-side plans of backends: made before a capture, and before each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fngraph.core import BatchDescriptor, Dispatch, Mode
from fngraph.graphs.staging import Sizes

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def plan_padding(
    step: Captured, mode: Mode, key: BatchDescriptor, sizes: Sizes, views: Sequence[torch.Tensor]
) -> None:
    """Plan a batch of nothing but padding, which is staged in `views`."""
    if step.compiled.planners:
        leaves = [view.cpu() for view in views]
        for planner in step.compiled.planners:
            planner.fill(key if mode is Mode.FULL else None, sizes, leaves)


def plan_step(
    step: Captured, chosen: Dispatch, true: Sizes, leaves: Sequence[torch.Tensor]
) -> None:
    """Plan a batch: at its key's sizes where the key is one graph, else at its own."""
    from fngraph.step.keys import _sizes

    full = chosen.mode is Mode.FULL
    sizes = _sizes(step, chosen.descriptor) if full else true
    for planner in step.compiled.planners:
        planner.fill(chosen.descriptor if full else None, sizes, leaves)
