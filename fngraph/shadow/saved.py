"""`Saved`: a batch with all that its step reads and changes, copied before the step; and the second
run, through bare `forward`, on these copies.

Held arguments are not copied. They are the caller's containers as they are now: where he has put
another tensor into one, the step goes on with the tensor that was bound, and bare `forward` does
not.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import BatchSpec, buffers_of, trees
from fngraph.core.dispatching import Allowed
from fngraph.core.spec import COUNTS
from fngraph.errors import TreeError
from fngraph.fx.leaves import Role
from fngraph.shadow.parts import Parts, Rows, copied, rows_of
from fngraph.step.binding import flatten_as
from fngraph.step.call import EXACT
from fngraph.step.changed_rows import ChangedRows
from fngraph.step.keys import Keys
from fngraph.step.prepared import Prepared
from fngraph.torch_facts.names import copy_all
from fngraph.torch_facts.tracing import ONE_AT_A_TIME, in_given_order

_BARE: contextvars.ContextVar[bool] = contextvars.ContextVar("bare forward runs", default=False)
is_bare = _BARE.get
"""Whether bare `forward` runs here; what is graphified within it runs bare then too, as a trace
takes it. It would capture graphs of its own else, and of copies."""


@dataclasses.dataclass(frozen=True, eq=False)
class Saved:
    """What one step was about to be given.

    Attributes:
        spec: of the batch; None where that has exact shapes.
        leaves: of the batch, whole, on the device.
        rows: of the state that it is about.
        state: what those hold, by the index of the donated leaf.
        generators: states of those that `forward` draws from.
    """

    spec: BatchSpec | None
    leaves: tuple[torch.Tensor, ...]
    rows: Rows
    state: Mapping[int, torch.Tensor]
    generators: tuple[torch.Tensor, ...]

    @property
    def counts(self) -> BatchSpec:
        """The counts that keys go by."""
        return self.spec or EXACT

    @property
    def nbytes(self) -> int:
        """Bytes that this keeps."""
        every = (*self.leaves, *self.rows.staged, *self.state.values())
        return sum(x.numel() * x.itemsize for x in every)


@dataclasses.dataclass(frozen=True, eq=False)
class Ran:
    """What a run has given.

    Attributes:
        outputs: those that are not donated, in order.
        state: new values of the donated leaves, or of the rows of them, by index.
    """

    outputs: tuple[torch.Tensor, ...]
    state: Mapping[int, torch.Tensor]


def donated_of(keys: Keys) -> dict[int, torch.Tensor]:
    """The bound donated leaves, by their index."""
    binding = keys.shared.binding
    leaves = keys.executable.args.leaves
    pairs = zip(binding.indices, binding.leaves)
    return {i: x for i, x in pairs if leaves[i].role is Role.DONATED}


@torch.no_grad()
def save(keys: Keys, parts: Parts, batch: Any) -> Saved:
    """Copy what the step of this batch will read and change.

    Raises:
        TreeError: it is no batch of this function. torch.OutOfMemoryError: too little memory.
    """
    keys.check_awake()
    device = keys.shared.recorder.device
    field = keys.shared.entry.spec_field
    spec = None if field is None else getattr(batch, field, None)
    if field is not None and not isinstance(spec, BatchSpec):
        raise TreeError(
            f"expected a batch of this step, whose {field!r} is a BatchSpec; got "
            f"{type(batch).__name__} with {type(spec).__name__} there"
        )
    leaves = tuple(_own(x, device) for x in whole_leaves(keys, batch, spec))
    rows = rows_of(parts, keys.executable, leaves)
    states = tuple(g.get_state() for g in keys.executable.generators)
    return Saved(spec, leaves, rows, copied(parts, rows, donated_of(keys)), states)


def _own(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    x = x.as_subclass(torch.Tensor)  # type: ignore[arg-type]  # from a guarded one
    return x.resolve_conj().resolve_neg().to(device, copy=True).contiguous()


def whole_leaves(keys: Keys, batch: Any, spec: BatchSpec | None) -> Sequence[torch.Tensor]:
    """A batch's leaves, those in whole that come as `ChangedRows`. No table is written."""
    shared, args = keys.shared, keys.executable.args
    if shared.tables is None or spec is None or args.batch_type is None:
        return shared.entry.leaves(batch)
    made: Any = object.__new__(args.batch_type)
    made.__dict__.update({name: getattr(batch, name) for name in vars(batch)})
    for name in buffers_of(args.batch_type):
        leaf = getattr(batch, name)
        if isinstance(leaf, ChangedRows):
            data = shared.tables.tables[name].data.clone()
            data[leaf.rows.to(data.device)] = leaf.values.to(data.device)
            made.__dict__[name] = data[: spec.num_reqs]
    (position,) = args.signature.positions(Role.STAGED)
    return flatten_as(args, position, made)


def prepared_of(keys: Keys, saved: Saved, allowed: Allowed = None) -> Prepared:
    """What its counts have decided."""
    counts = saved.counts
    if allowed is not None:
        return keys.prepare(counts, allowed)
    return keys.prepared.get(counts[COUNTS]) or keys.prepare(counts)


def held_of(keys: Keys) -> dict[int, torch.Tensor]:
    """Held leaves as the caller's containers have them now, by their index.

    Raises:
        TreeError: a container of another structure than was bound.
    """
    args, binding = keys.executable.args, keys.shared.binding
    found: dict[int, torch.Tensor] = {}
    for position in args.signature.positions(Role.HELD):
        flat = flatten_as(args, position, binding.containers[position], binding.keeps_order)
        span = args.span(position)
        found.update(zip(range(span.start, span.stop), flat))
    return found


def run_bare(
    keys: Keys, saved: Saved, watch: contextlib.AbstractContextManager[Any] | None = None
) -> Ran:
    """Bare `forward` on a copy of the copies, under the caller's own state of torch.

    Args:
        watch: entered for `forward` alone.

    Raises:
        Exception: whatever it raises.
    """
    executable = keys.executable
    args, sig = executable.args, executable.args.signature
    state = {i: torch.empty_like(x) for i, x in saved.state.items()}
    if state:
        with torch.no_grad():
            copy_all(list(state.values()), list(saved.state.values()))
    values: list[Any] = [None] * len(sig.names)
    for position in sig.positions(Role.HELD):
        values[position] = keys.shared.binding.containers[position]
    for position in sig.positions(Role.DONATED):
        span = args.span(position)
        own = [state[i] for i in range(span.start, span.stop)]
        values[position] = trees.unflatten(args.treedefs[position], own)
    (position,) = sig.positions(Role.STAGED)
    values[position] = batch = args.batch_over([x.clone() for x in saved.rows.staged])
    if keys.shared.entry.spec_field is not None:
        batch.__dict__[keys.shared.entry.spec_field] = saved.spec
    mode = contextlib.nullcontext() if "grad" in executable.asked else torch.no_grad()
    watched = watch or contextlib.nullcontext()
    with ONE_AT_A_TIME, _running_bare(), drawn_from(keys, saved), mode:
        with in_given_order(), watched:  # einsum as it was traced
            result = sig.call(values)
    return ran_of(keys, result)


@contextlib.contextmanager
def _running_bare() -> Iterator[None]:
    token = _BARE.set(True)
    try:
        yield
    finally:
        _BARE.reset(token)


@contextlib.contextmanager
def drawn_from(keys: Keys, saved: Saved) -> Any:
    """Draws meanwhile are those of the step; generators then go on from where they are now."""
    generators = keys.executable.generators
    now = [g.get_state() for g in generators]
    try:
        for generator, state in zip(generators, saved.generators):
            generator.set_state(state)
        yield
    finally:
        for generator, state in zip(generators, now):
            generator.set_state(state)


def ran_of(keys: Keys, result: Any) -> Ran:
    """A whole result, taken apart."""
    executable = keys.executable
    trees.register_dataclasses(result)
    flat, _ = trees.flatten(executable.args.in_their_order(result))
    back = {out: i for i, out in executable.returns.items()}
    outputs = [x for k, x in enumerate(flat) if k not in back]
    state = {back[k]: x for k, x in enumerate(flat) if k in back}
    return Ran(tuple(map(plain, outputs)), {i: plain(x) for i, x in state.items()})


def plain(x: torch.Tensor) -> torch.Tensor:
    """Without guards and gradients."""
    return x.detach().as_subclass(torch.Tensor)  # type: ignore[arg-type]


def output_paths(keys: Keys) -> list[str]:
    """How to reach the outputs that are not donated."""
    back = set(keys.executable.returns.values())
    paths = trees.paths(keys.executable.out_tree, "output")
    return [path for k, path in enumerate(paths) if k not in back]
