"""Trees beyond those of test_graphify.py: dataclasses, registered classes, other containers.

Each as a held, a donated and a staged argument, and as an output.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any

import optree
import pytest
import torch
import toys
from torch import Tensor, nn

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import FieldError, OutputError, TreeError

MODES = ["NONE", "PIECEWISE", "FULL"]


@dataclasses.dataclass
class Plain:
    """Registered nowhere."""

    w: Any
    extra: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    """Neither its fields nor its dict can be set."""

    w: Any
    extra: Any = None


@dataclasses.dataclass
class Checked:
    """Made anew by its own constructor, with a field that it computes itself."""

    w: Any
    twice: Any = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.w


class Registered:
    """Registered with optree for everyone."""

    def __init__(self, w: Any, extra: Any) -> None:
        self.w, self.extra = w, extra


class Ours(Registered):
    """Registered with optree in fngraph's namespace alone."""


def _split(x: Any) -> Any:
    return (x.w, x.extra), None, ("w", "extra")


for _cls, _namespace in ((Registered, optree.registry.__GLOBAL_NAMESPACE), (Ours, "fngraph")):
    optree.register_pytree_node(
        _cls, _split, lambda _, children, cls=_cls: cls(*children), namespace=_namespace,
        path_entry_type=optree.GetAttrEntry,
    )  # fmt: skip


@fg.struct
class Struct:
    """A struct that holds what it is given."""

    w: Any
    extra: Any


def table() -> Tensor:
    return torch.linspace(-1, 1, toys.V * 2).view(toys.V, 2)


TREES = {
    "dataclass": lambda: Plain(table()),
    "frozen dataclass": lambda: Frozen(table(), [table(), None]),
    "dataclass in dataclass": lambda: Plain({"a": Frozen(table())}, (Plain(table()),)),
    "registered": lambda: Registered(table(), {"none": None}),
    "registered in the namespace": lambda: Ours(table(), None),
    "dataclass in registered in struct": lambda: Struct(Registered(Plain(table()), None), ()),
    "OrderedDict": lambda: collections.OrderedDict(z=table(), a=torch.ones(3)),
    "defaultdict": lambda: collections.defaultdict(list, w=table()),
    "deque": lambda: collections.deque([table(), torch.ones(2)]),
    "keys of several kinds": lambda: {1: table(), "a": None, (2, 3): torch.ones(1)},
    "a torch result": lambda: table().max(1),
    "None alone beside": lambda: [None, {"w": table()}, None],
}


def first(tree: Any) -> Tensor:
    """The first floating leaf with a row a token of the vocabulary."""
    return next(x for x in toys.leaves(tree) if len(x) == toys.V and x.is_floating_point())


def grown(tree: Any) -> Any:
    return trees.map_leaves(lambda x: x + 1, tree)


@pytest.mark.sampled(12)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", TREES)
def test_a_tree_held_donated_and_returned(what: str, modes: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = first(p)
        x = (x if x.dim() == 2 else x[:, None])[b.token_ids] * first(s).sum()
        return trees.unflatten(trees.flatten(p)[1], [x] * len(toys.leaves(p))), grown(s)

    p, s = TREES[what](), {"s": TREES[what]()}
    trees.register_dataclasses((p, s))
    fast = fg.graphify(
        forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES
    )
    for batch in (toys.batch(3, 2), toys.decode(2)):
        want, after = toys.bare(forward, p, s, batch)
        got, back = fast(p, s, batch)
        assert back is s and type(got) is type(p)
        toys.assert_trees((got, s), (want, after))
    assert fast.stats.share(modes) == 1


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("what", TREES)
def test_a_tree_staged_by_exact_shapes(what: str, modes: str):
    fast = fg.graphify(lambda w, xs: (grown(xs), first(xs) * w), modes=modes, stage="xs")
    three = torch.tensor(3.0)
    for _ in range(2):
        xs = TREES[what]()
        got = fast(three, xs)
        toys.assert_trees(got, (grown(xs), first(xs) * 3))
        assert type(got[0]) is type(xs)
    assert fast.stats.steps == 2 and fast.stats.share(modes) == 1
    assert len(fast.steps) == 1  # the class became a node before the key was made


# --- dataclasses ----------------------------------------------------------------------------------


def test_a_dataclass_seen_for_the_first_time_works_in_every_place():
    @dataclasses.dataclass
    class New:
        w: Any

    @dataclasses.dataclass
    class Result:
        x: Any
        none: Any = None

    def forward(p: Any, s: Any, b: Any) -> Any:
        return Result(p.w[b.token_ids] + s.w), New(s.w + 1)

    fast = fg.graphify(
        forward, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES, modes="FULL"
    )
    p, s, batch = New(table()), New(torch.zeros(2)), toys.batch(3)
    for i in range(2):
        got, back = fast(p, s, batch)
        assert back is s and type(got) is Result and got.none is None
        assert torch.equal(got.x, p.w[batch.token_ids] + i) and s.w.eq(i + 1).all()
    assert "New(w=float32[11, 2]@cpu)" in repr(fg.like(p))


def test_a_dataclass_with_a_constructor_of_its_own():
    fast = fg.graphify(lambda w, xs: Checked(xs.w * w), stage="xs")
    got = fast(torch.tensor(2.0), Checked(table()))
    assert torch.equal(got.w, table() * 2) and torch.equal(got.twice, got.w)


@dataclasses.dataclass
class Scaled:
    """Its constructor is no copy: each time it scales, and it keeps what is no field."""

    w: Any

    def __post_init__(self) -> None:
        self.w, self.turned, self.scale = self.w * 2, self.w.t(), 0.5


@pytest.mark.parametrize("modes", MODES)
def test_a_dataclass_whose_constructor_does_not_repeat(modes: str):
    def forward(p: Any, s: Any, b: Any) -> Any:
        return p.w[b.token_ids] * p.scale + p.turned.sum(), Scaled(s.w * 0.5 + 1)

    fast = fg.graphify(
        forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=toys.SIZES
    )
    p, s = Scaled(table()), Scaled(torch.zeros(2, 2))
    p.scale = 3.0
    want = table()[toys.batch(3).token_ids] * 6 + table().sum()
    for i in range(3):
        out, back = fast(p, s, toys.batch(3))
        torch.testing.assert_close(out, want)
        assert back is s and s.w.eq(2 * (i + 1)).all() and s.turned.eq(i + 1).all()
    p.scale = 4.0
    with pytest.raises(TreeError, match="p differs in structure"):
        fast(p, s, toys.batch(3))


def test_static_numbers_that_are_equal_are_traced_each():
    @fg.struct
    class Power:
        x: Any
        k: Any = fg.static()

    fast = fg.graphify(lambda w, xs: (xs.x * w) / xs.k, stage="xs")
    w = torch.ones(1)
    for k in (0.0, -0.0, 2, 2.0, 0.0):
        assert torch.equal(fast(w, Power(torch.ones(2), k)), torch.ones(2) / k)
    held = fg.graphify(lambda p, x: p.x / p.k * x, stage="x")
    held(Power(torch.ones(2), 0.0), torch.ones(2))
    with pytest.raises(TreeError, match=r"expected .*\(0\.0,\).*got .*\(-0\.0,\)"):
        held(Power(torch.ones(2), -0.0), torch.ones(2))


def test_errors_name_the_path_through_a_dataclass():
    fast = fg.graphify(lambda p, xs: xs * p.w, stage="xs")
    fast(Frozen(torch.ones(2)), torch.ones(2))  # from now on torch knows the class
    fast = fg.graphify(lambda p, xs: xs * p.w, stage="xs")
    with pytest.raises(TreeError, match=r"p\.extra is an int.*fg\.static\(\)"):
        fast(Plain(torch.ones(2), 3), torch.ones(2))
    fast(Plain(torch.ones(2)), torch.ones(2))
    with pytest.raises(TreeError, match=r"p\.extra: a leaf that was not there before"):
        fast(Plain(torch.ones(2), torch.ones(2)), torch.ones(2))
    with pytest.raises(TreeError, match=r"p differs in structure"):
        fast(Frozen(torch.ones(2)), torch.ones(2))


# --- the order of keys ----------------------------------------------------------------------------


def stacked(tree: Any) -> Tensor:
    """What goes by the order of a dict."""
    return torch.stack(list(tree.values()))


def test_a_dict_in_another_order_is_another_structure():
    one, two, w = torch.ones(2), torch.full((2,), 2.0), torch.tensor(1.0)
    fast = fg.graphify(lambda w, xs: stacked(xs) * w, stage="xs")
    for xs in ({"b": one, "a": two}, {"a": two, "b": one}, {"a": one, "b": two}):
        assert torch.equal(fast(w, xs), stacked(xs))
    assert len(fast.steps) == 2
    held = fg.graphify(lambda p, x: stacked(p) * x, stage="x")
    assert torch.equal(held({"b": one, "a": two}, w), stacked({"b": one, "a": two}))
    with pytest.raises(TreeError, match=r"p\['b'\]: p\['a'\] is in its place.*order that was"):
        held({"a": two, "b": one}, w)


def test_a_dict_in_another_order_is_taken_where_forward_goes_by_its_keys():
    """A second trace says so, once for each order; held and donated, called and bound."""
    traced: list[list[str]] = []

    def forward(p: Any, s: Any, x: Any) -> Any:
        traced.append([*p, *s])
        return p["b"] * x - p["a"], {"m": s["m"] + p["b"], "n": s["n"] - x}

    fast = fg.graphify(forward, donate="s", stage="x")
    ones = lambda k: torch.full((2,), float(k))  # noqa: E731
    p, s, want = {"b": ones(7), "a": ones(3)}, {"n": ones(0), "m": ones(0)}, 0
    turned = dict(reversed(p.items())), dict(reversed(s.items()))
    for given, state in ((p, s), (turned[0], s), (p, turned[1]), turned, (p, s)):
        want += 1
        out, back = fast(given, state, ones(2))
        assert back is state and out.tolist() == [11, 11]
        assert s["m"].tolist() == [7 * want] * 2 and s["n"].tolist() == [-2 * want] * 2
    assert traced == [["b", "a", "n", "m"], ["a", "b", "n", "m"], ["b", "a", "m", "n"]]
    compiled = fast.trace(p, s, batch=ones(2)).split().lower().compile()
    out, _ = compiled.capture(*turned)(turned[1], ones(2))
    assert out.tolist() == [11, 11]
    with pytest.raises(TreeError, match=r"missing"):
        fast({"a": p["a"], "c": p["b"]}, s, ones(2))


@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("whole", [False, True])
def test_state_may_come_back_in_another_order(whole: bool, modes: str):
    """The caller's own dict comes back, in the caller's order."""

    def forward(s: Any, xs: Any) -> Any:
        new = {"a": s["a"] + xs, "b": {"y": s["b"]["y"] * 2, "x": s["b"]["x"] + stacked(s["b"])[0]}}
        return new if whole else (stacked(s["b"]) + xs, new)

    make = lambda: {"b": {"x": torch.ones(1), "y": torch.full((1,), 3.0)}, "a": torch.zeros(1)}  # noqa: E731
    fast, s, want = fg.graphify(forward, modes=modes, donate="s", stage="xs"), make(), make()
    for _ in range(2):
        got, expected = fast(s, torch.ones(1)), forward(want, torch.ones(1))
        new = expected if whole else expected[1]
        want = {"b": {k: new["b"][k] for k in "xy"}, "a": new["a"]}
        assert (got if whole else got[1]) is s
        toys.assert_trees(s, want)
        toys.assert_trees([] if whole else got[0], [] if whole else expected[0])


def test_new_values_may_come_in_any_order():
    p = {"b": torch.ones(2), "a": torch.zeros(2)}
    step = fg.graphify(lambda p, x: p["b"] * x - p["a"], stage="x").bind(p)
    step = step.capture(batch=torch.ones(2), progress=False)
    step.rebind(p={"a": torch.full((2,), 5.0), "b": torch.full((2,), 7.0)})
    assert p["b"].eq(7).all() and step(torch.ones(2)).eq(2).all()


# --- None leaves, and what is no tree -------------------------------------------------------------


def test_a_none_that_comes_or_goes_is_another_structure():
    fast = fg.graphify(lambda p, xs: xs if p["bias"] is None else xs + p["bias"], stage="xs")
    fast2 = fg.graphify(lambda p, xs: xs["x"] * p if xs["y"] is None else xs["y"] * p, stage="xs")
    x, one = torch.ones(2), torch.tensor(1.0)
    assert torch.equal(fast({"bias": x}, x), x + 1)
    with pytest.raises(TreeError, match=r"p\['bias'\]: missing"):
        fast({"bias": None}, x)
    assert torch.equal(fast2(one, {"x": x, "y": None}), x)  # staged: another key
    assert torch.equal(fast2(one, {"x": x, "y": x * 5}), x * 5)
    assert len(fast2.steps) == 2


class Loose(dict):
    """A dict that optree does not know."""


NO_TREES = {
    "a subclass of dict": lambda: Loose(w=torch.ones(2)),
    "a module": lambda: nn.Linear(2, 2),
    "a set": lambda: {torch.ones(2)},
    "a generator": lambda: (x for x in [torch.ones(2)]),
    "a size": lambda: torch.Size([2]),
    "a dtype": lambda: torch.float32,
}


@pytest.mark.parametrize("what", NO_TREES)
def test_what_is_no_tree_of_tensors_is_named(what: str):
    leaf = NO_TREES[what]()
    fast = fg.graphify(lambda p, xs: xs + 1, stage="xs")
    with pytest.raises(TreeError, match=rf"p\['x'\] is an? {type(leaf).__name__}, not a tensor"):
        fast({"x": leaf}, torch.ones(2))
    out = fg.graphify(lambda xs: {"x": leaf, "y": xs + 1}, stage="xs")
    with pytest.raises((OutputError, fg.errors.ClosureError), match=r"output\['x'\]"):
        out(torch.ones(2))


# --- structs in a batch ---------------------------------------------------------------------------


@fg.struct
class Inner:
    ids: Tensor = fg.buffer("T", "int64")


@fg.struct
class Outer:
    inner: Inner
    spec: fg.BatchSpec = fg.host()


def test_a_struct_in_a_batch_with_a_spec_is_refused_by_name():
    batch = Outer(Inner(torch.tensor([1, 2])), fg.BatchSpec(2, 1))
    with pytest.raises(FieldError, match=r"Outer\.inner does not say how it is staged.*fg\.buffer"):
        fg.graphify(lambda w, b: w[b.inner.ids], stage="b")(table(), batch)


def test_structs_in_structs_are_staged_by_exact_shapes():
    fast, w = fg.graphify(lambda w, xs: Struct(w[xs.w.w], xs.extra[0] * 2), stage="xs"), table()
    for ids in ([1, 2], [3, 4], [5]):
        xs = Struct(Struct(torch.tensor(ids), None), (torch.ones(len(ids)),))
        got = fast(w, xs)
        assert torch.equal(got.w, w[ids]) and torch.equal(got.extra, torch.ones(len(ids)) * 2)
    assert len(fast.steps) == 2 and fast.stats.share("FULL") == 1
