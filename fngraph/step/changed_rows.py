"""Block tables as device state: a step is told which rows changed since the step before.

    block_tables: Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")
    ...
    Batch(..., block_tables=fg.ChangedRows(rows, values), spec=spec)

The table lives on the device apart from the static buffer, with room for all requests, so that rows
beyond a smaller batch are still there later. A step's leading rows of it are the batch's leaf.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from fngraph.errors import TreeError


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
