"""`fngraph.core.structs`: what each role of a field means, and what is refused."""

import collections
import copy
import dataclasses
import functools
from pathlib import Path
from typing import Any

import optree
import pytest

from fngraph.core import (
    BatchSpec,
    Buffer,
    Dim,
    buffer,
    buffers_of,
    check_declared,
    host,
    host_field,
    static,
    struct,
)
from fngraph.core.structs import Exactly, HiddenHostField, hide_host_field
from fngraph.core.trees import flatten, map_leaves, unflatten
from fngraph.errors import FieldError, HostFieldError


@struct
class Batch:
    """One field of each role."""

    tokens: Any = buffer("T", "int64")
    starts: Any = buffer("R + 1", "int32", pad="stride")
    window: int = static(default=8)
    spec: Any = host()


@struct
class Plain:
    """A struct that stages nothing."""

    x: Any
    name: str = static()


def declare(**fields):
    """A struct of these fields."""
    return struct(type("Made", (), {"__annotations__": dict.fromkeys(fields, Any), **fields}))


# --- as a dataclass -------------------------------------------------------------------------------


def test_a_struct_is_frozen_and_replaced_by_copies():
    batch = Batch([1], [0, 1], spec=BatchSpec(1, 1))
    assert (batch.tokens, batch.starts, batch.window) == ([1], [0, 1], 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.tokens = [2]
    other = dataclasses.replace(batch, tokens=[2])
    assert (other.tokens, other.starts, batch.tokens) == ([2], [0, 1], [1])
    assert Batch([1], [0]).spec is None  # a batch need not have one


def test_type_checkers_know_what_a_struct_is():
    told = struct.__dataclass_transform__
    assert (told | told["kwargs"])["frozen_default"]  # in `kwargs` before Python 3.12
    assert told["field_specifiers"] == (dataclasses.field, buffer, host, static)


def test_structs_compare_by_identity():
    """Comparing tensors would give a tensor."""
    one = Plain(1, "a")
    assert one == one and one != Plain(1, "a")
    assert len({one, Plain(1, "a")}) == 2


# --- as a tree ------------------------------------------------------------------------------------


def test_children_are_leaves_static_fields_are_structure_and_host_fields_are_neither():
    batch = Batch(1, 2, window=3, spec=BatchSpec(1, 1))
    leaves, treedef = flatten(batch)
    assert leaves == [1, 2]
    assert treedef == flatten(Batch(5, 6, window=3))[1]
    assert treedef != flatten(Batch(1, 2, window=4))[1]
    again = unflatten(treedef, [7, 8])
    assert type(again) is Batch
    assert (again.tokens, again.starts, again.window) == (7, 8, 3)
    assert type(again.spec) is HiddenHostField
    assert map_leaves(lambda leaf: leaf * 10, Plain(4, "a")).x == 40


@dataclasses.dataclass(frozen=True)
class Config:
    """What a model may have in a static field."""

    eps: Any


ALIKE = [
    (2, 2.0), (0.0, -0.0), (True, 1), (1 + 0j, 1.0), (0j, -0j), ((1,), (True,)), ((0.0,), (-0.0,)),
    (frozenset([1]), frozenset([True])), (Config(1), Config(1.0)),
    (Config((0.0,)), Config((-0.0,))),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), ALIKE)
def test_static_values_that_are_equal_and_compute_otherwise_are_another_structure(a, b):
    assert a == b
    one, other = (flatten(Batch(1, 2, window=x))[1] for x in (a, b))
    assert one != other and one == flatten(Batch(3, 4, window=a))[1]
    assert hash(one) == hash(flatten(Batch(3, 4, window=a))[1])
    assert repr(unflatten(other, [1, 2]).window) == repr(b)
    assert repr(b) in str(other)


def test_static_values_of_no_hash_count_by_their_identity():
    class Loose:
        __hash__ = None  # type: ignore[assignment]

        def __eq__(self, other: Any) -> bool:
            return True

    one, other = Loose(), Loose()
    of = lambda x: flatten(Batch(1, 2, window=x))[1]  # noqa: E731
    assert of(one) == of(one) != of(other)
    assert of([1, {"a": 2}]) == of([1, {"a": 2}]) != of([1, {"a": 2.0}])


Window = collections.namedtuple("Window", "sizes")


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1], lambda x: x.append(2)),
        (lambda: {"a": [1]}, lambda x: x["a"].append(2)),
        (lambda: ({1}, 2), lambda x: x[0].add(2)),
        (lambda: Window([1]), lambda x: x.sizes.append(2)),
        (lambda: collections.OrderedDict(a=1), lambda x: x.pop("a")),
    ],
)
def test_static_containers_are_as_they_were(make, change):
    """Whoever changes his own: who made the tree, or who was given one of its structure."""
    mine = make()
    treedef = flatten(Batch(1, 2, window=mine))[1]
    change(mine)
    assert flatten(Batch(1, 2, window=mine))[1] != treedef == flatten(Batch(1, 2, window=make()))[1]
    given = unflatten(treedef, [1, 2]).window
    assert given == make() and type(given) is type(make())
    change(given)
    assert unflatten(treedef, [1, 2]).window == make()


class Sizes(tuple):
    """A tuple of the user's own kind."""


class Settled(dict[str, Any]):
    """A dict that nobody writes any more; copies are made by its own rule."""

    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("settled")

    def __copy__(self) -> Any:
        return Settled(self)


@pytest.mark.parametrize("mine", [Sizes([[1]]), Settled(a=1)])
def test_static_containers_of_the_users_own_kind_stay_of_that_kind(mine):
    given = unflatten(flatten(Batch(1, 2, window=mine))[1], [1, 2]).window
    assert given == mine and type(given) is type(mine)


def test_a_struct_takes_exactly_its_children():
    treedef = flatten(Batch(1, 2))[1]
    with pytest.raises(ValueError):
        unflatten(treedef, [7])


def test_structs_are_nodes_for_fngraph_alone():
    batch = Batch(1, 2)
    assert optree.tree_leaves(batch) == [batch]
    assert optree.tree_leaves(batch, namespace="fngraph") == [1, 2]


# --- host fields in forward -----------------------------------------------------------------------


def hidden():
    """The host field of a batch as `forward` finds it."""
    return unflatten(flatten(Batch(1, 2))[1], [1, 2]).spec


USES = {
    "attribute": lambda spec: spec.num_tokens,
    "bool": bool,
    "iter": iter,
    "len": len,
    "item": lambda spec: spec[0],
    "equal": lambda spec: spec == 1,
    "int": int,
    "index": lambda spec: [0][spec],
    "call": lambda spec: spec(1, two=2),
    "add": lambda spec: spec + 1, "radd": lambda spec: 1 + spec, "sub": lambda spec: spec - 1,
    "rsub": lambda spec: 1 - spec, "mul": lambda spec: spec * 2, "rmul": lambda spec: 2 * spec,
    "floordiv": lambda spec: spec // 2, "mod": lambda spec: spec % 2, "div": lambda spec: spec / 2,
    "float": float, "less": lambda spec: spec < 1, "str": str, "format": lambda spec: f"{spec}",
    "isinstance": lambda spec: isinstance(spec, int), "hash": hash,
}  # fmt: skip


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_any_use_of_a_host_field_says_where_and_what_to_read_instead(use):
    with pytest.raises(HostFieldError) as info:
        use(hidden())
    where, _, rest = str(info.value).partition(": ")
    assert Path(where.rpartition(":")[0]).name == Path(__file__).name
    assert rest == (
        "forward reads the host field .spec, which a captured graph would freeze at its value "
        "during capture. Read the counts on the device instead, from a staged leaf that holds "
        'them: fg.buffer("R", "int32")'
    )


def test_a_library_may_ask_for_the_type_of_a_host_field():
    library = eval("lambda spec: isinstance(spec, int)", {"__name__": "torch"})
    assert library(hidden()) is False


def test_a_hidden_host_field_can_be_printed_but_not_hashed():
    assert repr(hidden()) == "<host field .spec, not readable in forward>"
    with pytest.raises(HostFieldError, match=r"reads the host field \.spec"):
        hash(hidden())


# --- declarations ---------------------------------------------------------------------------------


def test_what_a_class_declares():
    assert buffers_of(Batch) == {
        "tokens": Buffer((Dim("T"),), "int64", pad_given=False),
        "starts": Buffer((Dim("R + 1"),), "int32", "stride"),
    }
    assert host_field(Batch) == "spec"
    for cls in (Plain, dict):
        assert buffers_of(cls) == {} and host_field(cls) is None


def test_one_host_field_at_most():
    with pytest.raises(FieldError) as info:
        declare(one=host(), two=host())
    assert str(info.value) == "Made has the host fields ('one', 'two'); at most one is allowed"


def test_a_staged_struct_declares_each_child():
    check_declared(Batch, with_example=True)
    check_declared(declare(tokens=buffer("T", "int64"), spec=host()), with_example=False)
    check_declared(dict, with_example=False)
    for with_example in (True, False):
        with pytest.raises(FieldError) as info:
            check_declared(Plain, with_example)
        assert str(info.value) == (
            "Plain.x does not say how it is staged. Declare its dims and dtype: "
            'x: Tensor = fg.buffer("T", "int64")'
        )


def test_static_fields_need_an_example():
    with pytest.raises(FieldError) as info:
        check_declared(Batch, with_example=False)
    assert str(info.value) == (
        "Batch.window is static, so the class alone does not give the batch's structure. "
        "Pass an example: trace(..., batch=batch), capture(..., batch=batch)"
    )


def test_a_report_goes_on_behind_a_read_with_ones():
    """`fg.check` collects the errors; each read gives a number to go on with."""
    errors: list[Any] = []
    batch = unflatten(flatten(Batch(1, 2))[1], [1, 2])
    hide_host_field(batch, errors.append)
    assert batch.spec.num_tokens == 1 and batch.spec + 1 == 1 and str(batch.spec) == "1"
    assert list(batch.spec) == [1] and bool(batch.spec) is True
    assert copy.deepcopy(batch.spec) is batch.spec
    assert len(errors) == 6  # list() asks for the length too
    assert all(type(e) is HostFieldError for e in errors)
    assert all("reads the host field .spec" in str(e) for e in errors)
    plain = Plain(1, name="x")
    hide_host_field(plain, errors.append)  # has none
    assert plain.x == 1


class Named:
    """Equal by its name, whatever else it holds."""

    def __init__(self, name: str, by: Any) -> None:
        self.name, self.by = name, by

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Named) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    @functools.cached_property
    def long(self) -> str:
        """What is worked out when it is asked for."""
        return self.name * 2


class Real(float):
    """A number that may hold more."""


def held(by: Any) -> Any:
    """A number of one value, which holds another one."""
    number = Real(1.0)
    number.by = by
    return number


def itself(by: Any) -> Any:
    """What holds itself."""
    made = Named("a", [by])
    made.by.append(made)
    return made


@pytest.mark.parametrize("make", [lambda by: Named("a", by), held, lambda by: (Named("a", by),)])
def test_a_value_counts_with_all_that_it_holds(make):
    """Its own equality may leave out what a function goes by."""
    one, other = make(1), make(1.0)
    assert one == other and Exactly([one]) != Exactly([other])
    assert Exactly([one]) == Exactly([make(1)])
    assert hash(Exactly([one])) == hash(Exactly([make(1)]))


def test_a_value_that_holds_itself_is_one():
    value = itself(1)
    assert Exactly([value]) == Exactly([value]) and hash(Exactly([value]))


@pytest.mark.parametrize(("value", "ask"), [(Named("a", 1), lambda x: x.long), (Path("a"), str)])
def test_what_a_value_notes_of_itself_does_not_count(value, ask):
    before = Exactly([value])
    ask(value), hash(value)
    assert Exactly([value]) == before
