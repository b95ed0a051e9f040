"""Block tables as device state: a step is told which rows changed since the step before.

    block_tables: Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")
    ...
    Batch(..., block_tables=fg.ChangedRows(rows, values), spec=spec)

The table lives on the device apart from the static buffer, with room for all requests, so that rows
beyond a smaller batch are still there later. A step's leading rows of it are the batch's leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import Limits, buffers_of, host_field
from fngraph.core.text import did_you_mean
from fngraph.errors import TreeError
from fngraph.fx.arguments import Arguments
from fngraph.step.prepared import Reader


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class ChangedRows:
    """In place of a whole leaf: the leaf of the step before, with these rows replaced.

    Rows of other requests stay, those beyond a smaller batch too. The first step of a function
    takes the whole leaf, and so does one after a step that raised. `forward` always sees, and is
    called bare with, the whole leaf.

    Attributes:
        rows: (n,) int64, in host memory; each once.
        values: (n, ...) of the leaf's dtype, in host memory or on the device.
    """

    rows: torch.Tensor
    values: torch.Tensor


@dataclasses.dataclass(eq=False)
class Table:
    """One leaf's rows.

    Attributes:
        data: as many rows as requests can come.
        known: which rows have been given.
    """

    path: str
    data: torch.Tensor
    known: list[bool]

    def take(self, leaf: Any, reqs: int, again: bool) -> Any:
        """The leaf's rows on the device, once `leaf` is written there.

        Args:
            again: whether the step before left the table as it should be.

        Raises:
            TreeError: rows that cannot be replaced, or that were never given.
        """
        if not again:
            self.known = [False] * len(self.data)
        if isinstance(leaf, ChangedRows):
            self._replace(leaf, again)
            missing = [row for row, known in enumerate(self.known[:reqs]) if not known]
            if missing:
                raise TreeError(
                    f"{self.path}: rows {_some(missing)} of {reqs} were never given. Add them to "
                    "ChangedRows, or pass the whole leaf"
                )
        else:
            rows = self.data[:reqs]
            if not isinstance(leaf, torch.Tensor) or not _is_like(leaf, rows):
                return leaf  # as any other leaf that does not fit: it is named by who reads it
            rows.copy_(_upload([leaf], self.data.device)[0])
            self.known[:reqs] = [True] * reqs
        return self.data[:reqs]

    def _replace(self, changed: ChangedRows, again: bool) -> None:
        rows, values, path = changed.rows, changed.values, self.path
        if not again:
            raise TreeError(
                f"{path}: ChangedRows replaces rows of the step before, and there is none, or it "
                "failed. Pass the whole leaf"
            )
        fits = isinstance(rows, torch.Tensor) and rows.dtype is torch.int64 and rows.dim() == 1
        if not fits or rows.device.type != "cpu":
            place = f" on {rows.device}" if fits else ""
            raise TreeError(
                f"{path}: ChangedRows.rows should be torch.int64 (n,) in host memory, got "
                f"{_kind(rows)}{place}"
            )
        want = (len(rows), *self.data.shape[1:])
        like = self.data[:1].expand(want)
        if not isinstance(values, torch.Tensor) or not _is_like(values, like):
            raise TreeError(
                f"{path}: ChangedRows.values should be {_kind(like)}, got {_kind(values)}"
            )
        indices = rows.tolist()
        if not indices:
            return
        if min(indices) < 0 or max(indices) >= len(self.data):
            beyond = [i for i in indices if not 0 <= i < len(self.data)]
            raise TreeError(
                f"{path}: ChangedRows.rows {_some(beyond)} are none of the {len(self.data)} rows "
                "that fg.Limits(max_reqs=...) allows"
            )
        if len(set(indices)) < len(indices):
            twice = [i for i in set(indices) if indices.count(i) > 1]
            raise TreeError(f"{path}: ChangedRows.rows has {_some(twice)} more than once")
        where, what = _upload([rows, values], self.data.device)
        self.data.index_copy_(0, where, what)
        for i in indices:
            self.known[i] = True


@dataclasses.dataclass(eq=False)
class Tables:
    """The tables of a step, by field; shared with the steps of other ambient states.

    Attributes:
        again: whether a step has read them and ended well, and none has failed since.
    """

    tables: dict[str, Table]
    again: bool = False

    def reader(self, args: Arguments, read: Reader) -> Reader:
        """From a batch to its leaves, tables in place of what was given for them."""
        cls: Any = args.batch_type
        field = host_field(cls)
        assert field is not None

        def leaves(batch: Any) -> Sequence[torch.Tensor]:
            if type(batch) is not cls:
                return read(batch)
            again, self.again = self.again, False
            made: Any = object.__new__(cls)
            made.__dict__.update(vars(batch))
            reqs = getattr(batch, field).num_reqs
            with torch.no_grad():
                for name, table in self.tables.items():
                    made.__dict__[name] = table.take(getattr(batch, name), reqs, again)
            return read(made)

        return leaves

    def assembler(self, assemble: Callable[..., Any]) -> Callable[..., Any]:
        """The last thing that a step does, and a note that it got there."""

        def assembled(results: Any, args: Any) -> Any:
            self.again = True
            return assemble(results, args)

        return assembled


@torch.inference_mode(False)
def make_tables(args: Arguments, limits: Limits, device: torch.device) -> Tables | None:
    """The tables of the fields with rows="changed"; None where there are none."""
    if args.batch_type is None:
        return None
    sizes = {**limits.dims, "R": limits.max_reqs}
    tables = {}
    for name, buffer in buffers_of(args.batch_type).items():
        if buffer.changed:
            dtype = getattr(torch, buffer.dtype)
            data = torch.zeros(buffer.shape(sizes), dtype=dtype, device=device)
            tables[name] = Table(f"{args.batch_name}.{name}", data, [False] * len(data))
    return Tables(tables) if tables else None


def put_changed(tables: Tables | None, batch: Any, changed: Mapping[str, ChangedRows]) -> None:
    """Put changed rows into a batch of one's own.

    Raises:
        TreeError: a field without a table.
    """
    known = [] if tables is None else list(tables.tables)
    for name in changed:
        if name not in known:
            raise TreeError(
                f'{name!r} takes no ChangedRows; fields that do, by rows="changed": '
                f"{', '.join(known) or 'none'}.{did_you_mean(name, known)}"
            )
    vars(batch).update(changed)


def _is_like(x: torch.Tensor, like: torch.Tensor) -> bool:
    dense = x.layout is torch.strided and not x.is_meta
    return dense and x.dtype is like.dtype and x.shape == like.shape


def _kind(x: Any) -> str:
    return f"{x.dtype} {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__


def _upload(tensors: Sequence[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
    """The tensors on the device, in one copy that the host does not wait for.

    The pinned memory in between is torch's to reuse once the copy is done.
    """
    away = [x for x in tensors if x.device != device]
    if not away or device.type != "cuda":
        return [x.to(device) for x in tensors]
    parts = [x.contiguous().view(-1).view(torch.uint8) for x in away]
    pinned = torch.empty(sum(map(len, parts)), dtype=torch.uint8, device="cpu", pin_memory=True)
    torch.cat(parts, out=pinned)
    arrived = iter(pinned.to(device, non_blocking=True).split(list(map(len, parts))))
    return [x if x.device == device else next(arrived).view(x.dtype).view(x.shape) for x in tensors]


def _some(rows: Sequence[int]) -> str:
    return str(list(rows[:5])) if len(rows) <= 5 else f"{list(rows[:5])} ..."
