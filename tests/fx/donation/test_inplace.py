"""Donated leaves: a new value ends up in the leaf's buffer, in place where it may.

The table says how and why, of functional updates and of what forward writes itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from typing import Any

import donated
import pytest
import torch
import toys
from donated import total
from torch import Tensor

import fngraph as fg
from fngraph.errors import DonationError
from fngraph.fx import schemas
from fngraph.fx.donation.table import donate
from fngraph.fx.leaves import storage_key

N, M = 6, 4


def state() -> dict[str, Tensor]:
    """Vectors a, b, c; a matrix m and its like in bfloat16, h; counts n; a mask q; a column z."""
    return {
        "a": torch.arange(N) * 0.37 + 0.5, "b": torch.arange(N) * 2.1, "c": torch.arange(N) - 3.3,
        "m": torch.arange(N * M).view(N, M) / 7, "h": torch.arange(N * M).view(N, M).bfloat16() / 7,
        "n": torch.arange(N), "q": torch.arange(N) % 3 == 0, "z": torch.arange(N)[:, None] * 1.3,
    }  # fmt: skip


def rows(b: Any) -> Tensor:
    """A row of `m` for each token of the batch, -1 where it is padding."""
    return torch.where(b.slot_mapping >= 0, b.token_ids % N, N - 1)


def real_slots(b: Any) -> Tensor:
    """Where the batch's tokens go; padding goes to slot 0."""
    return torch.where(b.slot_mapping >= 0, b.slot_mapping, 0)


def at(*rows: int) -> Any:
    """An index of `m`, as index_put takes it."""
    return (torch.tensor(rows),)


# name -> (leaves that are updated in place, leaves that are copied, the function), see donated.case
TABLE: dict[str, tuple[str, str, Any]] = {
    # --- one op that has a form in place
    "index_put": ("m", "", lambda s, t: (
        (m := s.m.index_put((torch.arange(2),), t + torch.ones(2, M))).sum(), {"m": m})),
    "index_put_of_the_old_rows": ("m", "", lambda s, t: (
        old := s.m[[0, 2]], {"m": s.m.index_put(at(1, 3), old * t)})),
    "index_put_with_a_mask": ("m", "", lambda s, t: {"m": s.m.index_put((s.q,), t * 1.0)}),
    "index_add": ("n", "", lambda s, t: (
        (n := s.n.index_add(0, rows(s.batch), (s.batch.slot_mapping >= 0).long())) * 2, {"n": n})),
    "index_copy": ("m", "", lambda s, t: (
        (m := s.m.index_copy(0, torch.tensor([4, 1]), t * torch.ones(2, M)))[1], {"m": m})),
    "slice_scatter": ("m", "", lambda s, t: {"m": s.m.slice_scatter(s.m[:2] * t, 0, 2, 6, 2)}),
    "select_and_diagonal_scatter": ("m", "", lambda s, t: (
        (m := s.m.select_scatter(t * torch.ones(N), 1, 2)) * 1,
        {"m": torch.diagonal_scatter(m, t * torch.ones(M - 1), 1)})),
    "one_row_copied_to_another": ("m", "", lambda s, t: {"m": s.m.select_scatter(s.m[4], 0, 1)}),
    "where": ("a b c", "", lambda s, t: (
        (a := torch.where(s.q, s.a, t)) * 1,
        {"a": a, "b": torch.where(s.q, t * 1.0, s.b), "c": torch.where(s.c > 0, s.c, -s.c)})),
    "decays": ("a b", "", lambda s, t: {"a": s.a * 0.9 + t, "b": s.b - 0.1 * s.c}),
    "in_the_second_operand": ("a b c", "", lambda s, t: {
        "a": (g := torch.ones(N) * t) + 0.9 * s.a, "b": g - s.b, "c": 2.0 ** s.c}),
    "lerp_addcmul_addcdiv": ("a b c", "", lambda s, t: {
        "a": torch.lerp(s.a, g := torch.ones(N) * t, 0.1),
        "b": torch.addcmul(g, s.b, s.b, value=0.5), "c": torch.addcdiv(s.c, g, g + 1)}),
    "clamp_and_masks": ("a n q h", "", lambda s, t: {
        "a": s.a.clamp(0.6, 2).masked_fill(s.q, 7), "q": ~s.q | (s.n > 2), "n": (s.n + t) % 5,
        "h": torch.relu(s.h - 1.0)}),
    "matrix_products_added": ("m", "", lambda s, t: {
        "m": torch.addmm(s.m, s.z, torch.ones(1, M) * t)}),
    "triangle": ("m", "", lambda s, t: {"m": (s.m + t).tril()}),
    "squared": ("a", "", lambda s, t: (s.a.sum(), {"a": s.a * s.a})),
    "twice_what_it_was": ("a", "", lambda s, t: {"a": s.a * 0.5 + s.a * t}),
    # --- chains and views
    "updated_twice": ("m", "", lambda s, t: (
        (m := (first := s.m.index_put(at(0), t * 1.0)).index_put(at(1), first.sum())).mean(),
        {"m": m})),
    "both_sides_of_a_primitive": ("a b", "", lambda s, t: (
        doubled := toys.double(a := s.a + 1), {"a": a * t, "b": s.b + doubled})),
    "into_a_primitive_that_writes_it": ("a", "", lambda s, t: (
        toys.double(s.b, a := s.a * t) + 1, {"a": a})),
    "through_a_flat_view": ("m", "", lambda s, t: (
        (flat := s.m.view(-1).index_add(0, torch.tensor([3, 7]), torch.ones(2)))[3] * 1,
        {"m": flat.view(N, M)})),
    "through_a_transpose": ("m", "", lambda s, t: {
        "m": s.m.t().index_copy(0, torch.tensor([1]), s.a[None]).t()}),
    "cloned_and_returned": ("", "", lambda s, t: {
        "m": s.m.clone(), "a": s.a.to(torch.float32, copy=True)}),
    "a_primitive_makes_it": ("a", "", lambda s, t: {"a": toys.double(s.b + s.a)}),
    "an_output_is_the_new_value": ("a", "", lambda s, t: (
        (a := s.a + t, a[1:], a.view(2, 3).t()), {"a": a})),
    "each_reads_the_other_in_a_good_order": ("a b", "", lambda s, t: {
        "b": (b := s.b + s.a), "a": s.a * 2 + b}),
    # --- written by forward itself
    "nothing_changes": ("", "", lambda s, t: (s.a * 2, {})),
    "written_and_returned": ("a m", "", lambda s, t: (
        (s.a.add_(t), s.m[1:3, ::2].fill_(7) * 2), {})),
    "index_add_in_place": ("n", "", lambda s, t: (
        s.n.index_add_(0, rows(s.batch), (s.batch.slot_mapping >= 0).long()) * 1, {})),
    "written_through_a_view": ("a", "", lambda s, t: (
        s.a.view(-1)[1:].mul_(3).sum(), {"a": s.a.view(N)})),
    "an_output_sees_the_new_value": ("a", "", lambda s, t: ((s.a[1:3], s.a.mul_(10)), {})),
    "written_and_then_made": ("a", "", lambda s, t: ((a := s.a.add_(t) * 2) * 1, {"a": a})),
    "reads_after_the_write_of_another": ("a b", "", lambda s, t: (
        s.b.mul_(2) * 1, {"a": s.b + s.a})),
    "written_by_a_primitive": ("b", "", lambda s, t: (toys.double(s.a, s.b, 3.0) + 1, {})),
    # --- made of nothing that is in the buffer
    "overwritten": ("a m n z", "", lambda s, t: {
        "a": torch.tanh(s.b), "m": s.z @ s.z[:M].t(), "n": s.n.new_ones(N) * 3,
        "z": torch.full((N, 1), 2.0)}),
    "reset": ("a b n", "", lambda s, t: (
        s.a.sum(), {"a": torch.zeros_like(s.a), "b": torch.zeros(N), "n": torch.arange(N)})),
    "recurrent": ("z", "", lambda s, t: (
        (z := torch.tanh(torch.full((N, N), 0.1) @ s.z + s.a[:, None])) * 1, {"z": z})),
    "the_old_ones_shape_after_the_new_value": ("a", "", lambda s, t: (
        new := s.a + t, (torch.zeros_like(s.a) + s.a.new_ones(N) * t, {"a": new}))[1]),
    "in_another_shape": ("z", "", lambda s, t: {
        "z": (torch.full((2, N), 0.1) @ torch.ones(N, 3)).view(N, 1)}),
    "from_another_dtype": ("a h", "", lambda s, t: {
        "a": (s.n * 2).float(), "h": (s.h.float() * 1.01).bfloat16()}),
    "a_dim_of_one_that_came_and_went": ("z", "", lambda s, t: {"z": (s.z.t() * 2).t()}),
    "through_a_wider_dtype": ("n", "", lambda s, t: {"n": (s.n.float() * 1.5 + 1).long()}),
    "a_middle_value_is_returned_and_the_last_made_apart": ("a", "", lambda s, t: (
        first := s.a * 2, {"a": first + t})),
    "stacked_rows": ("m", "", lambda s, t: {
        "m": torch.stack([row * i for i, row in enumerate(s.m.unbind())])}),
    # --- which need a copy
    "rolled": ("", "a", lambda s, t: {"a": s.a.roll(1)}),
    "shifted_within": ("", "m", lambda s, t: {"m": s.m.slice_scatter(s.m[:-1], 0, 1)}),
    "ring_by_cat": ("", "m", lambda s, t: (
        s.m * 1, {"m": torch.cat([s.m[2:], t * torch.ones(2, M)])})),
    "swapped": ("", "a b", lambda s, t: {"a": s.b, "b": s.a}),
    "a_ring": ("", "a b c", lambda s, t: {"a": s.b, "b": s.c, "c": s.a}),
    "shifted_from_what_is_overwritten": ("", "a b c", lambda s, t: {
        "a": torch.full((N,), 1.0) * t, "b": s.a, "c": s.b}),
    "one_becomes_the_other": ("a", "b", lambda s, t: {"b": s.a.add_(1)}),
    "replaced_and_the_written_one_returned": ("", "a", lambda s, t: (s.a.add_(1), {"a": s.a * 2})),
    "becomes_a_part_of_another": ("", "a", lambda s, t: {"a": s.m[:, 2]}),
    "becomes_a_view_of_itself": ("", "m", lambda s, t: {"m": s.m.view(M, N).t()}),
    "becomes_a_constant": ("", "a", lambda s, t: {"a": torch.tensor([1.0, 2, 3, 4, 5, 6])}),
    "around_a_primitive": ("", "a b", lambda s, t: (
        (doubled := toys.double(s.a + 1)) + s.b, {"a": s.b, "b": doubled})),
    "swapped_and_changed": ("b", "a", lambda s, t: {"a": s.b + 1, "b": s.a + 2}),
    "shifted_along": ("c", "a b", lambda s, t: {
        "a": s.b, "b": s.c * 1.0, "c": torch.ones(N) * t}),
    "the_old_value_is_returned": ("", "a", lambda s, t: (s.a, {"a": s.a * t})),
    "a_view_of_the_old_value_is_returned": ("", "m", lambda s, t: (
        s.m.t()[1], {"m": s.m.index_put(at(1), t * 1.0)})),
    "a_middle_value_is_returned": ("", "a", lambda s, t: (
        first := s.a.index_put(at(0), t * 1.0), {"a": first.index_put(at(1), t * 2.0)})),
    "rows_less_their_first": ("", "m", lambda s, t: {"m": s.m - s.m[:1]}),
    "adds_its_own_rows": ("", "m", lambda s, t: {
        "m": s.m.index_add(0, torch.arange(N).flip(0), s.m)}),
    "indexed_by_itself": ("", "n", lambda s, t: {"n": s.n.index_put((s.n,), 5 - s.n)}),
    "put_from_itself": ("", "m", lambda s, t: {
        "m": s.m.index_copy(0, torch.tensor([0, 1]), s.m[1:3])}),
    "times_its_transpose": ("", "m", lambda s, t: {
        "m": torch.cat([s.m[:M] * s.m[:M].t(), s.m[M:]])}),
    "through_a_wider_shape": ("", "z", lambda s, t: {"z": (s.z + s.m)[:, :1]}),
    "softmax_and_sort": ("", "m", lambda s, t: {
        "m": s.m.softmax(-1).sort(descending=True).values}),
    "scattered_by_strides": ("", "m", lambda s, t: {
        "m": torch.as_strided_scatter(s.m, torch.zeros(3), (3,), (2,), 1)}),
    "two_outputs_need_the_old_value": ("", "a", lambda s, t: (
        (s.a + (a := s.a + 1), s.a - a), {"a": a})),
    "strided_by_hand": ("", "m", lambda s, t: (
        (m := s.m * 2).as_strided((3,), (2,), 1) + 1, {"m": m})),
    "two_leaves_of_one_new_value": ("a", "b", lambda s, t: {"a": (new := s.a + s.b), "b": new}),
    "expanded": ("", "m", lambda s, t: {"m": s.z.expand(N, M)}),
    "a_sum_expanded": ("", "a", lambda s, t: {"a": (s.a.sum() + t).expand(N)}),
}  # fmt: skip
CASES = {name: donated.case(fn, state(), *how) for name, (*how, fn) in TABLE.items()}


def case(in_place: str, copied: str = "") -> Any:
    """As a row of the table, for a function of several statements."""

    def register(fn: Any) -> Any:
        CASES[fn.__name__] = donated.case(fn, state(), in_place, copied)

    return register


@case("m a")
def scatters(s: Any, t: Any) -> Any:
    index = (torch.arange(N) * 5 % N)[:, None].expand(N, M)
    m = s.m.scatter(0, index, s.m * 3).scatter_add(1, index % M, s.m + t)
    a = s.a.scatter_reduce(0, torch.tensor([1, 1, 2]), s.b[:3], "amax")
    return {"a": a, "m": torch.scatter(m, 0, torch.zeros(1, 1).long(), 5.0)}


@case("a")
def updated_twenty_times(s: Any, t: Any) -> Any:
    a = s.a
    for i in range(20):
        a = torch.tanh(a * 1.1 + i)
    return a.sum(), {"a": a}


@case("m")
def through_more_dims(s: Any, t: Any) -> Any:
    m = s.m.unflatten(1, (2, 2)).permute(1, 0, 2)[None]
    m = m.select_scatter(m[:, 0] * 2, 1, 1)
    return m.sum(), {"m": m[0].permute(1, 0, 2).flatten(1)}


@case("m")
def cloned_and_then_assigned(s: Any, t: Any) -> Any:
    m = s.m.clone()
    m[1:3] = t
    m[:, 0] += s.a
    return m * 1, {"m": m}


@case("m")
def cloned_and_read_before_the_assignment(s: Any, t: Any) -> Any:
    m = s.m.clone()
    before = s.m.sum() + s.m[0].sum()
    m.mul_(t).add_(1)
    return before, {"m": m}


@case("a")
def made_and_then_written(s: Any, t: Any) -> Any:
    a = s.a + 1
    a[2:].mul_(t)
    return a * 1, {"a": a}


@case("a")
def read_later_by_an_op_that_nobody_reads(s: Any, t: Any) -> Any:
    a = s.a + 1
    s.a.exp().sum()
    return {"a": a}


@case("", "a")
def the_old_value_is_read_later(s: Any, t: Any) -> Any:
    a = s.a * t
    return s.a.sum(), {"a": a}


@case("", "m")
def a_view_of_the_old_value_is_read_later(s: Any, t: Any) -> Any:
    row = s.m.view(-1)[3:9]
    m = s.m.index_put(at(1), t * 1.0)
    return row * 2, {"m": m}


@case("", "a")
def written_and_then_replaced(s: Any, t: Any) -> Any:
    new = s.a + 1
    s.a.zero_()
    return new * 2, {"a": new}


@case("m", "a")
def becomes_a_part_of_another_that_is_written(s: Any, t: Any) -> Any:
    column = s.m[:, 2]
    s.m.add_(1)
    return s.m.sum(), {"a": column}


@case("", "a")
def clone_is_written_and_the_old_value_read(s: Any, t: Any) -> Any:
    a = s.a.clone()
    a.mul_(t)
    return s.a.sum(), {"a": a}


@case("", "a")
def clone_kept_and_the_leaf_written(s: Any, t: Any) -> Any:
    old = s.a.clone()
    s.a.mul_(t)
    return s.a * 1, {"a": old}


@case("", "a")
def clone_written_from_the_old_value(s: Any, t: Any) -> Any:
    a = s.a.clone()
    a[1:] = s.a[:-1]
    return {"a": a}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
def test_the_table_says_how(name: str):
    fn, how = CASES[name]
    assert donated.how(fn, state()) == how


@pytest.mark.sampled(30)
@pytest.mark.parametrize("modes", donated.MODES)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_function_and_buffers_stay(name: str, modes: str):
    donated.check(CASES[name][0], state(), modes)


# --- what the table says --------------------------------------------------------------------------


def reasons(fn: Any) -> dict[str, str]:
    """Leaf to why."""
    return {row.path[3:-2]: row.reason for row in donated.traced(fn, state()).donation.rows}


def test_every_op_that_writes_a_leaf_is_named_with_its_line():
    def fn(s: Any, b: Any) -> Any:
        m = s["m"].index_put((torch.tensor([0]),), total(b) * 1.0)
        return total(b), {**s, "m": m * 2}

    why = reasons(fn)["m"]
    assert why.startswith("by aten.index_put_.default (") and "aten.mul_.Tensor (" in why
    assert why.count("test_inplace.py:") == 2
    assert reasons(fn)["a"] == "returned as it came"


@pytest.mark.parametrize(
    ("name", "leaf", "words"),
    [
        ("the_old_value_is_returned", "a", ["aten.mul.Tensor", "forward returns the old value"]),
        ("the_old_value_is_read_later", "a", ["aten.sum", "reads the old value after", "mul"]),
        ("rows_less_their_first", "m", ["aten.sub.Tensor", "still reads the old value"]),
        ("shifted_within", "m", ["slice_scatter", "still reads the old value"]),
        ("rolled", "a", ["aten.roll.default", "no form that works in place"]),
        ("swapped", "a", ["it is s['b']"]),
        ("clone_kept_and_the_leaf_written", "a", ["mul_", "writes the old value after", "clone"]),
        ("expanded", "m", ["expand"]),
        ("strided_by_hand", "m", ["counting from the start of its storage"]),
    ],
)
def test_a_copy_says_what_forced_it(name: str, leaf: str, words: list[str]):
    why = reasons(CASES[name][0])[leaf]
    assert [w for w in words if w not in why] == [], why


def test_leaves_that_torch_ops_write_are_saved_around_the_warm_up():
    def fn(s: Any, b: Any) -> Any:
        toys.double(s["a"], s["b"])
        written_after = s["c"] * 2
        toys.double(s["a"], written_after)
        return total(b), {**s, "c": written_after, "m": s["m"] * 2, "z": s["z"].flip(0)}

    rows = donated.traced(fn, state()).donation.rows
    assert {r.path[3:-2]: r.null_slots for r in rows} == {
        "a": True, "b": True, "c": False, "m": False, "h": True, "n": True, "q": True, "z": False,
    }  # fmt: skip
    s = state()
    s["b"].zero_()  # the primitive has no null slots, unlike attention
    before = toys.clone(s)
    bound = donated.graphified(fn, "FULL_AND_PIECEWISE").bind({})
    captured = bound.capture(s, progress=False, batch=toys.batch(2))
    assert len(captured) == len(captured.table)
    assert all(torch.equal(s[k], before[k]) for k in ("c", "m", "z"))


# --- copies of large leaves -----------------------------------------------------------------------

MIB = 2**18  # float32 elements


def specs(**mib: int) -> Any:
    """Specs of leaves on the CPU, so many MiB large, without the memory."""
    big = fg.like({name: torch.empty(n * MIB, device="meta") for name, n in mib.items()})
    return {k: dataclasses.replace(v, device=torch.device("cpu")) for k, v in big.items()}


def roll_all(s: Any, b: Any) -> Any:
    return total(b), {name: x.roll(1) for name, x in s.items()}


def test_a_large_leaf_that_would_be_copied_is_an_error():
    with pytest.raises(DonationError) as error:
        donated.traced(roll_all, specs(k=65, small=1, v=128))
    text = str(error.value)
    assert "2 large donated leaves, 193.0 MiB" in text
    assert "s['k'], 65.0 MiB: aten.roll.default makes it (" in text and "s['v'], 128.0 MiB" in text
    assert "small" not in text and "test_inplace.py:" in text and "allow_copies=True" in text


@pytest.mark.parametrize(
    ("allowed", "size", "ok"),
    [
        (True, 1000, True), (False, 1, False), (2**20, 1, True), (2**20 - 1, 1, False),
        (0, 1, False), (None, 64, True), (None, 65, False), ("not given", 64, True),
    ],
)  # fmt: skip
def test_copies_are_allowed_by_choice_else_up_to_64_mib(allowed: Any, size: int, ok: bool):
    options = {} if allowed == "not given" else {"allow_copies": allowed}
    with contextlib.nullcontext() if ok else pytest.raises(DonationError, match="allow_copies"):
        assert donated.how(roll_all, specs(k=size), **options) == {"k": "copied"}


@pytest.mark.parametrize("allowed", [-1, "yes", 0.5])
def test_allow_copies_is_a_choice_or_a_number_of_bytes(allowed: Any):
    with pytest.raises(DonationError, match="a number of bytes"):
        donated.graphified(roll_all, allow_copies=allowed)


def test_a_large_leaf_updated_in_place_is_no_error():
    def fn(s: Any, b: Any) -> Any:
        return total(b), {"k": s["k"].index_put((real_slots(b),), total(b) * 1.0)}

    assert donated.how(fn, specs(k=1000), allow_copies=False) == {"k": "in place"}


def test_the_decorator_takes_the_option():
    @fg.graphify(donate="s", stage="x", allow_copies=False)
    def step(s: Any, x: Any) -> Any:
        return x * 1, s.flip(0)

    with pytest.raises(DonationError, match="24 bytes"):
        step(torch.zeros(6), torch.ones(2))


def test_nothing_as_large_as_the_leaf_is_made():
    """A chain of updates in place takes no memory but the buffer's."""

    def fn(s: Any, b: Any) -> Any:
        k = s["k"].view(-1, 64).index_put((real_slots(b),), total(b) * 1.0)
        k = (k * 0.5 + total(b)).clamp(-1, 1)
        return k[real_slots(b)], {"k": k.view(-1)}

    nodes = donated.traced(fn, specs(k=8)).graph.gm.graph.nodes
    vals = {n: n.meta.get("val") for n in nodes}
    large = {n: x for n, x in vals.items() if isinstance(x, Tensor) and x.numel() == 8 * MIB}
    (leaf,) = (x for n, x in large.items() if n.op == "placeholder")
    assert [n for n, x in large.items() if storage_key(x) != storage_key(leaf)] == []


# --- odd leaves -----------------------------------------------------------------------------------

ODD = {
    "transposed": torch.arange(12.0).view(3, 4).t(),
    "rows with gaps": torch.arange(24.0).view(4, 6)[:, :3],
    "every other element": torch.arange(24.0).view(4, 6)[:, ::2],
    "not at the start": torch.arange(24.0)[12:].view(4, 3),
    "permuted": torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
    "no elements": torch.zeros(0, 3),
    "no dims": torch.tensor(2.5),
    "one element": torch.ones(1, 1, 1),
    "complex": torch.complex(torch.arange(12.0), torch.ones(12)).view(4, 3),
    "half": torch.arange(12.0).half().view(4, 3),
}
UPDATES = {
    "scaled": lambda x, t: x * 0.5 + t,
    "second operand": lambda x, t: t + 0.5 * x,
    "flattened": lambda x, t: x.reshape(-1).mul(2).reshape(x.shape),
    "one row": lambda x, t: x.index_fill(0, torch.tensor([0]), 3.0) if x.numel() > 1 else x + 1,
    "cloned": lambda x, t: x.clone().mul_(3).add_(t),
    "conjugated": lambda x, t: x.conj() if x.is_complex() else -x,
    "flipped": lambda x, t: x.flip(0) if x.dim() else x.neg(),
    "overwritten": lambda x, t: torch.ones(x.shape, dtype=x.dtype) * 2,
}


@pytest.mark.sampled(40)
@pytest.mark.parametrize("modes", ["NONE", "FULL"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("leaf", ODD)
def test_odd_leaves(leaf: str, update: str, modes: str):
    def fn(s: Any, b: Any) -> Any:
        new = UPDATES[update](s["x"], total(b).to(s["x"].dtype))
        return new.sum(), {"x": new}

    fast, want = donated.graphified(fn, modes), {"x": ODD[leaf]}
    s = {"x": laid_out_as(ODD[leaf], ODD[leaf])}
    for batch in (toys.batch(3, 2), toys.decode(2, 0)):
        out, want = fn({"x": laid_out_as(s["x"], want["x"])}, batch)
        got, _ = fast({}, s, batch)
        toys.assert_trees((got, s), (out, want))


@pytest.mark.parametrize(
    ("fn", "how"),
    [
        (lambda s, t: (t * 1, {"x": s.x * 0.5 + t}), "in place"),
        (lambda s, t: (t * 1, {"x": s.x.index_fill(0, torch.tensor([0]), 3.0)}), "in place"),
        (lambda s, t: ((new := s.x * 0.5).sum(), {"x": new}), "copied"),
        (lambda s, t: (t * 1, {"x": torch.softmax(s.x * 0.5, 0)}), "copied"),
        (lambda s, t: (t * 1, {"x": s.x.addmm(torch.ones(4, 2), torch.ones(2, 3))}), "copied"),
    ],
    ids=["scaled", "filled", "scaled and summed", "softmax", "addmm"],
)
def test_rows_with_gaps_are_where_ops_may_round_another_way(fn: Any, how: str):
    """The functional result has no gaps; what is computed in another layout may differ in bits."""
    s = {"x": ODD["rows with gaps"]}
    assert donated.how(donated.case(fn, s, "", "")[0], s) == {"x": how}


def laid_out_as(x: Tensor, values: Tensor) -> Tensor:
    """`values` in the strides of `x`, since sums round by layout."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).copy_(values)


def test_a_leaf_whose_elements_share_memory_is_left_alone():
    s = {"x": torch.zeros(3).expand(2, 3)}
    assert donated.how(lambda s, b: (total(b), {"x": s["x"] + 1}), s) == {"x": "copied"}


# --- models ---------------------------------------------------------------------------------------


def functional_attend(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """`toys.attend`, whose cache is written by index_put before attention reads it."""
    x_TE, kept = params["embed"][batch.token_ids], []
    for layer, kv in zip(params["layers"], cache):
        qkv = (x_TE @ layer["qkv"]).unflatten(-1, (toys.H + 2 * toys.K, toys.D))
        q_THD, k_TKD, v_TKD = qkv.split([toys.H, toys.K, toys.K], dim=1)
        spare = kv[0].shape[0] * toys.S - 1  # padding's slot, which no request has
        slots_T = torch.where(batch.slot_mapping < 0, spare, batch.slot_mapping)
        kv = tuple(
            old.flatten(0, 1).index_put((slots_T,), new).view(old.shape)
            for old, new in zip(kv, (k_TKD, v_TKD))
        )
        out_THD, kv = fg.ops.attention(q_THD, k_TKD, v_TKD, kv, batch)
        x_TE = x_TE + torch.tanh(out_THD.flatten(1) @ layer["out"])
        kept.append(kv)
    return x_TE @ params["head"], tuple(kept)


def cached(layers: int, modes: str = "FULL") -> Any:
    """`functional_attend`, its weights and an empty cache."""
    fast = fg.graphify(
        functional_attend, modes=modes, donate="cache", stage="batch", limits=toys.LIMITS,
        sizes=toys.SIZES,
    )  # fmt: skip
    return fast, toys.attention_params(layers), toys.attention_cache(layers, blocks=5 * toys.B)


@pytest.mark.parametrize("modes", donated.MODES)
def test_a_functional_cache_serves_as_one_written_in_place(modes: str):
    fast, params, cache = cached(2, modes)
    at = [x.data_ptr() for x in toys.leaves(cache)]
    other = toys.clone(cache)
    for batch in (toys.batch(5, 3), toys.decode(2, 5), toys.batch((2, 6), (1, 6), 4)):
        want, other = toys.attend(params, other, batch)
        got, cache = fast(params, cache, batch)
        torch.testing.assert_close(got, want)
        for a, b in zip(toys.leaves(cache), toys.leaves(other)):
            torch.testing.assert_close(a[:-1], b[:-1])
    assert [x.data_ptr() for x in toys.leaves(cache)] == at


def test_layers_with_a_functional_cache_share_their_pieces():
    distinct = []
    for layers in (2, 4, 9):
        fast, params, cache = cached(layers)
        traced = fast.trace(params, cache)
        assert {row.how for row in traced.donation.rows} == {"in place"}
        distinct.append(len(traced.split().distinct))
    assert len(set(distinct)) == 1 and distinct[0] <= 4


@pytest.mark.sampled(0)
def test_24_layers_are_settled_within_half_a_second(monkeypatch: pytest.MonkeyPatch):
    took = []

    def timed(*args: Any) -> Any:
        start = time.process_time()
        table = donate(*args)
        took.append(time.process_time() - start)
        return table

    monkeypatch.setattr("fngraph.tracing.donate", timed)
    fast, params, cache = cached(24)
    rows = fast.trace(params, cache).donation.rows
    assert len(rows) == 48 and {row.how for row in rows} == {"in place"}
    assert took[0] < 0.5


def adamw(params: Any, opt: Any, grads: Any, lr: float = 0.01) -> Any:
    """One step, as a textbook writes it."""
    t = opt["t"] + 1
    m = {k: 0.9 * opt["m"][k] + 0.1 * g for k, g in grads.items()}
    v = {k: 0.999 * opt["v"][k] + 0.001 * g * g for k, g in grads.items()}
    new = {}
    for k, p in params.items():
        step = (m[k] / (1 - 0.9**t)) / ((v[k] / (1 - 0.999**t)).sqrt() + 1e-8)
        new[k] = p * (1 - lr * 0.1) - lr * step
    return new, {"m": m, "v": v, "t": t}


def mlp_loss(params: Any, x: Tensor, y: Tensor) -> Tensor:
    hidden = torch.relu(x @ params["w0"] + params["b0"])
    return ((hidden @ params["w1"] + params["b1"] - y) ** 2).mean()


def train_step(params: Any, opt: Any, xy: Any) -> Any:
    grads, loss = torch.func.grad_and_value(mlp_loss)(params, *xy)
    return *adamw(params, opt, grads), loss


def test_adamw_over_an_mlp_is_in_place_in_every_leaf():
    torch.manual_seed(0)
    params = {"w0": torch.randn(5, 8), "b0": torch.zeros(8), "w1": torch.randn(8, 2)}
    params["b1"] = torch.zeros(2)
    zeros = {k: torch.zeros_like(p) for k, p in params.items()}
    opt = {"m": zeros, "v": toys.clone(zeros), "t": torch.zeros(())}
    fast = fg.graphify(train_step, modes="FULL", donate=("params", "opt"), stage="xy")
    want = toys.clone((params, opt))
    for step in range(5):
        xy = (torch.randn(6, 5), torch.randn(6, 2))
        *want, want_loss = train_step(*want, xy)
        *_, loss = fast(params, opt, xy)
        toys.assert_trees((params, opt), tuple(want))
        assert torch.equal(loss, want_loss), step
    rows = fast.trace(params, opt, batch=xy).donation.rows
    assert len(rows) == 13 and {row.how for row in rows} == {"in place"}, rows


def test_updates_under_vmap_and_grad():
    def fn(s: Any, b: Any) -> Any:
        m = torch.func.vmap(lambda row, x: row * 0.5 + x)(s["m"], s["a"])
        z = s["z"] - 0.1 * torch.func.grad(lambda z: (z**2).sum() * total(b))(s["z"])
        return total(b), {**s, "m": m, "z": z}

    how = donated.how(fn, state())
    assert how["m"] == how["z"] == "in place"
    for modes in donated.MODES:
        donated.check(fn, state(), modes)


# --- forms read off schemas -----------------------------------------------------------------------


def example(kind: str, dtype: torch.dtype) -> Any:
    """An argument for a schema's type; None of the odd ones."""
    if kind == "Tensor":
        x = torch.randn(9, 7)
        return {torch.float32: x, torch.int64: (x * 3).long(), torch.bool: x > 0}[dtype]
    return {"number": 2, "Scalar": 2, "float": 0.5, "int": 1, "bool": False}[kind]


def calls() -> Any:
    """(op, arguments, keyword arguments) for each op that has a form in place and is callable."""
    for name in torch._C._dispatch_get_all_op_names():
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if space != "aten" or packet.startswith("__") or not schemas.is_functional(op):
            continue
        if torch.Tag.nondeterministic_seeded in op.tags:
            continue
        if not (schemas.in_place(op) or (schemas.is_pointwise(op) and schemas.out_form(op))):
            continue
        needed = [a for a in op._schema.arguments if not a.has_default_value()]
        for dtype in (torch.float32, torch.int64, torch.bool):
            with contextlib.suppress(KeyError, RuntimeError, IndexError, TypeError, ValueError):
                args = [example(str(a.type), dtype) for a in needed if not a.kwarg_only]
                kwargs = {a.name: example(str(a.type), dtype) for a in needed if a.kwarg_only}
                yield op, args, kwargs, op(*toys.clone(args), **kwargs)


@pytest.mark.filterwarnings("ignore")
def test_every_form_in_place_gives_the_bits_of_the_functional_one():
    torch.manual_seed(0)
    forms = 0
    for op, args, kwargs, want in calls():
        twin = schemas.in_place(op)
        assert not twin or not schemas.is_pointwise(op) or schemas.is_pointwise(twin), twin
        for i, x in enumerate(args):
            if not isinstance(x, Tensor) or (x.dtype, x.shape) != (want.dtype, want.shape):
                continue
            if twin and i == 0:
                given = toys.clone(args)
                twin(*given, **kwargs)
                torch.testing.assert_close(given[0], want, atol=0, rtol=0, equal_nan=True, msg=op)
                forms += 1
            if schemas.is_pointwise(op) and schemas.out_form(op) and op not in schemas.COPIES:
                given, (form, out) = toys.clone(args), schemas.out_form(op)
                form(*given, **kwargs, **{out: given[i]})
                torch.testing.assert_close(given[i], want, atol=0, rtol=0, equal_nan=True, msg=op)
                forms += 1
    assert forms > 400


def test_forms_are_found_by_schema_alone():
    aten = torch.ops.aten
    assert schemas.in_place(aten.index_put.default) is aten.index_put_.default
    assert schemas.in_place(aten.add.Tensor) is aten.add_.Tensor
    assert schemas.in_place(aten.pow.Scalar) is None  # 2**x, whose twin would be x**2
    assert schemas.in_place(aten.unsqueeze.default) is None  # changes a shape, not a value
    assert schemas.in_place(aten.roll.default) is None
    assert schemas.is_pointwise(aten.__irshift__.Scalar) and schemas.is_pointwise(aten.abs_.default)
    assert not schemas.is_pointwise(aten.cumsum_.default)
    assert schemas.scattered_view(aten.slice_scatter.default) is aten.slice.Tensor
    assert schemas.scattered_view(aten.select_scatter.default) is aten.select.int
    assert schemas.scattered_view(aten.diagonal_scatter.default) is aten.diagonal.default
    assert schemas.scattered_view(aten.as_strided_scatter.default) is None
    assert schemas.scattered_view(aten.scatter.src) is None
    assert schemas.out_form(aten.where.self) == (aten.where.self_out, "out")
    assert schemas.out_form(aten.mm.default) == (aten.mm.out, "out")
    assert schemas.out_form(aten.arange.default) == (aten.arange.out, "out")
    # generated: makes a tensor all the same
    assert schemas.out_form(aten.index_put.default) is None
    assert schemas.fill_form(aten.zeros_like.default) is aten.zeros.out
    assert schemas.fill_form(aten.new_full.default) is aten.full.out
    assert schemas.fill_form(aten.new_empty_strided.default) is None
    assert not schemas.is_functional(torch.ops.fngraph.attention.default)
