"""The keys of a step: captured ahead of time or when first dispatched to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from fngraph.core import BatchDescriptor, HostBounds, KeyBounds, Mode, key_sizes
from fngraph.errors import CaptureError
from fngraph.fx.generators import preserved
from fngraph.graphs.capture import Replay, capture, warm_up
from fngraph.graphs.inside import key_name
from fngraph.graphs.ranges import named_range
from fngraph.graphs.recorder import current, describe
from fngraph.graphs.staging import kept
from fngraph.graphs.unpack import unpacker
from fngraph.step.plans import plan_padding

if TYPE_CHECKING:
    from fngraph.step.captured import Captured


def capture_all(step: Captured, progress: bool = False) -> None:
    """Capture every key of the table that is not yet, largest first.

    Raises:
        CaptureError: what was captured before stays.
    """
    keys: Iterable[Any] = [key for key in step.table if key not in step.replays]
    if progress:
        from fngraph.report.progress import track

        keys = track(list(keys), f"capturing on {step.recorder.name}")
    for mode, descriptor in keys:
        capture_key(step, mode, descriptor)


def capture_key(step: Captured, mode: Mode, descriptor: BatchDescriptor) -> Replay:
    """Capture one key on an all-padding batch, whose writes go to null slots.

    Raises:
        CaptureError: naming the key; pool and donated state are as they were.
    """
    sizes = _sizes(step, descriptor)
    host = KeyBounds(descriptor) if mode is Mode.FULL else HostBounds(descriptor.num_tokens)
    program, fns = step.compiled.lowered.split.program, step.compiled.fns
    views = step.static.views(sizes)
    inputs = step.binding.inputs(views, step.constants)
    generators = step.compiled.lowered.split.traced.options.generators
    watched = all(m is not mode for m, _ in step.replays)  # the first key of its mode
    named = named_range(f"capture {key_name(mode, descriptor)}")
    with (
        current(step.recorder.device), step.fixed_ambient(), named, preserved(generators),
        kept(views),  # the next batch may be there already
    ):  # fmt: skip
        try:
            first = step.guard(unpacker(step.static, step.ring, sizes), sizes)
            step.ring.put_padding(step.static.plan, descriptor.query_len or 0)
            try:
                first()
            except BaseException:  # or the next step would read another slot than its own
                step.ring.resume()
                raise
            plan_padding(step, mode, descriptor, sizes, views)
            warm_up(step.recorder, program, fns, inputs, _written(step), sizes, host)
            replay = capture(
                step.recorder, program, fns, step.compiled.rows, inputs, mode, descriptor,
                sizes, host, tuple(step.cut(step.outputs, sizes)), first, generators, watched,
            )  # fmt: skip
        except Exception as error:  # whatever a backend or an op raises
            raise CaptureError(f"{mode} {descriptor}: {describe(error)}") from error
    step.replays[mode, descriptor] = replay
    return replay


def _written(step: Captured) -> list[torch.Tensor]:
    """Donated leaves that are written other than by primitives, whose slots are null."""
    rows = {row.path: row for row in step.compiled.lowered.split.traced.donation.rows}
    named = zip(step.binding.paths, step.binding.leaves)
    return [x for path, x in named if path in rows and not rows[path].null_slots]


def _sizes(step: Captured, key: BatchDescriptor) -> dict[str, int]:
    limits = step.limits
    return key_sizes(key.num_tokens, key.num_reqs, limits.max_reqs, limits.dims)
