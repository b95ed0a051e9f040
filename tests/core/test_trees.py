"""`fngraph.core.trees`: leaves, paths as a person would write them, and what differs."""

import collections
import dataclasses
import functools
import subprocess
import sys
from collections import OrderedDict, namedtuple
from typing import Any

import pytest

from fngraph.core import buffer, host, static, struct, trees
from fngraph.errors import TreeError

Pair = namedtuple("Pair", "first second")


@struct
class Batch:
    tokens: Any = buffer("T", "int64")
    tables: Any = buffer("R B", "int32")
    window: int = static(default=8)
    spec: Any = host()


def treedef(tree):
    return trees.flatten(tree)[1]


def test_flatten_and_back():
    tree = {"b": [1, None], "a": Batch(2, (3, 4), spec="host")}
    leaves, structure = trees.flatten(tree)
    assert leaves == [1, 2, 3, 4]  # dicts in their own order; None is structure
    assert trees.flatten(tree, lambda node: node == (3, 4))[0] == [1, 2, (3, 4)]
    again = trees.unflatten(structure, [10, 20, 30, 40])
    assert (again["b"], again["a"].tokens, again["a"].tables) == ([10, None], 20, (30, 40))


def test_map_leaves():
    mapped = trees.map_leaves(lambda leaf: -leaf, Pair(1, Batch(2, [3])))
    assert (mapped.first, mapped.second.tokens, mapped.second.tables) == (-1, -2, [-3])


@pytest.mark.parametrize(
    ("tree", "paths"),
    [
        (7, ["x"]),
        ({"layers": [{"wq": 1}, {"wq": 2}]}, ["x['layers'][0]['wq']", "x['layers'][1]['wq']"]),
        (Pair(1, Batch(2, 3)), ["x.first", "x.second.tokens", "x.second.tables"]),
        ((), []),
    ],
)
def test_paths_read_as_python(tree, paths):
    assert trees.paths(treedef(tree), "x") == paths


def test_children_are_structures():
    assert trees.children(treedef((1, [2, 3]))) == [treedef(1), treedef([2, 3])]
    assert trees.children(treedef(1)) == []


# --- what differs ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "got", "lines"),
    [
        ({"a": 1, "b": 2}, {"a": 1}, ["  x['b']: missing"]),
        ({"a": 1}, {"a": 1, "c": 3}, ["  x['c']: a leaf that was not there before"]),
        ({"a": 1}, {"a": [1, 2]}, ["  x['a']: expected a tensor, got a container of 2 leaves"]),
        (
            Pair(1, 2),
            Pair(1, Pair(3, 4)),
            ["  x.second: expected a tensor, got a container of 2 leaves"],
        ),
        (
            {"a": 1, "a2": 2, "c": 3},
            {"a": {"b": 1}, "d": 4, "e": 5},
            [
                "  x['a']: expected a tensor, got a container of 1 leaves",
                "  x['a2']: missing",
                "  x['c']: missing",
                "  x['d']: a leaf that was not there before",
                "  x['e']: a leaf that was not there before",
            ],
        ),
    ],
)
def test_differences_name_each_path(expected, got, lines):
    assert trees.differences(treedef(expected), treedef(got), "x") == lines


def test_a_container_is_not_what_only_begins_alike():
    expected, got = treedef({"a": 1}), treedef(Pair(1, 2))
    assert trees.differences(expected, got, "first") == [
        "  first['a']: missing",
        "  first.first: a leaf that was not there before",
        "  first.second: a leaf that was not there before",
    ]


@pytest.mark.parametrize(
    ("expected", "got", "line"),
    [
        ([1, 2], (1, 2), "x: expected a list of 2 parts, got a tuple of 2 parts"),
        ({"a": [1, (2, 3)]}, {"a": [1, [2, 3]]},
         "x['a'][1]: expected a tuple of 2 parts, got a list of 2 parts"),
        ([1, None], [1, ()], "x[1]: expected None, got a tuple of 0 parts"),
        ({"a": 1, "b": [2]}, {"a": 1, "b": {0: 2}},
         "x['b']: expected a list of 1 part, got a dict of 1 part"),
    ],
)  # fmt: skip
def test_containers_of_equal_paths_are_named_at_their_place(expected, got, line):
    assert trees.differences(treedef(expected), treedef(got), "x") == [f"  {line}"]


def test_static_parts_are_shown_whole():
    assert trees.differences(treedef(Batch(1, 2)), treedef(Batch(1, 2, window=9)), "x") == [
        f"  x: expected {treedef(Batch(1, 2))}, got {treedef(Batch(1, 2, window=9))}"
    ]


# --- structs by name ------------------------------------------------------------------------------


def test_a_struct_of_its_own_names_finds_where_each_leaf_sits():
    names = trees.unflatten_struct(Batch, ["tokens", "tables"], None)
    assert type(names) is Batch and vars(names) == {"tokens": "tokens", "tables": "tables"}


def test_static_fields_come_from_the_example():
    example = Batch(1, [2, 3], window=4, spec="host")
    names = trees.unflatten_struct(Batch, ["tokens", "tables"], example)
    assert trees.flatten(names) == (["tokens", "tables"], treedef(Batch(0, 0, window=4)))
    assert example.tokens == 1


@pytest.mark.parametrize(
    ("tree", "values", "outer"),
    [
        ((1, [2, 3]), ["a", "b"], ("a", "b")),
        ({"x": (1, 2)}, ["a"], {"x": "a"}),
        (7, ["a"], "a"),
    ],
)
def test_unflatten_one_level(tree, values, outer):
    assert trees.unflatten_one_level(treedef(tree), values) == outer


@pytest.mark.parametrize(
    ("like", "tree", "ordered"),
    [
        ({"b": 0, "a": 0}, {"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([{"b": 0, "a": {2: 0, "1": 0}}], [{"a": {"1": 3, 2: 4}, "b": 2}],
         [{"b": 2, "a": {2: 4, "1": 3}}]),
        ({"b": None, "a": (0, 0)}, {"a": (1, 2), "b": None}, {"b": None, "a": (1, 2)}),
        ({"b": 0, "a": 0}, {"a": 1, "c": 2}, None),
        ({"b": 0, "a": 0}, OrderedDict(a=1, b=2), None),
        ({"b": 0, "a": [0]}, {"a": (1,), "b": 2}, None),
        ({"b": 0, "a": None}, {"a": 1, "b": 2}, None),
    ],
)  # fmt: skip
def test_the_order_of_keys_is_structure_and_can_be_put_right(like, tree, ordered):
    """Where it is all that differs; else the tree stays as it is."""
    assert treedef(like) != treedef(tree)
    back = trees.ordered_as(tree, treedef(like))
    assert back is tree if ordered is None else repr(back) == repr(ordered)
    text = "\n".join(trees.differences(treedef(like), treedef(tree), "t"))
    assert ("in another order" in text) == (ordered is not None)


def test_a_difference_in_order_names_the_first_key():
    (text,) = trees.differences(treedef({"b": 0, "a": 0}), treedef({"a": 1, "b": 2}), "t")
    assert text == (
        "  t['b']: t['a'] is in its place: a dict has its keys in another order, and forward goes "
        "by that. Pass them in the order that was traced"
    )


# --- dataclasses, which become nodes when they are first seen -------------------------------------


def make(frozen: bool = False, **namespace: Any) -> type:
    """A fresh dataclass of two fields, and one that its constructor does not take."""
    late = dataclasses.field(init=False, default=0)
    fields = [("a", Any), ("b", Any, None), ("late", Any, late)]
    cls = dataclasses.make_dataclass("Pair", fields, frozen=frozen, namespace=namespace)
    cls.__module__ = "users"
    return cls


@pytest.mark.parametrize("frozen", [False, True])
def test_a_dataclass_is_a_node_once_it_is_registered(frozen: bool):
    cls = make(frozen)
    tree = {"x": cls(1, cls(2, 3))}
    assert len(trees.flatten(tree)[0]) == 1
    assert trees.register_dataclasses(tree) is True
    leaves, treedef = trees.flatten(tree)
    assert leaves == [1, 2, 3, 0, 0]  # fields in order, the inner one's among them
    assert trees.paths(treedef, "t")[:3] == ["t['x'].a", "t['x'].b.a", "t['x'].b.b"]
    back = trees.unflatten(treedef, [5, 6, 7, 8, 9])["x"]
    assert (back.a, back.b.a, back.b.b, back.b.late, back.late) == (5, 6, 7, 8, 9)
    assert type(back) is cls
    assert trees.register_dataclasses(tree) is False  # nothing new


class Array:
    """What a tensor looks like to core."""

    shape = dtype = ()


def test_a_dataclass_is_made_again_as_it_was_whatever_its_constructor_does():
    def work(self: Any) -> None:
        self.a, self.late = self.a * 2, "late"  # as a field
        self.scale, self.parts = 0.5, [Array()]  # as what is none

    cls = make(__post_init__=work)
    made = cls(1, 2)
    assert trees.register_dataclasses([made])
    leaves, treedef = trees.flatten([made])
    assert leaves == [2, 2, "late", made.parts[0]]
    assert trees.paths(treedef, "t")[2:] == ["t[0].late", "t[0].parts[0]"]
    (back,) = trees.unflatten(treedef, [3, 4, 5, 6])
    assert vars(back) == {"a": 3, "b": 4, "late": 5, "scale": 0.5, "parts": [6]}
    made.scale = 0.25
    assert trees.flatten([made])[1] != treedef


def test_what_a_dataclass_computes_when_asked_is_computed_again():
    twice = functools.cached_property(lambda self: self.a * 2)
    cls = make(twice=twice)
    twice.__set_name__(cls, "twice")
    made = cls(1, 2)
    trees.register_dataclasses([made])
    before = trees.flatten(made)[1]
    assert made.twice == 2 and trees.flatten(made)[1] == before
    assert trees.unflatten(before, [3, 4, 0]).twice == 6


def test_what_is_no_users_dataclass_stays_a_leaf():
    cls = make()
    assert trees.register_dataclasses([cls, 3, "x", None]) is False  # a class is no instance
    ours = make()
    ours.__module__ = "fngraph.core.limits"
    assert trees.register_dataclasses([ours(1)]) is False
    assert len(trees.flatten([ours(1)])[0]) == 1


def test_several_dataclasses_at_once():
    one, two = make(), make()
    assert trees.register_dataclasses([one(two(1)), two(2)])
    assert trees.flatten([one(two(1))])[0] == [1, 0, 0]


# --- trees that cannot change ---------------------------------------------------------------------


@struct
class Frozen:
    x: Any
    y: Any = None


@pytest.mark.parametrize(
    ("tree", "frozen"),
    [
        (1, True), ((), True), ((1, (2, 3)), True), (Frozen(1, (2,)), True), (None, True),
        ([], False), ([1], False), ({}, False), ({"a": 1}, False), ((1, [2]), False),
        ((1, {"a": 2}), False), (Frozen(1, [2]), False), (Frozen({"a": 1}), False),
        (collections.OrderedDict(a=1), False), (collections.deque([1]), False),
        ((Frozen(1), Frozen([1])), False),
    ],
)  # fmt: skip
def test_whether_a_leaf_could_be_replaced(tree: Any, frozen: bool):
    assert trees.is_frozen(tree) is frozen


@dataclasses.dataclass
class Output(collections.OrderedDict):  # type: ignore[type-arg]
    """As results of transformers: a dict whose items are its fields."""

    logits: Any = None
    states: Any = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if getattr(self, field.name) is not None:
                self[field.name] = getattr(self, field.name)


def test_a_dataclass_that_is_a_dict_as_well_has_its_items_again():
    trees.register_dataclasses(Output(1.0))
    leaves, treedef = trees.flatten({"a": Output(logits=1.0)})
    assert leaves == [1.0] and trees.paths(treedef, "x") == ["x['a'].logits"]
    again = trees.unflatten(treedef, [2.0])["a"]
    assert type(again) is Output and again == {"logits": 2.0} and again.states is None
    odd = Output(1.0)
    odd["more"] = 2.0
    with pytest.raises(
        TreeError, match="a Output is a dataclass and a dict, and 'more' is an item"
    ):
        trees.flatten(odd)


# --- several threads ------------------------------------------------------------------------------

TOGETHER = """
import dataclasses, sys, threading
from fngraph.core import trees

sys.setswitchinterval(1e-6)
failed = []


def together(call):
    start = threading.Barrier(8)

    def run():
        start.wait()
        try:
            call()
        except BaseException as error:
            failed.append(error)

    running = [threading.Thread(target=run) for _ in range(8)]
    [thread.start() for thread in running]
    [thread.join() for thread in running]


together(lambda: trees.flatten((1, trees.Static(2))))
for _ in range(200):
    new = [dataclasses.make_dataclass(f"A{i}", ["x"])(i) for i in range(3)]
    together(lambda: trees.register_dataclasses(new))
sys.exit(f"{len(failed)} failed: {failed[0]!r}" if failed else 0)
"""


def test_several_threads_may_come_first():
    """optree refuses what is registered twice; a process of its own, where nothing is yet."""
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
