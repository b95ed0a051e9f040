"""What a call looks up instead of working it out: once a function, and once a batch's counts."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fngraph.core import BufferPlan, Dispatch, Mode, buffers_of, host_field
from fngraph.core.trees import is_frozen
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role
from fngraph.graphs.capture import Replay
from fngraph.graphs.unpack import words_of
from fngraph.step.binding import Binding, flatten_as

CALLED = (Role.DONATED, Role.STAGED)  # what a step takes
MOST_READY = 4096  # counts that are kept


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """How a call's arguments are read.

    Attributes:
        count: of the arguments.
        donated: for each donated one its place in the call, its parameter, and the container that
            may be taken without a look at its leaves, since it cannot change; else a stand-in.
        leaves: from a batch to its leaves.
        spec_field: the batch's field with its spec; None for a batch of exact shapes.
        kinds: of the leaves: dtype, layout, and whether they have no memory.
    """

    count: int
    donated: tuple[tuple[int, int, Any], ...]
    staged_at: int
    spec_field: str | None
    leaves: Callable[[Any], Sequence[torch.Tensor]]
    kinds: list[tuple[torch.dtype, torch.layout, bool]]


def make_entry(args: Arguments, binding: Binding, plan: BufferPlan) -> Entry:
    """The entry of a bound function."""
    sig = args.signature
    positions = sig.positions(*CALLED)
    (staged,) = sig.positions(Role.STAGED)
    fixed = {i: x if is_frozen(x) else _NEVER for i, x in binding.containers.items()}
    donated = tuple((at, i, fixed[i]) for at, i in enumerate(positions) if i != staged)
    dtypes = [getattr(torch, b.buffer.dtype) for b in plan.buffers]
    return Entry(
        len(positions), donated, positions.index(staged),
        None if args.batch_type is None else host_field(args.batch_type),
        _reader(args, staged), [(dtype, torch.strided, False) for dtype in dtypes],
    )  # fmt: skip


_NEVER = object()


def _reader(args: Arguments, position: int) -> Callable[[Any], Sequence[torch.Tensor]]:
    """A flat struct's leaves are its fields; any other batch is flattened."""
    cls = args.batch_type
    names = list(buffers_of(cls)) if cls is not None else []
    roles = getattr(cls, "__fngraph_roles__", {})
    flat = len(names) == len(roles) - 1 and len(names) > 1  # all but the spec
    get = operator.attrgetter(*names) if flat else None

    def leaves(batch: Any) -> Sequence[torch.Tensor]:
        if get is not None and type(batch) is cls:
            found = get(batch)
            if not any(x is None for x in found):
                return found  # type: ignore[no-any-return]
        return flatten_as(args, position, batch)

    return leaves


@dataclasses.dataclass(slots=True)
class Ready:
    """What a batch's counts decide.

    Attributes:
        replay: of the key, once it is captured.
        true: sizes of the batch.
        shapes: of its leaves.
        words: of its slot in the ring; addresses are filled in.
        views: the outputs, cut to the true sizes.
        slots: batches over the ring's slots, as `host_batch` hands them out.
    """

    chosen: Dispatch
    true: dict[str, int]
    shapes: list[tuple[int, ...]]
    words: list[int]
    views: list[torch.Tensor]
    replay: Replay | None = None
    slots: dict[int, Any] = dataclasses.field(default_factory=dict)


def make_ready(
    plan: BufferPlan,
    chosen: Dispatch,
    true: dict[str, int],
    outputs: Sequence[torch.Tensor],
    cut: Callable[[Sequence[torch.Tensor], dict[str, int]], list[torch.Tensor]],
) -> Ready:
    """For a batch of sizes `true` that runs as `chosen`."""
    words = words_of(plan, true, chosen.descriptor.query_len or 0)
    shapes = [planned.buffer.shape(true) for planned in plan.buffers]
    views = [] if chosen.mode is Mode.NONE else cut(outputs, true)
    return Ready(chosen, true, shapes, words, views)
