"""Host-side plans of backends: made before a capture, and before each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from fngraph.core import BatchDescriptor, Dispatch, Mode, PlannedBuffer
from fngraph.graphs.staging.buffers import Sizes

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def plan_padding(step: Captured, mode: Mode, key: BatchDescriptor, sizes: Sizes) -> None:
    """Plan a batch of nothing but padding."""
    if step.compiled.planners:
        stride = key.query_len or 0
        leaves = [_padding(planned, sizes, stride) for planned in step.static.buffer_plan.buffers]
        for planner in step.compiled.planners:
            planner.fill(key if mode is Mode.FULL else None, sizes, leaves)


def plan_step(
    step: Captured, chosen: Dispatch, true: Sizes, leaves: Sequence[torch.Tensor]
) -> None:
    """Plan a batch: at its key's sizes where the key is one graph, else at its own."""
    key, sizes = None, true
    if chosen.mode is Mode.FULL:
        key = chosen.descriptor
        sizes = step.compiled.lowered.sizes(key)
    for planner in step.compiled.planners:
        planner.fill(key, sizes, leaves)


def _padding(planned: PlannedBuffer, sizes: Sizes, stride: int) -> torch.Tensor:
    shape, pad = planned.buffer.shape(sizes), planned.buffer.pad
    dtype = getattr(torch, planned.buffer.dtype)
    if pad == "stride":
        return torch.arange(shape[0], dtype=dtype) * stride
    return torch.full(shape, pad, dtype=dtype)  # type: ignore[arg-type]
