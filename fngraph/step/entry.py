"""How a call's arguments are read, worked out once a function."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fngraph.core import buffers_of, host_field
from fngraph.core.trees import is_frozen
from fngraph.fx.arguments import Arguments
from fngraph.fx.leaves import Role
from fngraph.step.binding import Binding, flatten_as

CALLED = (Role.DONATED, Role.STAGED)  # what a step takes


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
