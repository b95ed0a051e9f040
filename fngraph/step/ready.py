"""What a call looks up instead of working it out: once a function, and once a batch's counts."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fngraph.core import BatchSpec, Dispatch, Mode, buffers_of, dispatch, host_field
from fngraph.core.trees import is_frozen
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role
from fngraph.graphs.capture import BoundCalls, Replay
from fngraph.graphs.staging import true_sizes
from fngraph.graphs.unpack import words_of
from fngraph.step.ambient import fixed_ambient
from fngraph.step.binding import Binding, flatten_as

if TYPE_CHECKING:
    from fngraph.step.captured import Captured
    from fngraph.step.host_batch import Handed, Room

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
    """

    count: int
    donated: tuple[tuple[int, int, Any], ...]
    staged_at: int
    spec_field: str | None
    leaves: Callable[[Any], Sequence[torch.Tensor]]


def make_entry(args: Arguments, binding: Binding) -> Entry:
    """The entry of a bound function."""
    sig = args.signature
    positions = sig.positions(*CALLED)
    (staged,) = sig.positions(Role.STAGED)
    fixed = {i: x if is_frozen(x) else _NEVER for i, x in binding.containers.items()}
    donated = tuple((at, i, fixed[i]) for at, i in enumerate(positions) if i != staged)
    return Entry(
        len(positions), donated, positions.index(staged),
        None if args.batch_type is None else host_field(args.batch_type),
        _reader(args, staged),
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
        row: where its steps are counted.
        calls: the replay's, bound to the true rows.
        free: whether no part of a step depends on grad or inference mode: one graph, borrowed.
        true: sizes of the batch.
        kinds: of its leaves, as `kinds_of` reads them.
        words: of its slot in the ring; addresses are filled in.
        views: the outputs, cut to the true sizes.
        rooms: batches over the ring's slots, as `host_batch` hands them out.
    """

    chosen: Dispatch
    true: dict[str, int]
    kinds: list[tuple[Any, ...]]
    words: list[int]
    views: list[torch.Tensor]
    row: tuple[int, int, Mode]
    replay: Replay | None = None
    calls: BoundCalls = ()
    free: bool = False
    rooms: dict[int, Room] = dataclasses.field(default_factory=dict)


kinds_of = operator.attrgetter("shape", "dtype", "layout", "is_meta")


def prepare(step: Captured, spec: BatchSpec) -> Ready:
    """All that the counts of a batch decide, kept for the next one that has the same."""
    step.book.check_awake()  # no call is found ready while it sleeps
    step.limits.check(spec)
    chosen = dispatch(step.table, spec)
    true = true_sizes(spec, step.limits.dims)
    plan = step.static.plan
    words = words_of(plan, true, chosen.descriptor.query_len or 0)
    kinds = [
        (planned.buffer.shape(true), getattr(torch, planned.buffer.dtype), torch.strided, False)
        for planned in plan.buffers
    ]
    with fixed_ambient(step):
        views = [] if chosen.mode is Mode.NONE else step.cut(step.outputs, true)
    row = (true["T"], chosen.descriptor.num_tokens, chosen.mode)
    ready = Ready(chosen, true, kinds, words, views, row)
    if len(step.ready) >= MOST_READY:
        step.ready.clear()
    step.ready[spec[:7]] = ready
    return ready


@dataclasses.dataclass(slots=True)
class Hot:
    """What the next call will need again.

    Attributes:
        look: reads the ambient state; see `plain_state`.
        state: as it was at the last call; None if that was not plain, so that all is looked at.
        step: the one that served it.
        settled: whether the caller's state is the one that steps run under.
        handed: the batch that the caller is filling, if any; it lies in one slot's room.
    """

    look: Callable[[], tuple[Any, ...]]
    state: tuple[Any, ...] | None = None
    step: Any = None
    settled: bool = False
    handed: Handed | None = None


def forget(step: Captured) -> None:
    """After replays have gone or changed: the next calls look them up again."""
    step.ready.clear()
    if step.hot.handed is not None:
        step.hot.handed = step.hot.handed._replace(ready=None)
