"""Pytrees, through optree: flatten with paths a person would write, and name what differs.

The one place that knows optree's calls; it is imported when first used, which keeps
`import fngraph.core` light (optree alone takes 81 ms).
"""

from __future__ import annotations

import atexit
import collections
import dataclasses
import functools
import threading
from typing import Any

from fngraph.core.structs import NAMESPACE, Exactly
from fngraph.core.text import a, count
from fngraph.errors import TreeError

_FIRST = threading.RLock()
"""Held where something is registered, which is done once: several threads may come first."""


@functools.cache
def _optree() -> Any:
    with _FIRST:
        return _told_optree()


@functools.cache
def _told_optree() -> Any:
    """optree, told to keep the order of dicts' keys in our namespace: functions may go by it, so
    that another order is another structure."""
    import optree

    order = optree.dict_insertion_ordered(True, namespace=NAMESPACE)
    order.__enter__()
    atexit.register(order.__exit__, None, None, None)  # it lasts while it is held
    register: Any = optree.register_pytree_node
    register(Static, lambda x: ((), x.key), lambda key, _: Static(key.values), namespace=NAMESPACE)
    return optree


class Static:
    """An argument without leaves, whose value is structure: another one, another tree."""

    __slots__ = ("key", "value")

    def __init__(self, value: Any) -> None:
        self.value, self.key = value, Exactly(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return repr(self.value)


def flatten(tree: Any, is_leaf: Any = None) -> tuple[list[Any], Any]:
    """Leaves and structure. `None` is structure, not a leaf; what `is_leaf` accepts is one."""
    return _optree().tree_flatten(tree, is_leaf=is_leaf, namespace=NAMESPACE)


def register_dataclasses(tree: Any) -> bool:
    """Make nodes of the dataclasses among the leaves, each field a child. Whether there were any.

    A class is registered once, when it is first seen; what is registered already stays as it is.
    """
    found = False
    while any(map(_is_plain_dataclass, flatten(tree)[0])):
        found = True
        with _FIRST:
            for cls in {type(x) for x in flatten(tree)[0] if _is_plain_dataclass(x)}:
                _register(cls)
    return found


def _is_plain_dataclass(x: Any) -> bool:
    ours = type(x).__module__.partition(".")[0] == "fngraph"  # specs are leaves
    return dataclasses.is_dataclass(x) and not isinstance(x, type) and not ours


def _register(cls: type) -> None:
    """Its fields are children, and so are other attributes with tensors (`__post_init__` may set
    some); the rest of what it has is structure. It is made again as it was, by no code of its own.
    One that is a dict as well (results of transformers) has its fields as items again.

    Raises:
        TreeError: when it is flattened: a dict with items that are no fields of it.
    """
    base: Any = next((b for b in cls.__mro__ if b in (collections.OrderedDict, dict)), object)
    fields = tuple(field.name for field in dataclasses.fields(cls))
    made_again = {
        n for n in dir(cls) if isinstance(getattr(cls, n, None), functools.cached_property)
    }

    def flatten(tree: Any) -> tuple[tuple[Any, ...], Any, tuple[str, ...]]:
        own = getattr(tree, "__dict__", {})
        more = {n: own[n] for n in own if n not in fields and n not in made_again} if own else {}
        names = (*fields, *(name for name, value in more.items() if _has_arrays(value)))
        rest = {name: value for name, value in more.items() if name not in names}
        keys = tuple(tree) if base is not object else ()
        if strange := [key for key in keys if key not in fields]:
            raise TreeError(
                f"a {cls.__name__} is a dataclass and a dict, and {strange[0]!r} is an item and no "
                "field of it. Pass or return one of the two"
            )
        return tuple(getattr(tree, name) for name in names), (names, Exactly(rest), keys), names

    def unflatten(meta: Any, leaves: Any) -> Any:
        names, rest, keys = meta
        new: Any = base.__new__(cls)
        for name, value in (*zip(names, leaves, strict=True), *rest.values.items()):
            object.__setattr__(new, name, value)  # frozen ones too
        for key in keys:
            base.__setitem__(new, key, getattr(new, key))
        return new

    _optree().register_pytree_node(cls, flatten, unflatten, namespace=NAMESPACE)


def _has_arrays(tree: Any) -> bool:
    return any(hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in flatten(tree)[0])


def unflatten(treedef: Any, leaves: Any) -> Any:
    """The tree of `treedef` over `leaves`; host fields of structs come back hidden."""
    return treedef.unflatten(leaves)


def ordered_as(tree: Any, treedef: Any) -> Any:
    """`tree` with the keys of its dicts in the order of `treedef`, if they differ in that alone."""
    leaves, own = flatten(tree)
    (name, order), (wanted, places) = _unordered(own), _unordered(treedef)
    if own == treedef or name != wanted:
        return tree
    values = dict(zip(places, (leaves[i] for i in order)))
    return unflatten(treedef, [values[i] for i in range(len(leaves))])


def _unordered(treedef: Any, start: int = 0) -> tuple[Any, list[int]]:
    """A structure whatever the order of its dicts' keys, and its leaves in an order to match."""
    parts, order = [], []
    for entry, child in zip(treedef.entries(), treedef.children()):
        parts.append((entry, *_unordered(child, start)))
        start += child.num_leaves
    if treedef.type in (dict, collections.defaultdict):
        parts.sort(key=lambda part: (str(type(part[0])), repr(part[0])))
        level = treedef.type
    else:
        level = treedef.type, treedef.one_level()
    for *_, inner in parts:
        order += inner
    return (level, *((entry, name) for entry, name, _ in parts)), order or (
        [start] if treedef.is_leaf() else []
    )


def paths(treedef: Any, root: str) -> list[str]:
    """How to reach each leaf from a variable called `root`: `params["layers"][0].wq`."""
    return [accessor.codify(root) for accessor in treedef.accessors()]


def children(treedef: Any) -> list[Any]:
    """The structures of the direct children; a leaf has none."""
    return list(treedef.children())


def map_leaves(fn: Any, tree: Any) -> Any:
    """`fn` over each leaf."""
    return _optree().tree_map(fn, tree, namespace=NAMESPACE)


def differences(expected: Any, got: Any, root: str) -> list[str]:
    """Lines that name each path at which two structures differ."""
    want, have = set(paths(expected, root)), set(paths(got, root))
    lines = []
    for path in sorted(want - have):
        inside = {p for p in have if p.startswith((f"{path}[", f"{path}."))}
        have -= inside
        what = (
            f"expected a tensor, got a container of {len(inside)} leaves" if inside else "missing"
        )
        lines.append(f"  {path}: {what}")
    lines += [f"  {path}: a leaf that was not there before" for path in sorted(have - want)]
    if not lines and expected != got and _unordered(expected)[0] == _unordered(got)[0]:
        pairs = zip(paths(expected, root), paths(got, root))
        place = next((f"{a}: {b} is in its place" for a, b in pairs if a != b), root)
        why = "a dict has its keys in another order, and forward goes by that"
        return [f"  {place}: {why}. Pass them in the order that was traced"]
    return lines or [_first_difference(expected, got, root)]


def _first_difference(expected: Any, got: Any, root: str) -> str:
    """A line about the outermost containers that differ, of two structures with the same paths."""
    if expected.type is got.type and expected.num_children == got.num_children:
        below = zip(paths(expected.one_level(), root), children(expected), children(got))
        for path, want, have in below:
            if want != have:
                return _first_difference(want, have, path)
    kinds = _kind(expected), _kind(got)
    wanted, is_now = (expected, got) if kinds[0] == kinds[1] else kinds  # static fields
    return f"  {root}: expected {wanted}, got {is_now}"


def _kind(treedef: Any) -> str:
    """What stands at a place: "a tensor", "a list of 2 parts"."""
    if treedef.is_leaf():
        return "a tensor"
    if treedef.type is type(None):
        return "None"
    return f"{a(treedef.type.__name__)} of {count(treedef.num_children, 'part')}"


def is_frozen(tree: Any) -> bool:
    """Whether no leaf of a tree can be replaced: tuples and structs, all the way down."""
    if isinstance(tree, tuple) or hasattr(type(tree), "__fngraph_roles__"):
        return all(map(is_frozen, tree if isinstance(tree, tuple) else vars(tree).values()))
    return not isinstance(tree, dict | list) and not children(flatten(tree)[1])


def unflatten_struct(cls: type, names: Any, example: Any) -> Any:
    """An `fg.struct` whose children are their own names: to find where each leaf sits.

    Static fields are those of `example`, where there is one.
    """
    new: Any = object.__new__(cls)
    new.__dict__.update(vars(example) if example is not None else {})
    new.__dict__.update({name: name for name in names})
    return new


def unflatten_one_level(treedef: Any, values: Any) -> Any:
    """The outermost container of `treedef` over its direct children; a leaf is its own."""
    level = treedef.one_level()
    return values[0] if level is None else level.unflatten(values)
