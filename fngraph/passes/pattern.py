"""Patterns over a traced graph: what a fusion looks for, and whether it may be replaced there.

A pattern is a tree of calls whose leaves are names:

    x, eps = name("x"), name("eps")
    scale = call(aten.rsqrt, call(aten.add, call(aten.mean, call(aten.pow, x, 2), [-1], True), eps))
    found = match(call(aten.mul, x, scale), node)      # {"x": node of x, "eps": 1e-05}, or None

`either(...)` tries several, `aten.add` and `aten.mul` of two arguments match either way around. A
name that comes twice is the same value both times.

What a trace writes in place is not seen in such a tree. So `match` gives nothing where a value
inside of the match is read by somebody else, or where memory that its ops read is written between
the first of them and the last: by an in-place op, a view's, or a primitive's `out`.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.kinds import checked
from fngraph.core.text import did_you_mean, expect
from fngraph.errors import PassError
from fngraph.fx.generators import has_effect
from fngraph.fx.nodes import is_tensor, line_of, mutates, storages_written
from fngraph.passes.overloads import check_arguments, meant, named, overload_of
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import OpOverload

aten = torch.ops.aten
EITHER_WAY = (aten.add.Tensor, aten.mul.Tensor)


class Name(NamedTuple):
    """A leaf of a pattern: any argument, a node or a number."""

    name: str


class Call(NamedTuple):
    """A call of an op.

    Attributes:
        label: a name by which the node of the call is found too; "": none.
    """

    op: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    label: str = ""


class Either(NamedTuple):
    """The first of several patterns that matches."""

    options: tuple[Any, ...]


class Item(NamedTuple):
    """One of several results of a call."""

    of: Any
    number: int


def name(text: str) -> Name:
    """Any argument, found as `text`."""
    return Name(text)


def call(op: Any, *args: Any, label: str = "", **kwargs: Any) -> Call:
    """A call of `op`, with arguments that are patterns or equal.

    Raises:
        PassError: no op, or one of several overloads; arguments that no call of it has.
    """
    op = overload_of(op)
    check_arguments(op, args, kwargs)
    return Call(op, args, kwargs, label)


def either(*options: Any) -> Either:
    """Whichever of these comes first."""
    return Either(options)


def item(of: Any, index: int) -> Item:
    """Result number `index` of a call that has several."""
    return Item(of, index)


@dataclasses.dataclass(frozen=True, eq=False)
class Found:
    """A match.

    Attributes:
        values: what each name and label stands for.
        inside: the nodes that the match is made of, in the graph's order; the last is its root.
    """

    values: Mapping[str, Any]
    inside: tuple[fx.Node, ...]

    def __getitem__(self, key: str) -> Any:
        """What a name or a label stands for.

        Raises:
            PassError: the pattern has none such.
        """
        if key not in self.values:
            known = [x for x in self.values if not x.startswith(_CALL)]
            raise PassError(
                f"the pattern has no name or label {key!r}; it has {', '.join(known) or 'none'}."
                f"{did_you_mean(key, known)}"
            )
        return self.values[key]


def match(pattern: Any, node: fx.Node, keeps: Sequence[str] = ()) -> Found | None:
    """What the names of a pattern stand for, if `node` is it and may be replaced; else None.

    Args:
        keeps: labels of calls whose value is replaced too, and so may be read by others.
    """
    _check_node(node)
    for found in tries(pattern, node):
        if not in_the_way(found, [found[label] for label in keeps]):
            return found
    return None


def tries(pattern: Any, node: fx.Node) -> Iterator[Found]:
    """Every way in which a node is the pattern, whoever else reads what is inside."""
    for values, nodes in _tries(pattern, node, {}, ()):
        yield Found(values, tuple(sorted(dict.fromkeys(nodes))))


def in_the_way(found: Found, keeps: Sequence[fx.Node] = ()) -> str:
    """Why what looks like a pattern may not be replaced; "": it may."""
    inside, kept = found.inside, {found.inside[-1], *keeps}
    if any(x.meta.get("custom") for x in inside):
        return "it is inside of a primitive that was inlined, which takes care of padding itself"
    for x in inside:
        for user in x.users if x not in kept else ():
            if user not in inside:
                return f"{x.name} is read by {user.name} ({line_of(user)}) as well"
    return "what it reads is written in between" if is_written_between(inside) else ""


_CALL = "call "  # and the id of a pattern: the node that it stands for
State = tuple[dict[str, Any], tuple[fx.Node, ...]]


def _tries(
    pattern: Any, x: Any, known: dict[str, Any], inside: tuple[fx.Node, ...]
) -> Iterator[State]:
    """Every way in which `x` is the pattern."""
    if isinstance(pattern, Name):
        if pattern.name not in known:
            yield known | {pattern.name: x}, inside
        elif known[pattern.name] is x or (not isinstance(x, fx.Node) and known[pattern.name] == x):
            yield known, inside
    elif isinstance(pattern, Either):
        for option in pattern.options:
            yield from _tries(option, x, known, inside)
    elif isinstance(pattern, Item):
        if isinstance(x, fx.Node) and x.target is operator.getitem:
            if x.args[1] == pattern.number:
                yield from _tries(pattern.of, x.args[0], known, (*inside, x))
    elif isinstance(pattern, Call):
        key = f"{_CALL}{id(pattern)}"
        if key in known:
            if known[key] is x:
                yield known, inside
        elif isinstance(x, fx.Node) and x.target is pattern.op:
            if len(x.args) == len(pattern.args) and keywords(x) == dict(pattern.kwargs):
                known = known | {key: x} | ({pattern.label: x} if pattern.label else {})
                orders = [x.args]
                if pattern.op in EITHER_WAY:
                    orders.append(x.args[::-1])
                for args in orders:
                    yield from _all(pattern.args, args, known, (*inside, x))
    elif isinstance(pattern, list | tuple) and isinstance(x, list | tuple):
        if len(pattern) == len(x):
            yield from _all(pattern, x, known, inside)
    elif type(pattern) is type(x) and pattern == x:
        yield known, inside


def keywords(node: fx.Node) -> dict[str, Any]:
    """Those of a call, without what `x.type_as(y)` says of a device and a layout that x has."""
    given = dict(node.kwargs)
    if node.target is aten._to_copy.default and is_tensor(node.args[0]):
        value = node.args[0].meta["val"]  # type: ignore[union-attr]
        for key, own in (("device", value.device), ("layout", value.layout)):
            if given.get(key) == own:
                del given[key]
    return given


def _all(
    patterns: Sequence[Any], args: Sequence[Any], known: dict[str, Any],
    inside: tuple[fx.Node, ...],
) -> Iterator[State]:  # fmt: skip
    if not patterns:
        yield known, inside
        return
    for found, nodes in _tries(patterns[0], args[0], known, inside):
        yield from _all(patterns[1:], args[1:], found, nodes)


def is_written_between(inside: Sequence[fx.Node], until: fx.Node | None = None) -> bool:
    """Whether anything writes what the nodes read, of one another too, from the first of them to
    the last, or to `until`."""
    near = {x for node in inside for x in node.all_input_nodes}
    memory = {storage_key(x.meta["val"]) for x in near if is_tensor(x)}
    last = until or inside[-1]
    return writes_between(inside[0], last, memory) or writes_any(last, memory)


def writes_between(first: fx.Node, until: fx.Node, memory: set[int]) -> bool:
    """Whether `first` or a node behind it, ahead of `until`, writes one of these storages."""
    node = first
    while node is not until:
        if writes_any(node, memory):
            return True
        node = node.next
    return False


def writes_any(node: fx.Node, memory: set[int]) -> bool:
    """Whether a node writes one of these storages."""
    if not mutates(node):
        return False
    return not storages_written([node]).isdisjoint(memory)


# --- putting something else there -----------------------------------------------------------------


def replace(graph: fx.Graph, found: Found, op: Any, args: Sequence[Any], *labels: str) -> bool:
    """Put one call of `op` in the place of a match, and take out what nobody reads any more.

    It stands before the first of the values that it replaces, and takes over their metas: where
    they come from, and what they are in memory, if the op gives such. Results of an op that has
    several are in the order of `labels`.

    Args:
        labels: of the calls that are replaced; left out: the root of the match.

    Returns:
        whether it could: no argument comes only after the first of those values.

    Raises:
        PassError: no op, arguments that are not several, labels that the pattern does not have.
    """
    _check_call(op, args)
    old = [found[label] for label in labels] or [found.inside[-1]]
    first = min(old)
    needed: list[fx.Node] = []
    fx.map_arg(tuple(args), needed.append)
    if any(not x < first for x in needed):
        return False
    with graph.inserting_before(first):
        new = graph.call_function(op, tuple(args))
        results = [new]
        if len(old) > 1:
            new.meta = dict(old[-1].meta) | {"val": tuple(x.meta["val"] for x in old)}
            results = [graph.call_function(operator.getitem, (new, i)) for i in range(len(old))]
    for one, node in zip(old, results):
        node.meta = dict(one.meta)
        one.replace_all_uses_with(node)
    for node in reversed(found.inside):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
    return True


def insert(graph: fx.Graph, before: fx.Node, op: Any, args: Sequence[Any]) -> fx.Node:
    """A call of `op` before a node, with its metas but for the value, which is worked out later."""
    _check_call(op, args)
    with graph.inserting_before(before):
        new = graph.call_function(op, tuple(args))
    new.meta = {key: value for key, value in before.meta.items() if key != "val"}
    return new


def _check_call(op: Any, args: Any) -> None:
    if not isinstance(op, OpOverload) and op is not operator.getitem:
        raise PassError(f"{named(op)} is no op with its overload. Write {meant(op)}")
    if not isinstance(args, list | tuple):
        raise PassError(f"the arguments of {named(op)} are {args!r}: pass several, (found['x'],)")


@checked
def put(graph: fx.Graph, found: Found, value: fx.Node) -> None:
    """Let all that reads the root of a match read `value`, and take out what nobody reads."""
    found.inside[-1].replace_all_uses_with(value)
    for node in reversed(found.inside):
        if not node.users and not has_effect(node):
            graph.erase_node(node)


# --- what a value is ------------------------------------------------------------------------------


def _check_node(x: fx.Node) -> fx.Node:
    if not isinstance(x, fx.Node):
        expect(fx.Node, "a node of the graph, whose value is a tensor", node=x)
    return x


def sizes(x: fx.Node) -> tuple[Any, ...]:
    """Its sizes, as numbers or as expressions in the trace's symbols, which compare without asking
    what they are."""
    return tuple(map(_plain, _check_node(x).meta["val"].shape))


def strides(x: fx.Node) -> tuple[Any, ...]:
    """Its strides, likewise."""
    return tuple(map(_plain, _check_node(x).meta["val"].stride()))


def _plain(size: Any) -> Any:
    return size if isinstance(size, int) else size.node.expr


def is_dense(x: fx.Node) -> bool:
    """Whether it lies as a new tensor of its shape does."""
    step: Any = 1
    for size, stride in zip(reversed(sizes(x)), reversed(strides(x))):
        if size != 1 and stride != step:
            return False
        step = step * size
    return True


def dtype_of(x: Any) -> Any:
    """The dtype of a node's tensor; None: it is no tensor."""
    return x.meta["val"].dtype if is_tensor(x) else None
