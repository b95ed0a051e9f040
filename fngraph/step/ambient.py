"""Ambient state: which step serves a call, and the one state that all steps run under.

A call under other autocast, default dtype, ... than the trace's may need another trace. That one's
step is a sibling of the first: over the same leaves, in the same pool.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from fngraph.errors import AmbientError
from fngraph.fx.ambient import Ambient, check_no_dispatch_mode, check_no_transform, is_plain, read

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def meet(step: Captured, ambient: tuple[Any, ...]) -> None:
    """Another ambient state than the last call's: find the step that serves it."""
    check_no_transform()
    last = step.last_call
    last.step = step.under_ambient()
    last.in_fixed_ambient = _is_in_fixed_ambient(last.step)
    last.ambient = ambient if is_plain(ambient) else None


def under_ambient(step: Captured) -> Captured:
    """The step for the ambient state of now: traced and captured again, where that matters.

    Raises:
        AmbientError: it does matter, and `on_ambient="error"` was asked for.
    """
    check_no_dispatch_mode()
    ambient = read(step.recorder.device.type)
    if ambient not in step.siblings:
        step.siblings[ambient] = _sibling(step, ambient)
    return step.siblings[ambient]


def _sibling(step: Captured, ambient: Ambient) -> Captured:
    """The step for another ambient state: itself, or traced again where that matters.

    Raises:
        AmbientError: it does matter, and `on_ambient="error"` was asked for.
    """
    from fngraph.step.allocate import anew

    step.book.check_awake()
    lowered = step.compiled.lowered
    traced = lowered.split.traced
    again = traced if traced.serves(ambient) else traced.again()
    if again is traced:
        return step
    if traced.options.on_ambient == "error":
        raise AmbientError(
            f"ambient state is not the trace's: {traced.ambient.changes(ambient)}, and forward "
            "computes something else under it. Call under the same state, or "
            'fg.graphify(..., on_ambient="recapture")'
        )
    compiled = again.split().lower(lowered.limits).compile()
    return dataclasses.replace(anew(step, compiled), stats=step.stats, siblings=step.siblings)


def family(step: Captured) -> list[Captured]:
    """The step, and those for other ambient states."""
    return list({id(one): one for one in (step, *step.siblings.values())}.values())


def _is_in_fixed_ambient(step: Captured) -> bool:
    """Whether the caller's own state is the one that steps run under."""
    return not (
        torch.is_grad_enabled()
        or torch.is_inference_mode_enabled() is not step.binding.inference
        or torch.is_autocast_enabled(step.recorder.device.type)
    )


@contextlib.contextmanager
def fixed_ambient(step: Captured) -> Iterator[None]:
    """The caller's autocast, gradients and device change nothing: the trace has decided."""
    device = step.recorder.device.type
    current = (
        torch.cuda.device(step.recorder.device) if device == "cuda" else contextlib.nullcontext()
    )
    with current, torch.inference_mode(step.binding.inference), torch.no_grad():
        if not torch.is_autocast_enabled(device):
            yield
            return
        with torch.autocast(device, enabled=False):
            yield
