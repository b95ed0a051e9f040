"""`why_not`: where a graph comes nearest to a pattern that it has nowhere, and what is in the way.

A pattern that never matches says nothing by itself: a dtype is cast in between, an op has another
overload or one argument more than one thinks, somebody else reads what is inside.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import fx

from fngraph.core.kinds import checked
from fngraph.fx.nodes import line_of
from fngraph.passes.pattern import (
    EITHER_WAY,
    Call,
    Either,
    Item,
    Name,
    in_the_way,
    keywords,
    match,
    tries,
)


class _Near(NamedTuple):
    """How far a node is a pattern.

    Attributes:
        found: calls of the pattern that were found.
        why: what is in the way; "": nothing.
        known: what its names stand for.
    """

    found: int
    why: str
    known: dict[str, Any]


@checked
def why_not(pattern: Any, graph: fx.Graph, keeps: Sequence[str] = ()) -> str:
    """Where `graph` comes nearest to `pattern`, and what is in the way there; "" where it matches.

    For the notes of a pass, `Rewritten(graph, 0, (why_not(PATTERN, graph),))`, or to print.

    Args:
        keeps: as for `match`.
    """
    best, at = _Near(0, "", {}), None
    for node in graph.nodes:
        if match(pattern, node, keeps) is not None:
            return ""
        near = _whole(pattern, node, keeps)
        if near.found > best.found:
            best, at = near, node
    if at is None:
        return f"no node calls {_said(pattern)}"
    return f"nearest at {at.name} ({line_of(at)}): {best.why}"


def _whole(pattern: Any, node: fx.Node, keeps: Sequence[str]) -> _Near:
    """How far a node is the pattern; where it is, why it may not be replaced."""
    near = _near(pattern, node, {})
    if near.why:
        return near
    for found in tries(pattern, node):
        return near._replace(why=in_the_way(found, [found[label] for label in keeps]))
    return near._replace(why="its parts fit, but not together")


def _near(pattern: Any, x: Any, known: dict[str, Any]) -> _Near:
    if isinstance(pattern, Name):
        if pattern.name in known and known[pattern.name] is not x and known[pattern.name] != x:
            first = known[pattern.name]
            return _Near(0, f"{pattern.name!r} is {first} in one place and {x} in another", known)
        return _Near(0, "", known | {pattern.name: x})
    if isinstance(pattern, Either):
        return _best(_near(option, x, known) for option in pattern.options)
    if isinstance(pattern, Item):
        if isinstance(x, fx.Node) and x.target is operator.getitem and x.args[1] == pattern.number:
            return _near(pattern.of, x.args[0], known)
        return _Near(0, f"{_said(pattern)} is looked for, and it is {_call(x)}", known)
    if isinstance(pattern, Call):
        return _called(pattern, x, known)
    if isinstance(pattern, list | tuple) and isinstance(x, list | tuple):
        if len(pattern) != len(x):
            return _Near(0, f"{len(pattern)} values are looked for, and it has {len(x)}", known)
        return _all(pattern, x, known)
    same = type(pattern) is type(x) and pattern == x
    return _Near(0, "" if same else f"{pattern!r} is looked for, and it is {_call(x)}", known)


def _called(pattern: Call, x: Any, known: dict[str, Any]) -> _Near:
    if not isinstance(x, fx.Node) or x.target is not pattern.op:
        return _Near(0, f"{_said(pattern)} is looked for, and it is {_call(x)}", known)
    if len(x.args) != len(pattern.args):
        why = f"{pattern.op} has {len(pattern.args)} arguments there, and is called with {x.args}"
        return _Near(1, why, known)
    given = keywords(x)
    if given != dict(pattern.kwargs):
        why = f"{pattern.op} has the keywords {dict(pattern.kwargs)} there, and is called with "
        return _Near(1, f"{why}{given}", known)
    orders = [x.args, x.args[::-1]] if pattern.op in EITHER_WAY else [x.args]
    near = _best(_all(pattern.args, args, known) for args in orders)
    return near._replace(found=near.found + 1)


def _all(patterns: Sequence[Any], values: Sequence[Any], known: dict[str, Any]) -> _Near:
    """Each by itself: what was found counts behind what is in the way, too, of which the first is
    told."""
    found, why = 0, ""
    for pattern, x in zip(patterns, values):
        near = _near(pattern, x, known)
        found, why, known = found + near.found, why or near.why, near.known
    return _Near(found, why, known)


def _best(several: Iterable[_Near]) -> _Near:
    return max(several, key=lambda near: (near.found, not near.why))


def _said(pattern: Any) -> str:
    if isinstance(pattern, Either):
        return " or ".join(map(_said, pattern.options))
    if isinstance(pattern, Item):
        return f"result {pattern.number} of {_said(pattern.of)}"
    return str(pattern.op) if isinstance(pattern, Call) else repr(pattern)


def _call(x: Any) -> str:
    """A value of a graph, and the line that it comes from."""
    if not isinstance(x, fx.Node):
        return repr(x)
    if x.op == "placeholder":
        return x.meta["leaf"].path if "leaf" in x.meta else f"the argument {x.name}"
    return f"{x.target} ({line_of(x)})"
