"""What a call looks up instead of working it out: by the batch's counts, and from the last call."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from fngraph.core import BatchSpec, Dispatch, Mode, dispatch
from fngraph.graphs.replay import BoundCalls, Replay
from fngraph.graphs.staging.buffers import true_sizes
from fngraph.graphs.staging.unpack import words_of
from fngraph.step.ambient import fixed_ambient

if TYPE_CHECKING:
    from fngraph.step.captured import Captured
    from fngraph.step.host_batch import HostBatch, SlotBatch

MOST_PREPARED = 4096  # counts that are kept


@dataclasses.dataclass(slots=True)
class Prepared:
    """What a batch's counts decide.

    Attributes:
        replay: of the key, once it is captured.
        counted_as: where its steps are counted.
        calls: the replay's, bound to the true rows.
        ignores_grad_mode: whether no part of a step depends on it, nor on inference mode: one
            graph, borrowed.
        true: sizes of the batch.
        kinds: of its leaves, as `kinds_of` reads them.
        words: of its slot in the ring; addresses are filled in.
        views: the outputs, cut to the true sizes.
        slots: batches over those of the ring, as `host_batch` hands them out.
    """

    chosen: Dispatch
    true: dict[str, int]
    kinds: list[tuple[Any, ...]]
    words: list[int]
    views: list[torch.Tensor]
    counted_as: tuple[int, int, Mode]
    replay: Replay | None = None
    calls: BoundCalls = ()
    ignores_grad_mode: bool = False
    slots: dict[int, SlotBatch] = dataclasses.field(default_factory=dict)


kinds_of = operator.attrgetter("shape", "dtype", "layout", "is_meta")


def prepare(step: Captured, spec: BatchSpec) -> Prepared:
    """All that the counts of a batch decide, kept for the next one that has the same."""
    step.book.check_awake()  # nothing is found prepared while it sleeps
    step.limits.check(spec)
    chosen = dispatch(step.table, spec)
    true = true_sizes(spec, step.limits.dims)
    buffer_plan = step.static.buffer_plan
    words = words_of(buffer_plan, true, chosen.descriptor.query_len or 0)
    kinds = [
        (planned.buffer.shape(true), getattr(torch, planned.buffer.dtype), torch.strided, False)
        for planned in buffer_plan.buffers
    ]
    with fixed_ambient(step):
        views = [] if chosen.mode is Mode.NONE else step.cut(step.outputs, true)
    counted_as = (true["T"], chosen.descriptor.num_tokens, chosen.mode)
    prepared = Prepared(chosen, true, kinds, words, views, counted_as)
    if len(step.prepared) >= MOST_PREPARED:
        step.prepared.clear()
    step.prepared[spec[:7]] = prepared
    return prepared


@dataclasses.dataclass(slots=True)
class LastCall:
    """What the last call found, for the next one; and the batch that is being filled for it.

    Attributes:
        read_ambient: reads the ambient state; see `plain_state`.
        ambient: as it was then; None if that was not plain, so that all is looked at.
        step: the one that served it.
        in_fixed_ambient: whether the caller's state is the one that steps run under.
        host_batch: what `host_batch` has handed out since, if anything.
    """

    read_ambient: Callable[[], tuple[Any, ...]]
    ambient: tuple[Any, ...] | None = None
    step: Any = None
    in_fixed_ambient: bool = False
    host_batch: HostBatch | None = None


def forget(step: Captured) -> None:
    """After replays have gone or changed: the next calls look them up again."""
    step.prepared.clear()
    if step.last_call.host_batch is not None:
        step.last_call.host_batch = step.last_call.host_batch._replace(prepared=None)
