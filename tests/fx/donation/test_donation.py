"""Donation: leaf k's new value ends up in leaf k's buffer, and the table says how and why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.errors import AliasError, DonationError

MODES = ["NONE", "PIECEWISE", "FULL"]
N = 5


def state() -> dict[str, Tensor]:
    """Three leaves of one shape, one of another, one of another dtype."""
    return {
        "a": torch.arange(N) + 0.5, "b": torch.arange(N) * 2.0, "c": torch.arange(N) - 3.0,
        "m": torch.arange(N * N).view(N, N).float(), "n": torch.arange(N),
    }  # fmt: skip


def total(b: Any) -> Tensor:
    """A number that depends on the batch's real tokens alone."""
    return torch.where(b.slot_mapping >= 0, b.token_ids, 0).sum()


# name -> (function from (state, batch) to (outputs, new state), how each leaf is updated)
CASES: dict[str, tuple[Callable[[Any, Any], tuple[Any, Any]], dict[str, str]]] = {}


def case(**how: str) -> Any:
    """Register a function, with what its table should say; leaves not named are unchanged."""

    def register(fn: Any) -> Any:
        CASES[fn.__name__] = (fn, {name: how.get(name, "unchanged") for name in state()})
        return fn

    return register


@case()
def nothing_changes(s: Any, b: Any) -> Any:
    return s["a"] * 2, s


@case(a="in place", m="in place")
def in_place(s: Any, b: Any) -> Any:
    s["a"].add_(total(b))
    s["m"][1:3, ::2] = 7
    return s["a"] * 2, s


@case(a="in place")
def in_place_and_returned(s: Any, b: Any) -> Any:
    return s["a"].add_(1), s


@case(a="in place")
def through_a_view(s: Any, b: Any) -> Any:
    s["a"].view(-1)[1:].mul_(3)
    return s["a"].sum(), {**s, "a": s["a"].view(N)}


@case(n="in place")
def index_put_in_place(s: Any, b: Any) -> Any:
    s["n"].index_add_(0, b.token_ids % N, (b.slot_mapping >= 0).long())
    return s["n"] * 1, s


@case(a="in place")
def functional(s: Any, b: Any) -> Any:
    return s["a"].sum(), {**s, "a": s["a"] + total(b)}


@case(a="in place", b="in place", c="in place", m="in place", n="in place")
def all_functional(s: Any, b: Any) -> Any:
    return total(b), {k: v + 1 for k, v in s.items()}


@case(a="copied", b="copied")
def swap(s: Any, b: Any) -> Any:
    return s["a"] + s["b"], {**s, "a": s["b"], "b": s["a"]}


@case(a="copied", b="copied", c="copied")
def ring(s: Any, b: Any) -> Any:
    return total(b), {**s, "a": s["b"], "b": s["c"], "c": s["a"]}


@case(a="copied", b="copied", c="copied")
def shift(s: Any, b: Any) -> Any:
    new = torch.full((N,), 1.0) * total(b)
    return s["c"] * 1, {**s, "a": new, "b": s["a"], "c": s["b"]}


@case(a="copied")
def shift_within(s: Any, b: Any) -> Any:
    return s["a"][-1] * 1, {**s, "a": torch.cat([total(b)[None].float(), s["a"][:-1]])}


@case(m="copied")
def transposed_view(s: Any, b: Any) -> Any:
    return s["m"] * 1, {**s, "m": s["m"].t()}


@case(a="copied")
def flipped(s: Any, b: Any) -> Any:
    return s["a"] * 1, {**s, "a": s["a"].flip(0)}


@case(a="copied")
def an_output_needs_the_old_value(s: Any, b: Any) -> Any:
    return (s["a"], s["a"][1:3], s["a"].view(1, -1)), {**s, "a": s["a"] * 10}


@case(a="in place")
def an_output_sees_the_new_value(s: Any, b: Any) -> Any:
    view = s["a"][1:3]
    s["a"].mul_(10)
    return (view, s["a"]), s


@case(a="copied")
def written_and_then_replaced(s: Any, b: Any) -> Any:
    new = s["a"] + 1
    s["a"].zero_()
    return new * 2, {**s, "a": new}


@case(a="copied")
def replaced_and_the_written_one_returned(s: Any, b: Any) -> Any:
    s["a"].add_(1)
    return s["a"], {**s, "a": s["a"] * 2}


@case(a="in place", b="copied")
def one_becomes_the_other(s: Any, b: Any) -> Any:
    s["a"].add_(1)
    return total(b), {**s, "b": s["a"]}


@case(a="in place", b="copied")
def both_become_the_same(s: Any, b: Any) -> Any:
    new = s["a"] + s["b"]
    return new, {**s, "a": new, "b": new}


@case(a="copied")
def becomes_a_part_of_another(s: Any, b: Any) -> Any:
    return s["m"].sum(), {**s, "a": s["m"][2]}


@case(a="copied", m="in place")
def becomes_a_part_of_another_that_is_written(s: Any, b: Any) -> Any:
    row = s["m"][2]
    s["m"].add_(1)
    return s["m"].sum(), {**s, "a": row}


@case(a="copied")
def a_constant(s: Any, b: Any) -> Any:
    return total(b), {**s, "a": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])}


@case(a="copied")
def expanded(s: Any, b: Any) -> Any:
    return total(b), {**s, "a": (s["a"].sum() + total(b)).expand(N)}


@case(a="copied")
def an_average(s: Any, b: Any) -> Any:
    return s["a"], {**s, "a": 0.9 * s["a"] + 0.1 * s["b"]}


@case(a="in place", b="in place")
def reads_after_the_write_of_another(s: Any, b: Any) -> Any:
    s["b"].mul_(2)
    return s["b"] * 1, {**s, "a": s["b"] + s["a"]}


@case(a="copied", b="copied")
def around_a_primitive(s: Any, b: Any) -> Any:
    doubled = toys.double(s["a"] + 1)
    return doubled + s["b"], {**s, "a": s["b"], "b": doubled}


@case(b="in place")
def by_a_primitive(s: Any, b: Any) -> Any:
    toys.double(s["a"], s["b"], 3.0)
    return s["b"] + 1, s


def forward_of(fn: Any) -> Any:
    """As `forward(p, s, b)`."""
    return lambda p, s, b: fn(s, b)


def graphified(fn: Any, modes: str = "NONE", **options: Any) -> Any:
    """Over the toys' limits."""
    return fg.graphify(
        fn, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES, **options
    )


def table(fn: Any, s: Any) -> dict[str, str]:
    """Path to how, of a trace of `fn(p, s, b)`."""
    traced = graphified(fn).trace({}, s, batch=toys.batch(2))
    return {row.path: row.how for row in traced.donation.rows}


@pytest.mark.parametrize("name", CASES)
def test_the_table_says_how(name: str):
    fn, how = CASES[name]
    assert table(forward_of(fn), state()) == {f"s['{leaf}']": h for leaf, h in how.items()}


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", CASES)
def test_values_are_those_of_the_function_and_buffers_stay(name: str, modes: str):
    fn = forward_of(CASES[name][0])
    fast, s = graphified(fn, modes), state()
    addresses = [x.data_ptr() for x in toys.leaves(s)]
    for step, batch in enumerate((toys.batch(3, 2), toys.decode(2, 0), toys.batch(7, seed=1))):
        want, after = toys.bare(fn, {}, s, batch)
        got, back = fast({}, s, batch)
        assert back is s, step
        toys.assert_trees(got, want)
        toys.assert_trees(s, after)
        assert [x.data_ptr() for x in toys.leaves(s)] == addresses
        spans = {x.untyped_storage().data_ptr() for x in toys.leaves(s)}
        assert not any(x.untyped_storage().data_ptr() in spans for x in toys.leaves(got))


def test_the_table_gives_reasons_with_the_line():
    def fn(p: Any, s: Any, b: Any) -> Any:
        s["a"].add_(1)
        return None, {**s, "b": s["b"].flip(0)}

    donation = graphified(fn).trace({}, state(), batch=toys.batch(2)).donation
    rows = {row.path: row for row in donation.rows}
    assert "add_" in rows["s['a']"].reason and "test_donation.py:" in rows["s['a']"].reason
    assert "flip" in rows["s['b']"].reason and "test_donation.py:" in rows["s['b']"].reason
    text = donation.as_text()
    assert repr(donation) == text and "s['a']" in text and "in place" in text and "copied" in text


def test_null_slots_are_those_that_only_primitives_write():
    def fn(p: Any, s: Any, b: Any) -> Any:
        toys.double(s["a"], s["b"])
        toys.double(s["a"], s["c"])
        s["c"].add_(1)
        return s["b"] * 1, {**s, "m": s["m"] + 1}

    rows = graphified(fn).trace({}, state(), batch=toys.batch(2)).donation.rows
    null = {row.path for row in rows if row.null_slots}
    assert "s['b']" in null and not null & {"s['c']", "s['m']"}


# --- what comes back ------------------------------------------------------------------------------


def refused(fn: Any, *words: str, s: Any = None) -> None:
    """Trace and see a DonationError with all of `words`."""
    with pytest.raises(DonationError) as error:
        graphified(fn).trace({}, state() if s is None else s, batch=toys.batch(2))
    assert [w for w in words if w not in str(error.value)] == [], str(error.value)


def test_a_leaf_that_does_not_come_back():
    refused(lambda p, s, b: (total(b), {k: v for k, v in s.items() if k != "c"}), "'s'", "s['c']")


def test_an_argument_that_does_not_come_back():
    refused(lambda p, s, b: s["a"] * 2, "'s'", "return")


def test_a_container_of_another_kind():
    refused(lambda p, s, b: (total(b), tuple(s.values())), "'s'")


def test_another_shape():
    refused(lambda p, s, b: (total(b), {**s, "a": s["a"][1:] * 2}), "s['a']", "[5]", "[4]")


def test_a_shape_that_varies():
    refused(lambda p, s, b: (total(b), {**s, "a": b.token_ids * 1.0}), "s['a']", "[5]")


def test_another_dtype():
    refused(
        lambda p, s, b: (total(b), {**s, "n": s["n"] * 0.5}), "s['n']", "int64", "float32", ".to("
    )


def test_a_promotion_that_one_may_not_notice():
    refused(
        lambda p, s, b: (total(b), {"h": s["h"] + torch.ones(N)}),
        "s['h']", "bfloat16", "float32", s={"h": torch.zeros(N).bfloat16()},
    )  # fmt: skip


def test_two_parts_that_could_be_meant():
    def fn(p: Any, s: Any, b: Any) -> Any:
        return (s + 1, s + 2)

    refused(fn, "2 parts", "'s'", s=torch.zeros(N))


def test_two_parts_of_which_one_is_the_buffer():
    def fn(p: Any, s: Any, b: Any) -> Any:
        old = s * 1
        return (old, s.add_(1))

    s = torch.zeros(N)
    old, back = graphified(fn, "FULL")({}, s, toys.batch(2))
    assert back is s and s.eq(1).all() and old.eq(0).all()


def test_two_parts_of_which_one_fits():
    s = torch.zeros(N)
    fast = graphified(lambda p, s, b: (s.sum()[None] * 2, s + 1), "FULL")
    out, back = fast({}, s, toys.batch(2))
    assert back is s and out.tolist() == [0]
    out, _ = fast({}, s, toys.batch(2))
    assert s.eq(2).all() and out.tolist() == [2 * N]


def test_the_donated_argument_alone_comes_back():
    for s in (torch.zeros(N), {"a": torch.zeros(N)}, (torch.zeros(N), torch.ones(2))):
        fast = graphified(lambda p, s, b: toys.trees.map_leaves(lambda x: x + total(b), s), "FULL")
        want = toys.trees.map_leaves(lambda x: x + total(toys.batch(3)), s)
        assert fast({}, s, toys.batch(3)) is s
        toys.assert_trees(s, want)


def test_the_donated_argument_first():
    s = {"a": torch.zeros(N)}
    fast = graphified(lambda p, s, b: ({"a": s["a"] + 1}, s["a"] * 2, s["a"] * 3))
    back, two, three = fast({}, s, toys.batch(3))
    assert back is s and s["a"].eq(1).all() and two.eq(0).all() and three.eq(0).all()


def test_an_output_tree_that_is_a_dict_or_a_named_tuple():
    class Out(NamedTuple):
        logits: Any
        state: Any

    def fn(p: Any, s: Any, b: Any) -> Any:
        return Out(s["a"] * 2, {"a": s["a"] + 1})

    s = {"a": torch.zeros(N)}
    out = graphified(fn, "FULL")({}, s, toys.batch(1))
    assert isinstance(out, Out) and out.state is s and out.logits.eq(0).all()
    t = {"a": torch.zeros(N)}
    fast = graphified(lambda p, s, b: {"z": s["a"] * 2, "new": {"a": s["a"] + 1}}, "FULL")
    assert fast({}, t, toys.batch(1))["new"] is t and t["a"].eq(1).all()


@pytest.mark.parametrize("modes", MODES)
def test_several_donated_arguments(modes: str):
    def fn(a: Any, p: Any, b: Any, m: Any) -> Any:
        return m["y"] * p["w"], {"x": a["x"] + m["y"]}, {"y": m["y"].add_(1), "z": m["z"]}

    a, m = {"x": torch.zeros(N)}, {"y": torch.ones(N), "z": torch.ones(1)}
    p = {"w": torch.full((N,), 2.0)}
    fast = fg.graphify(
        fn, modes=modes, donate=("a", 3), stage=2, limits=toys.LIMITS, sizes=toys.SIZES
    )
    for i in range(1, 4):
        out, back_a, back_m = fast(a, p, toys.batch(2), m)
        assert back_a is a and back_m is m
        assert m["y"].eq(1 + i).all() and out.eq(2 * i).all()
    assert a["x"].tolist() == [1 + 2 + 3] * N


@pytest.mark.parametrize("modes", MODES)
def test_two_donated_arguments_of_one_structure_in_either_order(modes: str):
    def same(a: Any, c: Any, b: Any) -> Any:
        return a + 1, c * 2

    def swapped(a: Any, c: Any, b: Any) -> Any:
        return c * 2, a + 1

    for fn in (same, swapped):
        a, c = torch.zeros(N), torch.ones(N)
        fast = fg.graphify(
            fn, modes=modes, donate=("a", "c"), stage="b", limits=toys.LIMITS, sizes=toys.SIZES
        )
        want = fn(a.clone(), c.clone(), None)
        got = fast(a, c, toys.batch(2))
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_an_empty_donated_argument():
    fast = graphified(lambda p, s, b: (b.token_ids + 1, s), "FULL")
    out, back = fast({}, {}, toys.batch(2))
    assert back == {} and torch.equal(out, toys.batch(2).token_ids + 1)


# --- aliases --------------------------------------------------------------------------------------


def shared() -> dict[str, Any]:
    """Ways in which a donated leaf can share its storage."""
    x, m = torch.zeros(N), torch.zeros(2, N)
    return {
        "the same tensor": ({}, {"a": x, "b": x}, ["s['a']", "s['b']"]),
        "a view": ({}, {"a": x, "b": x[1:]}, ["s['a']", "s['b']"]),
        "two rows of one tensor": ({}, {"a": m[0], "b": m[1]}, ["s['a']", "s['b']"]),
        "a held leaf": ({"w": x}, {"a": x}, ["p['w']", "s['a']"]),
        "a view of a held leaf": ({"w": m}, {"a": m[1]}, ["p['w']", "s['a']"]),
    }


@pytest.mark.parametrize("what", shared())
def test_storage_shared_with_a_donated_leaf_is_an_error_at_bind(what: str):
    p, s, words = shared()[what]

    def fn(p: Any, s: Any, b: Any) -> Any:
        return total(b), toys.trees.map_leaves(lambda x: x + 1, s)

    before = toys.clone(s)
    with pytest.raises(AliasError) as error:
        graphified(fn)(p, s, toys.batch(2))
    assert [w for w in [*words, "clone()"] if w not in str(error.value)] == []
    toys.assert_trees(s, before)


@pytest.mark.parametrize("what", shared())
def test_storage_shared_with_a_donated_leaf_is_an_error_at_trace(what: str):
    """DESIGN: "AliasError, at trace and at bind"."""
    p, s, _ = shared()[what]

    def fn(p: Any, s: Any, b: Any) -> Any:
        return total(b), toys.trees.map_leaves(lambda x: x + 1, s)

    with pytest.raises(AliasError):
        graphified(fn).trace(p, s, batch=toys.batch(2))


def test_held_leaves_may_share_their_storage():
    w = torch.rand(2, N)

    def fn(p: Any, s: Any, b: Any) -> Any:
        return p["head"] + p["embed"][1], {"a": s["a"] + 1}

    p = {"embed": w, "head": w[0], "again": w}
    out, _ = graphified(fn, "FULL")(p, {"a": torch.zeros(N)}, toys.batch(2))
    assert torch.equal(out, w[0] + w[1])
