"""Rows kept for padding, read afterwards: refused, or equal to bare forward over several steps.

Programs are `f(c, s, b)`: the cache `s["c"]` after the batch's rows were written to it by a slot
that is padded with 0, the state before, and the batch. Row 0 holds NaN at each step but the first.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import RowsError

N, E = 17, 4
LIMITS = fg.Limits(max_tokens=16, max_reqs=6, B=2)


@fg.struct
class Batch:
    """Slots from 1 on, as their declaration says; `first` names the first row of some tokens."""

    ids: Tensor = fg.buffer("T", "int64", min=0)
    slot: Tensor = fg.buffer("T", "int64", pad=0)
    late: Tensor = fg.buffer("T", "int64", min=1, pad=1)
    valid: Tensor = fg.buffer("T", "int64", pad=-1)
    place: Tensor = fg.buffer("R", "int64", pad=0)
    tables: Tensor = fg.buffer("R B", "int64", pad=0)
    x: Tensor = fg.buffer("T 4", "float32")
    spec: fg.BatchSpec = fg.host()


def batch(T: int, R: int, step: int = 0) -> Batch:
    """Slots and places of their own at each step."""
    slots = (torch.arange(T) * 5 + step) % (N - 1) + 1
    return Batch(
        (slots + step) % N, slots, slots, slots, torch.arange(R) + 1 + step,
        torch.stack([torch.arange(R) + 1, torch.arange(R) + 2], 1),
        torch.arange(4.0 * T).view(T, 4) + step, fg.BatchSpec(T, R),
    )  # fmt: skip


def state() -> dict[str, Tensor]:
    return {"c": torch.arange(4.0 * N).view(N, E) / 8, "n": torch.arange(N), "t": torch.zeros(E),
            "both": torch.zeros(2, N, E)}  # fmt: skip


def real(n: int = N) -> Tensor:
    """(n, 1) bool, of all rows but the first."""
    return (torch.arange(n) != 0)[:, None]


def forward(program: Callable[..., Any]) -> Any:
    """`program(c, s, b)` beside the new state, or all of what it returns if that is a state."""

    def run(s: Any, b: Any) -> Any:
        c = s["c"].index_put((b.slot,), b.x + 1)
        out = program(c, s, b)
        return out if isinstance(out, tuple) else (out * 1, {**s, "c": c})

    return run


def graphified(fn: Any, **options: Any) -> Any:
    return fg.graphify(
        fn, donate=0, stage=1, limits=LIMITS, sizes=(8, 16), recorder="tape", allow_copies=True,
        **options,
    )  # fmt: skip


def at(b: Any) -> Tensor:
    """The slot by torch.where: what padding has is row 0 too."""
    return torch.where(b.valid >= 0, b.valid, 0)


def through_a_view(c: Any, s: Any, b: Any) -> Any:
    s["c"].view(-1).view(N, E).index_put_((b.slot,), b.x)
    return s["c"].sum(0) * 1, s


def through_a_part(c: Any, s: Any, b: Any) -> Any:
    part = s["c"][:, 1:3]
    part.index_put_((b.slot,), b.x[:, 1:3])
    return s["c"].sum(0) * 1, s


def moved_on(c: Any, s: Any, b: Any) -> Any:
    """The dirty row is somewhere else at each step."""
    c = s["c"].index_put((b.slot,), b.x)
    return s["c"][5:].sum(0) * 1, {**s, "c": torch.cat([c[1:], c[:1]])}


def swapped(c: Any, s: Any, b: Any) -> Any:
    """Of another leaf, at the next step."""
    new = s["n"].index_put((b.slot,), b.ids)
    return s["n"].sum() * 1, {**s, "n": new}


def sent_on(c: Any, s: Any, b: Any) -> Any:
    total = torch.zeros_like(s["t"]) + s["c"].sum(0)
    return b.x * 1, {**s, "c": c, "t": total}


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a sum": (lambda c, s, b: c.sum(0), r"takes sum over 17 rows, of which row 0 is kept for pa"),
    "a sum of the old ones": (lambda c, s, b: s["c"].sum(0), "takes sum over 17 rows"),
    "the row itself": (lambda c, s, b: c[0], "returns a row that is kept for padding"),
    "turned around, one row": (lambda c, s, b: c.flip(0)[0], "takes flip over 17 rows"),
    "rolled": (lambda c, s, b: c.roll(1, 0), "takes roll over 17"),
    "a row plus all": (lambda c, s, b: c + c[0], "returns a row"),
    "a row plus tokens": (lambda c, s, b: b.x + c[0], "computes true rows"),
    "running sums, turned around": (lambda c, s, b: c.cumsum(0).flip(0), "takes cumsum over 17"),
    "a product with a sum": (lambda c, s, b: b.x @ c.sum(0), "takes sum over 17"),
    "scores of all rows": (lambda c, s, b: F.linear(b.x, c), r"Leave it out: x\[:, 1:\]"),
    "scores, softmax": (lambda c, s, b: (b.x @ c.t()).softmax(-1), r"takes softmax.*x\[:, 1:\]"),
    "contracted": (lambda c, s, b: torch.ones(N) @ c, "multiplies and sums"),
    "contracted by rows": (lambda c, s, b: torch.ones(3, N) @ c, "multiplies and sums"),
    "einsum": (lambda c, s, b: torch.einsum("ne,nf->ef", c, c), "multiplies and sums"),
    "argmax": (lambda c, s, b: c.argmax(0), "takes argmax over 17"),
    "max, mean, sort": (lambda c, s, b: c.amax() + c.mean() + c.sort(0)[0].sum(), "takes amax"),
    "sorted": (lambda c, s, b: c.sort(0)[0], "takes sort over 17"),
    "topk": (lambda c, s, b: c.topk(2, 0)[1], "takes topk over 17"),
    "std": (lambda c, s, b: c.std(0), "takes std over 17"),
    "norm": (lambda c, s, b: c / c.norm(), "takes linalg_vector_norm over 17"),
    "layer norm over all": (lambda c, s, b: F.layer_norm(c, (N, E)), "takes native_layer_norm"),
    "found by remainders": (lambda c, s, b: c[b.ids % N], r"\.\.\., min=1\), or .*pad=0"),
    "found by tokens": (lambda c, s, b: F.embedding(b.ids, c), "looks up some of 17 rows"),
    "gathered": (lambda c, s, b: c.gather(0, b.ids[:, None]), "looks up some of 17 rows"),
    "selected": (lambda c, s, b: c.index_select(0, b.ids), "looks up some of 17 rows"),
    "found by what was made of a slot": (lambda c, s, b: c[b.slot // 2], "looks up some"),
    "found by a slot less one": (lambda c, s, b: c[(b.slot - 1).clamp(min=0)], "looks up some"),
    "found by constants": (lambda c, s, b: c[torch.tensor([3, 0])], "looks up some of 17 rows"),
    "the last, where N - 1 is kept": (
        lambda c, s, b: c[1:].index_put((torch.where(b.valid >= 0, b.slot - 1, N - 2),), b.x)[-1],
        "returns a row"),
    "masked, but for another row": (
        lambda c, s, b: torch.where((torch.arange(N) != 1)[:, None], c, 0).sum(0), "takes sum"),
    "a view as one row": (lambda c, s, b: c.view(-1)[3:].sum(), "takes sum over 65 rows"),
    "transposed": (lambda c, s, b: c.t().contiguous().sum(1), r"takes sum.*x\[:, 1:\]"),
    "joined": (lambda c, s, b: torch.cat([c[1:], c]).sum(0), r"of which row 16 is kept"),
    "stacked": (lambda c, s, b: torch.stack([c, c], 1).sum(0), "takes sum over 17"),
    "split": (lambda c, s, b: c.split([1, N - 1])[0].sum(0), "returns a row"),
    "padded in front": (lambda c, s, b: F.pad(c, (0, 0, 2, 0)).sum(0), "of which row 2 is kept"),
    "repeated": (lambda c, s, b: c.repeat(2, 1), "is not known"),
    "the first T rows": (lambda c, s, b: c[: b.x.shape[0]], "returns a row"),
    "a distance": (lambda c, s, b: torch.cdist(c, c), "is not known"),
    "a primitive": (lambda c, s, b: toys.double(c), r"calls fngraph.toy_double.*is not known"),
    "attention over it": (
        lambda c, s, b: F.scaled_dot_product_attention(b.x[None, None], *[c[None, None]] * 2),
        "is not known"),
    "convolved": (lambda c, s, b: F.conv1d(c.t()[None], torch.ones(1, E, 2)), "convolves"),
    "written into another": (
        lambda c, s, b: s["t"].expand(N, E).clone().index_copy(0, torch.arange(N), c),
        "is not known"),
    "an index": (lambda c, s, b: b.x.new_zeros(99)[
        s["n"].index_put((b.slot,), b.ids).clamp(0, 9)], "is not known"),
    "in place, through views": (through_a_view, "takes sum over 17"),
    "in place, through a part": (through_a_part, "takes sum over 17"),
    "moved on from step to step": (moved_on, "returns a row|takes sum over"),
    "another leaf": (swapped, "takes sum over 17 rows"),
    "into a state": (sent_on, "takes sum over 17 rows"),
}  # fmt: skip


def kept_in_blocks(c: Any, s: Any, b: Any) -> Any:
    """Paged: by slot into flat rows, read by blocks, of which block 0 is padding's."""
    return c[:16].view(8, 2, E)[b.tables].sum((1, 2))


def a_recurrent_state(c: Any, s: Any, b: Any) -> Any:
    old = s["c"][b.place]
    new = old * 0.5 + 1
    return new * 1, {**s, "c": s["c"].index_copy(0, b.place, new)}


def in_place(c: Any, s: Any, b: Any) -> Any:
    flat = s["c"].view(-1)
    s["c"].index_put_((b.slot,), b.x)
    return s["c"].view(N, 2, 2)[b.slot] + flat[E:].sum(), s


def decayed(c: Any, s: Any, b: Any) -> Any:
    return c[1:].sum(0), {**s, "c": (c * 0.5).clamp(-99, 99)}


def reset(c: Any, s: Any, b: Any) -> Any:
    """The row is made clean before it is read."""
    s["c"].index_put_((b.slot,), b.x)
    s["c"][0].zero_()
    return s["c"].sum(0) * 1, s


def a_layer_each(c: Any, s: Any, b: Any) -> Any:
    """(2, N, E): the same slots of two layers."""
    both = s["both"].index_put((torch.tensor([[0], [1]]), b.slot), b.x)
    return both[:, 1:].sum((0, 1)) + both[1, b.slot], {**s, "both": both}


KEPT: dict[str, Callable[..., Any]] = {
    "the rest": lambda c, s, b: c[1:].sum(0),
    "the rest of the old ones": lambda c, s, b: s["c"][1:].sum(0),
    "another row": lambda c, s, b: c[3] + c[-1],
    "masked": lambda c, s, b: torch.where(real(), c, 0).sum(0),
    "filled": lambda c, s, b: c.masked_fill(~real(), -math.inf).amax(0),
    "over other dims": lambda c, s, b: (c.sum(1) * c.softmax(1)[:, 0])[1:],
    "norms of rows": lambda c, s, b: F.layer_norm(c, (E,))[1:] + F.rms_norm(c, (E,))[1:],
    "orders of rows": lambda c, s, b: c.sort(1)[0][1:] + c.flip(1)[1:] + c.cumsum(1)[1:],
    "read by the slot": lambda c, s, b: c[b.slot] + s["c"][b.slot],
    "read by where": lambda c, s, b: c[at(b)],
    "read by what is 1 or more": lambda c, s, b: F.embedding(b.late, c),
    "read by what is vouched for": lambda c, s, b: c[fg.trust_rows(b.late)],
    "gathered by the slot": lambda c, s, b: c.gather(0, b.slot[:, None].expand(-1, E)),
    "read by constants": lambda c, s, b: c[torch.tensor([3, -1])],
    "columns": lambda c, s, b: c[:, torch.tensor([3, 0])][1:],
    "scores of the rest": lambda c, s, b: (b.x @ c.t())[:, 1:].softmax(-1) @ c[1:],
    "rows times weights": lambda c, s, b: (c @ torch.ones(E, 3))[1:] + F.linear(c, c[1:4])[1:],
    "added to products": lambda c, s, b: torch.addmm(c, torch.ones(N, 2), torch.ones(2, E))[1:],
    "batches of products": lambda c, s, b: torch.bmm(c[:, None], c[..., None])[1:],
    "flat": lambda c, s, b: c.view(-1)[E:].sum(),
    "in blocks": kept_in_blocks,
    "folded and back": lambda c, s, b: c.view(N, 2, 2).transpose(0, 1).flatten(0, 1)[1:N].sum(0)
    + c.view(1, N, E).unflatten(2, (2, 2)).movedim(1, 0)[1:].sum((0, 1, 2)),
    "joined and left out": lambda c, s, b: torch.cat([c, c[1:]])[1:].sum(0),
    "stacked and left out": lambda c, s, b: torch.stack([c, c], 1)[1:].sum(0),
    "split": lambda c, s, b: c.split([1, N - 1])[1].sum(0) + sum(c.unbind(0)[1:]),
    "padded in front": lambda c, s, b: F.pad(c, (1, 0, 0, 0))[1:].sum(0),
    "every other": lambda c, s, b: c[1::2].sum(0),
    "convolved each": lambda c, s, b: F.conv1d(c[:, None], torch.ones(1, 1, 2))[1:],
    "a choice between two": lambda c, s, b: torch.where(c > 1, c, s["c"])[1:].sum(0),
    "written over": lambda c, s, b: c.select_scatter(s["t"], 0, 0).sum(0)
    + c.slice_scatter(torch.ones(2, E), 0, 0, 2).sum(0),
    "a part of it written over": lambda c, s, b: c.slice_scatter(c[1:], 0, 1)[1:].sum(0),
    "only its shape": lambda c, s, b: torch.zeros_like(c).sum(0) + c.new_ones(E),
    "more written": lambda c, s, b: c.index_put((b.slot,), b.x * 2)[1:].sum(0),
    "integers": lambda c, s, b: s["n"].index_put((b.slot,), b.ids)[1:].sum(),
    "the table itself": lambda c, s, b: c + 1,
    "a recurrent state": a_recurrent_state,
    "in place": in_place,
    "decay": decayed,
    "reset": reset,
    "a layer each": a_layer_each,
}  # fmt: skip


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_its_line(name: str) -> None:
    program, says = REFUSED[name]
    with pytest.raises(RowsError, match=says) as caught:
        graphified(forward(program)).trace(state(), batch=batch(3, 2))
    assert re.match(r".*(test_rows_dirty|toys)\.py:\d+: forward", str(caught.value))
    assert "output[" in str(caught.value)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("name", KEPT)
def test_it_equals_bare_forward_whatever_the_kept_row_holds(name: str) -> None:
    fn = forward(KEPT[name])
    step, own, bare = graphified(fn, modes="FULL"), state(), state()
    for i, sizes in enumerate(((3, 2), (5, 3), (1, 1), (8, 3), (9, 4))):
        got, _ = step(own, batch(*sizes, i))
        want, bare = fn(bare, batch(*sizes, i))
        table = want.shape == (N, E)  # of which the kept row is not bare forward's
        torch.testing.assert_close(got[1:] if table else got, want[1:] if table else want)
        for key, x in own.items():
            rows = (slice(None), slice(1, None)) if key == "both" else slice(1, None)
            torch.testing.assert_close(x[rows], bare[key][rows])
        own["c"][0] = own["both"][:, 0] = math.nan


def test_an_index_that_names_the_kept_row_all_the_same_is_found_by_a_rehearsal() -> None:
    """What its declaration says is the user's word."""

    def errors(place: int) -> list[str]:
        b = dataclasses.replace(batch(3, 2), place=torch.tensor([4, place]))
        fn = forward(lambda c, s, b: s["c"][b.place])
        report = fg.check(fn, state(), b, donate=0, stage=1, limits=LIMITS, rehearse=True)
        return list(map(str, report.errors))

    assert not errors(5)
    (error,) = errors(0)
    assert "true rows of an index name [0] too, which padding writes to" in error


def test_rows_that_go_on_and_on_count_as_all() -> None:
    """A state that moves by a row at each step is not followed for ever."""

    def around(s: Any, b: Any) -> Any:
        c = s["c"].index_put((b.slot,), b.x)
        return s["c"][9] * 1, {**s, "c": torch.cat([c[1:], c[:1]])}

    with pytest.raises(RowsError, match="returns a row"):
        graphified(around).trace(state(), batch=batch(3, 2))
