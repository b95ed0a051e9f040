"""What a call looks up instead of working it out: once a function, once for a batch's counts, and
from the call before.

An `Entry` says how arguments are read, an `Assemble` how results become `forward`'s whole output
again, a `Prepared` what the counts of a batch decide. `HostBatch` is a batch that lies where the
graph will read it.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fngraph.core import BatchSpec, Dispatch, Mode, buffers_of, host_field, trees
from fngraph.core.dispatching import Allowed
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role
from fngraph.graphs.addresses import Watch
from fngraph.graphs.replay import BoundCalls, Replay
from fngraph.graphs.staging.ring import SLOTS
from fngraph.step.binding import Binding, flatten_as

CALLED = (Role.DONATED, Role.STAGED)  # what a step takes

Reader = Callable[[Any], Sequence[torch.Tensor]]
Assemble = Callable[[Sequence[torch.Tensor], Sequence[Any]], Any]


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

    args: Arguments
    count: int
    donated: tuple[tuple[int, int, Any], ...]
    staged_at: int
    spec_field: str | None
    leaves: Reader

    def values(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """A call's arguments in order, however they were passed.

        Raises:
            TreeError: too few, too many, or an unknown name.
        """
        return tuple(self.args.signature.values(args, kwargs, *CALLED))

    def given(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], allowed: Allowed
    ) -> tuple[Sequence[Any], Allowed]:
        """As `Step.__call__` reads a call: its arguments in order, and what it may run as.

        Raises:
            TreeError: see `values`.
        """
        if allowed is not None and self.takes_allowed:  # an argument of forward's own
            kwargs, allowed = {**kwargs, "allowed": allowed}, None
        if kwargs or len(args) != self.count:
            args = self.values(args, kwargs)
        return args, allowed

    @property
    def takes_allowed(self) -> bool:
        """Whether an argument has the name of a step's own option."""
        sig = self.args.signature
        return "allowed" in [sig.names[i] for i in sig.positions(*CALLED)]


def make_entry(args: Arguments, binding: Binding) -> Entry:
    """The entry of a bound function."""
    sig = args.signature
    positions = sig.positions(*CALLED)
    (staged,) = sig.positions(Role.STAGED)
    fixed = {i: x if trees.is_frozen(x) else _NEVER for i, x in binding.containers.items()}
    donated = tuple((at, i, fixed[i]) for at, i in enumerate(positions) if i != staged)
    return Entry(
        args, len(positions), donated, positions.index(staged),
        None if args.batch_type is None else host_field(args.batch_type),
        reader(args, staged),
    )  # fmt: skip


_NEVER = object()


def reader(args: Arguments, position: int) -> Reader:
    """How a batch's leaves are read: a flat struct's are its fields, any other is flattened."""
    cls = args.batch_type
    names = list(buffers_of(cls)) if cls is not None else []
    roles = getattr(cls, "__fngraph_roles__", {})
    flat = len(names) == len(roles) - 1 and len(names) > 1  # all but the spec
    get = operator.attrgetter(*names) if flat else None

    def leaves(batch: Any) -> Sequence[torch.Tensor]:
        if get is not None and type(batch) is cls:
            found = get(batch)
            for x in found:  # `any` of a generator takes 0.6 us more
                if x is None:
                    break
            else:
                return found  # type: ignore[no-any-return]
        return flatten_as(args, position, batch)

    return leaves


def assembler(args: Arguments, out_tree: Any, returns: Mapping[int, int]) -> Assemble:
    """A function that makes `forward`'s whole output.

    It takes the outputs that are not donated, in order, and the arguments of the call. Each donated
    argument comes back as the very container that was passed in, since its leaves were updated in
    place.
    """
    called = args.signature.positions(*CALLED)
    places: dict[int, int] = {}  # first output leaf of a container to its place in the call
    for position in args.signature.positions(Role.DONATED):
        if args.treedefs[position].num_leaves:
            places[returns[args.span(position).start]] = called.index(position)
    whole = places.get(0)
    if whole is not None and args.treedefs[called[whole]] == out_tree:
        return lambda results, given: given[whole]

    parts: list[tuple[int | None, Any]] = []  # (place, structure) of each child of the output
    start = 0
    for child in trees.children(out_tree) or [out_tree]:
        parts.append((places.get(start) if child.num_leaves else None, child))
        start += child.num_leaves
    if out_tree.type is tuple and all(p is not None or c.is_leaf() for p, c in parts):
        order = [(p, sum(p is None for p, _ in parts[:i])) for i, (p, _) in enumerate(parts)]
        at = order[-1][0]
        if len(order) == 2 and order[0][0] is None and at is not None:  # (logits, cache)
            return lambda results, given: (results[0], given[at])
        return lambda results, given: tuple(
            [results[i] if p is None else given[p] for p, i in order]
        )

    def assemble(results: Sequence[torch.Tensor], given: Sequence[Any]) -> Any:
        rest = iter(results)
        values = [
            trees.unflatten(child, [next(rest) for _ in range(child.num_leaves)])
            if place is None
            else given[place]
            for place, child in parts
        ]
        return trees.unflatten_one_level(out_tree, values)

    return assemble


@dataclasses.dataclass(slots=True)
class Prepared:
    """What a batch's counts decide.

    Attributes:
        true: sizes of the batch.
        kinds: shape, dtype and layout of each of its leaves, as `kinds_of` reads them.
        words: what its slot in the ring says; addresses are filled in.
        views: the outputs, cut to the true sizes.
        counted_as: where its steps are counted.
        replay: of the key, once it is captured.
        calls: the replay's, bound to the true rows.
        alike: whether leaves are as the last ones were that were found right, `kinds` and all
            that `in_place` depends on; None: there were none.
        in_place: whether a graph reads such leaves where they are.
        numbers: that stand for it where processes agree on what they run, by whether it was decided
            before; those that were worked out.
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
    alike: Callable[..., bool] | None = None
    in_place: bool = False
    numbers: dict[bool, int] = dataclasses.field(default_factory=dict)
    slots: dict[int, SlotBatch] = dataclasses.field(default_factory=dict)


kinds_of = operator.attrgetter("shape", "dtype", "layout", "is_meta")


@dataclasses.dataclass(frozen=True, slots=True)
class SlotBatch:
    """A slot of the ring, seen as a batch of some counts.

    Attributes:
        fields: of the batch, but for its spec.
        watch: over its leaves.
        frozen: whether no leaf of it can be replaced.
        place: of the slot's words in the ring's memory.
        words: which they are.
    """

    fields: dict[str, Any]
    watch: Watch
    frozen: bool
    place: slice
    words: bytes


class HostBatch(NamedTuple):
    """A batch that `host_batch` has handed out, for the step that the ring's `taken` counts."""

    batch: Any
    spec: BatchSpec
    prepared: Prepared | None  # None once it is forgotten
    in_slot: SlotBatch
    taken: int

    @property
    def slot(self) -> int:
        """Which slot of the ring it lies in."""
        return self.taken % SLOTS

    def is_in_place(self, taken: int) -> bool:
        """Whether the step that now follows can read it where it is."""
        return self.taken == taken and self.in_slot.frozen and not self.in_slot.watch.moved()

    def not_in_place(self) -> HostBatch:
        """The same, to be laid out for another key than it was made for."""
        return self._replace(in_slot=dataclasses.replace(self.in_slot, frozen=False))

    def laid_out_for(self, decided: Prepared) -> HostBatch:
        """The same, in place if the slot says what the key that was decided reads, as it does
        wherever that is the key that the batch was handed out for."""
        mine = self.prepared
        return self if mine and mine.words == decided.words else self.not_in_place()
