"""Where the rows of padding are written to: what a declaration says, and what says nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from rows_given import check, output, real, trace
from torch import Tensor

import fngraph as fg
from fngraph.errors import RowsError


def placed(**pad: Any) -> Any:
    """A batch type whose rows say where they go, with a pad that is declared or left out."""

    @fg.struct
    class Placed:
        place: Tensor = fg.buffer("T", "int64", **pad)
        spec: fg.BatchSpec = fg.host()

    return Placed


def test_a_declared_pad_is_a_row_kept_for_padding() -> None:
    """One left out is 0 as well, but then row 0 may be somebody's."""
    for pad, said in (({}, False), ({"pad": 0}, True), ({"pad": -1}, False), ({"pad": 2}, True)):
        Placed = placed(**pad)
        (buffer,) = fg.core.buffers_of(Placed).values()
        assert buffer.pad_given is bool(pad)
        batch = Placed(place=torch.tensor([3, 4, 5]), spec=fg.BatchSpec(3, 2))
        fast = fg.graphify(
            lambda s, b: (b.place * 1, s.index_put((b.place,), torch.ones(b.place.shape[0]))),
            modes="FULL", donate=0, stage=1, limits=toys.LIMITS, sizes=(8,), recorder="tape",
            allow_copies=True,
        )  # fmt: skip
        state = torch.zeros(7)
        if not said:
            with pytest.raises(RowsError, match=r"pad of b\.place says.*fg\.buffer\(\.\.\., pad=0"):
                fast(state, batch)
            continue
        fast(state, batch)
        kept = [i for i in range(7) if i != pad["pad"]]
        assert state[kept].tolist() == [float(i in (3, 4, 5)) for i in kept]


@pytest.mark.parametrize("index", ["zeros", "a part of a leaf", "a mask"])
def test_an_index_that_happens_to_be_0_in_padding_names_no_row(index: str) -> None:
    """Only what is declared, or chosen by torch.where, does."""
    made = {
        "zeros": lambda b: torch.zeros_like(b.token_ids),
        "a part of a leaf": lambda b: b.token_ids[:, None].split([1], 1)[0][:, 0],
        "a mask": lambda b: real(b).long(),
    }[index]
    with pytest.raises(RowsError, match="writes the rows of padding too"):
        trace(output(lambda x, p, b: torch.zeros(11, 8).index_copy(0, made(b), x)))


def test_scatter_reduce_that_begins_anew_is_refused() -> None:
    """Zeros add nothing, but here they replace."""

    def value(whole: bool) -> Any:
        return output(
            lambda x, p, b: torch.ones(11).scatter_reduce(
                0, b.token_ids, real(b).float(), "sum", include_self=whole
            )
        )

    check(value(True))
    with pytest.raises(RowsError, match="scatter_reduce"):
        trace(value(False))


def test_what_is_added_up_needs_zeros_whatever_a_pad_says() -> None:
    """A histogram of lengths, say, which are padded with 0."""

    def value(x: Any, p: Any, b: Any) -> Any:
        return torch.zeros(8).index_add(0, b.seq_lens % 8, torch.ones(b.seq_lens.shape[0]))

    def masked(x: Any, p: Any, b: Any) -> Any:
        return torch.zeros(8).index_add(0, b.seq_lens % 8, (b.seq_lens > 0).float())

    with pytest.raises(RowsError, match="adds up the rows of padding too"):
        trace(output(value))
    check(output(masked))
