"""`guards=True`: poison in what nothing may read.

Padding rows: NaN in floats, a copy of a true row in ints, after each batch has been unpacked; pads
that were declared (`pad=-1`, `pad="stride"`, `pad=0`) stay, and so do those that the trace relies
on. One that nobody declared, it may still have counted on as 0:

    batch.x.sum(0)      # x: fg.buffer("T", "float32"): accepted, since its padding is 0

Such a program is right, and poison in its padding would be a false alarm. So `forward` is traced
as if padding held anything: where that is refused as mixing rows, the pad is kept.

A field's `min` is looked at before each step, and whether offsets (pad="stride", pad="last") rise,
end within the rows that they divide, and are as the spec says: its `query_len` and bounds are taken
by backends as they are.

Borrowed results: see `graphs.loans`.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import BatchSpec, Buffer, BufferPlan, trees
from fngraph.core.buffers import LAST, STRIDE, Dim
from fngraph.errors import TreeError
from fngraph.executable import Executable
from fngraph.fx.leaves import Role
from fngraph.fx.tracing.ambient import check_no_transform
from fngraph.graphs.loans import Borrowed, Loans
from fngraph.graphs.staging.buffers import StaticBuffers, true_sizes
from fngraph.step.changed_rows import ChangedRows
from fngraph.step.prepared import Assemble, Entry, HostBatch

Node = Callable[[], None]


@dataclasses.dataclass(frozen=True, eq=False)
class Poison:
    """What the graphs of one executable poison, and what its calls have lent.

    Attributes:
        name: the function's.
        poisoned: for each static buffer, whether its padding is.
        counts: true rows of each static buffer, on the device.
        rows: 0, 1, 2, ... on the device.
        divided: the rows that a staged leaf divides, if a primitive is told so, by its number.
    """

    name: str
    loans: Loans
    plan: BufferPlan
    dims: Mapping[str, int]
    divided: Mapping[int, Dim]
    poisoned: tuple[bool, ...]
    counts: torch.Tensor
    rows: torch.Tensor

    def after(self, unpack: Node, views: Sequence[torch.Tensor]) -> Node:
        """The node that takes a batch in, and then poisons its padding."""
        chosen = [(i, x) for i, x in enumerate(views) if self.poisoned[i] and x.dim()]

        def node() -> None:
            unpack()
            for i, x in chosen:
                _poison_rows(x, self.counts[i], self.rows[: len(x)])

        return node

    def lending(self, assemble: Assemble) -> Assemble:
        """`assemble`, of results that are lent until the pool's next call."""

        def lend(results: Sequence[torch.Tensor], args: Sequence[Any]) -> Any:
            return assemble(self.loans.lend(self.name, results), args)

        return lend

    def begin(
        self,
        entry: Entry,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        handed: HostBatch | None,
    ) -> tuple[tuple[Any, ...], HostBatch | None]:
        """Expire what the pool has lent; what this call is given of it is copied first.

        Returns:
            the call's arguments, and what `host_batch` has handed out, as they are now.

        Raises:
            StaleError: a leaf of the batch is a borrowed result that has expired.
            TreeError: a number below its field's `min`.
        """
        check_no_transform()
        values = list(args)
        if kwargs or len(args) != entry.count:
            values = list(entry.values(args, kwargs))
        batch = given = values[entry.staged_at]
        leaves, treedef = trees.flatten(batch)
        lent = self.loans.storages()
        kept = [_own(x, lent) for x in leaves]
        spec = None if entry.spec_field is None else getattr(batch, entry.spec_field, None)
        if any(a is not b for a, b in zip(kept, leaves)):
            values[entry.staged_at] = batch = trees.unflatten(treedef, kept)
            if entry.spec_field is not None:
                batch.__dict__[entry.spec_field] = spec
            if handed is not None and handed.batch is given:
                handed = handed._replace(batch=batch)
        self.loans.begin(self.name)
        _check_least(self.plan, kept)
        if isinstance(spec, BatchSpec):
            true = true_sizes(spec, self.dims)
            _check_offsets(self.plan, kept, spec, {i: d(**true) for i, d in self.divided.items()})
            counts = [planned.buffer.rows(true) or 0 for planned in self.plan.buffers]
            with torch.inference_mode(False), torch.no_grad():
                self.counts.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        return tuple(values), handed


@torch.inference_mode(False)
def make_poison(executable: Executable, static: StaticBuffers, loans: Loans) -> Poison:
    """The poison of an executable over its static buffers."""
    longest = max((len(x) for x in static.tensors if x.dim()), default=0)
    device, staged = executable.args.device, executable.args.of(Role.STAGED)
    told = executable.divided
    return Poison(
        getattr(executable.args.signature.fn, "__name__", "a function"),
        loans,
        executable.plan,
        executable.limits.dims,
        {i: told[leaf] for i, leaf in enumerate(staged) if leaf in told},
        _unrelied(executable),
        torch.zeros(len(static.tensors), dtype=torch.int64, device=device),
        torch.arange(longest, device=device),
    )


def _check_least(plan: BufferPlan, leaves: Sequence[Any]) -> None:
    for planned, x in zip(plan.buffers, leaves):
        least = planned.buffer.min
        x = x.values if isinstance(x, ChangedRows) else x
        if least is not None and isinstance(x, torch.Tensor) and x.numel():
            if (found := int(x.min())) < least:
                raise TreeError(
                    f"{planned.path}: declared with min={least}, and this batch has {found}"
                )


def _check_offsets(
    plan: BufferPlan, leaves: Sequence[Any], spec: BatchSpec, divided: Mapping[int, int]
) -> None:
    """Where requests begin, as the batch has it, beside what the spec says of them. A batch may
    have fewer tokens than its spec: one that is padded to what processes agree on.

    Args:
        divided: by the leaf's number, the rows that offsets are of; the others' are not known.
    """
    for i, (planned, x) in enumerate(zip(plan.buffers, leaves)):
        of_requests = planned.buffer.pad == STRIDE
        if not (of_requests or planned.buffer.pad == LAST):
            continue
        if not isinstance(x, torch.Tensor) or x.dim() != 1:
            continue
        rows = spec.num_tokens if of_requests else divided.get(i)
        most = spec.bounds.max_query_len if rows == spec.num_tokens else None
        starts = x.tolist()
        for r, (begin, end) in enumerate(itertools.pairwise(starts)):
            if end < begin:
                raise TreeError(
                    f"{planned.path} falls from {begin} to {end}, at [{r + 1}]. Offsets begin with "
                    "0 and add up what each request brings: sizes.cumsum(0) behind a 0"
                )
            if most is not None and end - begin > most:
                raise TreeError(
                    f"{planned.path}: request {r} brings {end - begin} tokens, from {begin} to "
                    f"{end}, and {spec!r} says at most {most}. Say what the batch has: "
                    "query_len=None where requests differ, and the largest of them as bound"
                )
        if starts and rows is not None and starts[-1] > rows:
            has = f"{spec!r} has" if rows == spec.num_tokens else "what it divides has"
            unit = "tokens" if rows == spec.num_tokens else "rows"
            raise TreeError(f"{planned.path} ends at {starts[-1]}, and {has} {rows} {unit}")


def _own(x: Any, lent: set[int]) -> Any:
    """A leaf, or a copy if it is a borrowed result, or lies in the memory of one."""
    if isinstance(x, ChangedRows):
        values = _own(x.values, lent)
        return x if values is x.values else dataclasses.replace(x, values=values)
    if not isinstance(x, torch.Tensor):
        return x
    is_lent = isinstance(x, Borrowed) or x.untyped_storage().data_ptr() in lent
    return x.clone() if is_lent else x


_AS_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _poison_rows(x: torch.Tensor, true: torch.Tensor, rows: torch.Tensor) -> None:
    """Overwrite the rows of `x` from `true` on: with NaN, or with a copy of the last true row."""
    if (x.dtype.is_floating_point and x.itemsize > 1) or x.dtype.is_complex:
        mask = (rows >= true).view(-1, *[1] * (x.dim() - 1))
        x.masked_fill_(mask, float("nan"))
        return
    bits = x.view(_AS_INTS[x.itemsize])
    bits.copy_(bits.index_select(0, torch.minimum(rows, (true - 1).clamp(min=0))))


def _unrelied(executable: Executable) -> tuple[bool, ...]:
    """For each staged leaf, whether its padding may hold anything: no pad is declared or used."""
    args = executable.args
    staged = args.of(Role.STAGED)
    found = [i for i in staged if _is_free(args.leaves[i].buffer)]
    if found and not _takes(executable, found):
        kept: list[int] = []
        for i in found:
            kept += [i] if _takes(executable, [*kept, i]) else []
        found = kept
    return tuple(i in found for i in staged)


def _is_free(buffer: Buffer | None) -> bool:
    return buffer is not None and not buffer.pad_given and any(dim.moves for dim in buffer.dims)


def _takes(executable: Executable, leaves: Iterable[int]) -> bool:
    """Whether the function is accepted with any padding in these leaves."""
    given = list(executable.args.leaves)
    for i in leaves:
        given[i] = dataclasses.replace(given[i], padded=False)
    return executable.maker.accepts(given)
