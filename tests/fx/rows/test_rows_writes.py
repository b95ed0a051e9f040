"""Writes of rows: windows, views, donated leaves, and where padding is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rows_given import T_of, check, output, real, rows, trace
from torch import Tensor

from fngraph.errors import RowsError


def inplace(change: Callable[[Tensor, Tensor, Any], Any]) -> Any:
    """The output is a copy of the rows (T, E) after `change(copy, p["w"], batch)`."""

    def value(x: Tensor, p: Any, b: Any) -> Tensor:
        new = x.clone()
        change(new, p["w"], b)
        return new

    return output(value)


REFUSED = {
    "a window of a table": lambda x, w, b: torch.zeros(32, 8)[: T_of(b)].copy_(x),
    "all but the last row": lambda x, w, b: x[:-1].mul_(2),
    "all but the last row, behind a view": lambda x, w, b: x[:-1].unsqueeze(0).view(-1, 8).mul_(2),
    "a part of all but the last": lambda x, w, b: x[:-1].split([4, 4], 1)[0].zero_(),
    "the first R rows": lambda x, w, b: x[: b.seq_lens.shape[0]].mul_(2),
    "the last row": lambda x, w, b: x[-1].zero_(),
    "a sum into the first": lambda x, w, b: x[0].add_(x.sum(0)),
    "through a transposed view": lambda x, w, b: x.t()[:, :1].copy_(x.sum(0)[:, None]),
    "a row before": lambda x, w, b: x.index_put_((torch.arange(T_of(b)) - 1,), x * 2),
    "the row -1": lambda x, w, b: x.index_fill_(0, torch.tensor([-1]), 0.0),
    "shorter rows": lambda x, w, b: x.scatter_(
        1, b.query_start_loc[1:, None].long(), torch.ones(b.seq_lens.shape[0], 1)
    ),
}
KEPT = {
    "all": lambda x, w, b: x.mul_(2),
    "but the first": lambda x, w, b: x[1:].mul_(2),
    "every other": lambda x, w, b: x[::2].mul_(2),
    "the first": lambda x, w, b: x[0].zero_(),
    "columns through a transposed view": lambda x, w, b: x.t()[2].zero_(),
    "a view of a view": lambda x, w, b: x.view(-1, 2, 4)[:, 1].add_(1),
    "masked": lambda x, w, b: x.masked_fill_(~real(b)[:, None], 0),
    "its own rows by index": lambda x, w, b: x.index_copy_(0, torch.arange(T_of(b)), x + 1),
    "its own rows, a column for each request": lambda x, w, b: x.add_(
        x.new_zeros(T_of(b), 9).index_put(
            (torch.arange(T_of(b))[:, None], torch.where(b.seq_lens > 0, b.seq_lens % 8, 8)[None]),
            torch.ones(()),
        )[:, :8]
    ),
    "a few columns, of each row": lambda x, w, b: x.t().index_add_(
        0, torch.tensor([1, 3]), x.t()[:2] + 1
    ),
    "its own rows, a column each": lambda x, w, b: x.scatter_(
        1, x.argmax(1, keepdim=True), torch.zeros(T_of(b), 1)
    ),
}


def returning_it(change: Any) -> Any:
    """As `inplace`, but for changes that give back another tensor than the rows."""
    return output(lambda x, p, b: change(x.clone(), p["w"], b) * 1)


@pytest.mark.parametrize("name", REFUSED)
def test_writes_that_reach_true_rows_are_refused(name: str) -> None:
    """Whether through a view or at once."""
    made = returning_it if "window" in name else inplace
    with pytest.raises(RowsError, match=r"test_rows_writes\.py:\d+: forward .*output\[0\]"):
        trace(made(REFUSED[name]))


@pytest.mark.parametrize("name", KEPT)
def test_writes_of_rows_into_their_own_are_kept(name: str) -> None:
    """Padding is written into padding."""
    check(inplace(KEPT[name]))


def test_a_write_through_one_view_is_seen_in_the_others() -> None:
    """What was masked is not, once the base has been written."""

    def value(x: Any, p: Any, b: Any) -> Any:
        base = torch.where(real(b)[:, None], x, 0)
        view = base.view(-1, 2, 4)
        base.add_(1)
        return view.sum(0)

    with pytest.raises(RowsError, match="takes sum over T"):
        trace(output(value))


def test_an_index_rewritten_through_a_view_may_be_negative() -> None:
    """What was known of it before is not known any more."""

    def value(x: Any, p: Any, b: Any) -> Any:
        index = torch.arange(T_of(b))
        view = index[:]
        index.sub_(1)
        return x[view]

    with pytest.raises(RowsError, match="may be negative"):
        trace(output(value))


def test_mixed_rows_written_into_a_view_are_in_its_base() -> None:
    """Though the base itself was named in no op."""

    def value(x: Any, p: Any, b: Any) -> Any:
        base = x.clone()
        base[:, :4].copy_(x.flip(0)[:, :4])
        return base

    with pytest.raises(RowsError, match="takes flip over T"):
        trace(output(value))


def test_a_donated_leaf_written_in_place_is_checked() -> None:
    """It comes back as itself, with what was written into it."""

    def adds(p: Any, s: Any, b: Any) -> Any:
        s["total"].add_(rows(p, b).sum(0))
        return rows(p, b) * 1, s

    def adds_true_rows(p: Any, s: Any, b: Any) -> Any:
        s["total"].add_(torch.where(real(b)[:, None], rows(p, b), 0).sum(0))
        s["seen"][0].add_(real(b).sum())
        return rows(p, b) * 1, s

    with pytest.raises(RowsError, match=r"takes sum over T.*It reaches output\[1\]\['total'\]"):
        trace(adds)
    check(adds_true_rows)
