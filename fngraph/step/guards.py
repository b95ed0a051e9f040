"""`guards=True`: a step that poisons what nothing may read.

Padding rows: NaN in floats, a copy of a true row in ints, after each batch has been unpacked; pads
that were declared (`pad=-1`, `pad="stride"`, `pad=0`) stay, and so do those that the trace relies
on (`pads`). Borrowed results: see `graphs.loans`. It is chosen once, at capture, so a step without
guards does not ask.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fngraph.core import BatchSpec, trees
from fngraph.fx.ambient import check_no_transform
from fngraph.graphs.loans import Borrowed
from fngraph.graphs.staging.buffers import true_sizes
from fngraph.step.call import call
from fngraph.step.captured import Captured
from fngraph.step.changed_rows import ChangedRows
from fngraph.step.entry import CALLED
from fngraph.step.pads import unrelied

Node = Callable[[], None]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Guarded(Captured):
    """A step that poisons.

    Attributes:
        poisoned: for each static buffer, whether its padding is.
        counts: true rows of each static buffer, on the device.
        rows: 0, 1, 2, ... on the device.
    """

    poisoned: tuple[bool, ...] = ()
    counts: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))
    rows: torch.Tensor = dataclasses.field(default_factory=lambda: torch.zeros(0))

    @property
    def guards(self) -> bool:
        """Whether padding and expired results are poisoned."""
        return True

    @property
    def name(self) -> str:
        """The function's."""
        return getattr(self.compiled.args.signature.fn, "__name__", "a function")

    def guard(self, first: Node, sizes: Mapping[str, int]) -> Node:
        """The node that takes a batch in, and then poisons its padding."""
        views, poisoned = self.static.views(sizes), self.poisoned
        chosen = [(i, x) for i, x in enumerate(views) if poisoned[i] and x.dim()]

        def node() -> None:
            first()
            for i, x in chosen:
                _poison_rows(x, self.counts[i], self.rows[: len(x)])

        return node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One step; see `Captured`.

        Raises:
            StaleError: a leaf of the batch is a borrowed result that has expired.
        """
        with self.recorder.turn.taken():
            check_no_transform()
            step = self.under_ambient()
            assert isinstance(step, Guarded)
            return call(self, *step.begin(args, kwargs))

    def begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Expire what the pool has lent; what this call is given of it is copied first."""
        entry, loans = self.entry, self.recorder.loans
        values = list(args)
        if kwargs or len(args) != entry.count:
            values = list(self.compiled.args.signature.values(args, kwargs, *CALLED))
        batch = given = values[entry.staged_at]
        leaves, treedef = trees.flatten(batch)
        lent = loans.storages()
        kept = [_own(x, lent) for x in leaves]
        spec = None if entry.spec_field is None else getattr(batch, entry.spec_field, None)
        if any(a is not b for a, b in zip(kept, leaves)):
            values[entry.staged_at] = batch = trees.unflatten(treedef, kept)
            if entry.spec_field is not None:
                batch.__dict__[entry.spec_field] = spec
            if self.last_call.host_batch is not None and self.last_call.host_batch.batch is given:
                self.last_call.host_batch = self.last_call.host_batch._replace(batch=batch)
        loans.begin(self.name)
        if isinstance(spec, BatchSpec):
            true = true_sizes(spec, self.limits.dims)
            counts = [planned.buffer.rows(true) or 0 for planned in self.static.buffer_plan.buffers]
            with torch.inference_mode(False), torch.no_grad():
                self.counts.copy_(torch.tensor(counts, dtype=torch.int64, device="cpu"))
        return tuple(values)


def _own(x: Any, lent: set[int]) -> Any:
    """A leaf, or a copy if it is a borrowed result, or lies in the memory of one."""
    if isinstance(x, ChangedRows):
        values = _own(x.values, lent)
        return x if values is x.values else dataclasses.replace(x, values=values)
    if not isinstance(x, torch.Tensor):
        return x
    is_lent = isinstance(x, Borrowed) or x.untyped_storage().data_ptr() in lent
    return x.clone() if is_lent else x


def guarded(step: Captured) -> Guarded:
    """The same step, guarded."""
    fields = {f.name: getattr(step, f.name) for f in dataclasses.fields(Captured)}
    device, assemble, loans = step.recorder.device, step.assemble, step.recorder.loans
    longest = max((len(x) for x in step.static.tensors if x.dim()), default=0)

    def lend(results: Any, args: Any) -> Any:
        return assemble(loans.lend(made.name, results), args)

    if step.borrow:
        fields["assemble"] = lend
    with torch.inference_mode(False):
        made = Guarded(
            **fields,
            poisoned=unrelied(step.compiled.lowered.split.traced),
            counts=torch.zeros(len(step.static.tensors), dtype=torch.int64, device=device),
            rows=torch.arange(longest, device=device),
        )
    return made


_AS_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _poison_rows(x: torch.Tensor, true: torch.Tensor, rows: torch.Tensor) -> None:
    """Rows of `x` from `true` on: NaN, or a copy of the last row before."""
    if (x.dtype.is_floating_point and x.itemsize > 1) or x.dtype.is_complex:
        mask = (rows >= true).view(-1, *[1] * (x.dim() - 1))
        x.masked_fill_(mask, float("nan"))
        return
    bits = x.view(_AS_INTS[x.itemsize])
    bits.copy_(bits.index_select(0, torch.minimum(rows, (true - 1).clamp(min=0))))
