"""What is checked of what a pass has made: that it is a graph, of ops, with the same outside.

Errors name the pass, and show of a graph the lines that it has changed.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.errors import PassError
from fngraph.fx.leaves import same_place
from fngraph.fx.nodes import is_tensor, line_of, operands, results_of, written_by
from fngraph.fx.schemas import draws
from fngraph.passes.overloads import check_call
from fngraph.passes.pattern import sizes
from fngraph.passes.running.copies import Copy
from fngraph.torch_facts.memory import storage_key

SHOWN = 16  # lines of a graph that an error shows


class Rewritten(NamedTuple):
    """What a pass may return in place of a graph alone.

    Attributes:
        matches: how often its pattern was replaced.
        notes: why it was not, where somebody might expect it, a line each.
    """

    graph: fx.Graph
    matches: int
    notes: tuple[str, ...] = ()


# --- what was returned ----------------------------------------------------------------------------


def result_of(name: str, made: Any) -> Rewritten:
    """What a pass has returned, if it is a graph, or says how often it matched.

    Raises:
        PassError: it is something else.
    """
    graph, matches, notes = made if isinstance(made, Rewritten) else (made, -1, ())
    if not isinstance(graph, fx.Graph):
        what = "Return the graph that it was given, edited, or another fx.Graph; or "
        if isinstance(graph, fx.GraphModule):
            what = "Return its .graph; or "
        kind = "None" if graph is None else type(graph).__name__
        raise PassError(
            f"the pass {name!r} returned {kind}. {what}fg.passes.Rewritten(graph, matches)"
        )
    if not isinstance(matches, int):
        raise PassError(
            f"the pass {name!r} says that it matched {matches!r} times. Count them: "
            "fg.passes.Rewritten(graph, matches=sum(done))"
        )
    several = isinstance(notes, list | tuple) and all(isinstance(note, str) for note in notes)
    if not several:
        raise PassError(
            f"the pass {name!r} has notes={notes!r}: expected several texts, notes=(text,)"
        )
    return Rewritten(graph, matches, tuple(notes))


def check_whole(name: str, old: fx.Graph, graph: fx.Graph, copy: Copy) -> None:
    """Raise `PassError` for nodes that read what is not there, or comes after them; for calls of
    what is no op; for other than one output.

    Args:
        copy: what the pass was given of `old`.
    """
    outputs = [n for n in graph.nodes if n.op == "output"]
    if len(outputs) != 1 or not isinstance(outputs[0].args[0], list | tuple):
        raise PassError(
            f"the pass {name!r} has changed the output of forward, which is one node of several "
            "values. Leave that node, and what it reads in its place: "
            "node.replace_all_uses_with(new)"
        )
    try:
        graph.lint()
    except Exception as error:  # fx raises RuntimeError and others
        raise PassError(
            f"the pass {name!r} returned a graph that does not hold together: "
            f"{without_graph(str(error))}. {_fix_of(graph)}. What it has changed:\n"
            f"{changed_lines(old, graph)}"
        ) from None
    for node in graph.nodes:
        if node in copy.calls and copy.is_as_it_was(node):
            continue
        if why := check_call(node):
            raise PassError(f"{_near(node)}: the pass {name!r} {why}")


def _fix_of(graph: fx.Graph) -> str:
    """How to mend nodes that read what comes after them."""
    place = {node: i for i, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        if node in node.all_input_nodes:
            return (
                "A new node that reads the one it replaces must not read itself: "
                "node.replace_all_uses_with(new, delete_user_cb=lambda user: user is not new)"
            )
        if any(place.get(x, -1) > place[node] for x in node.all_input_nodes):
            break
    return "Insert a node before what reads it: with graph.inserting_before(node): ..."


def changed_lines(old: fx.Graph, new: fx.Graph) -> str:
    """The lines of a graph that are others now, at most some of them."""
    before, after = ([_line(node) for node in graph.nodes] for graph in (old, new))
    found = difflib.unified_diff(before, after, lineterm="", n=0)
    marked = [line for line in found if not line.startswith(("---", "+++", "@@"))]
    more = [f"... {count(len(marked) - SHOWN, 'more line')}"] if len(marked) > SHOWN else []
    return "\n".join(marked[:SHOWN] + more)


def _line(node: fx.Node) -> str:
    given = [str(x) for x in node.args] + [f"{key}={x}" for key, x in node.kwargs.items()]
    return f"    {node.name} = {node.target}({', '.join(given)})"


def without_graph(text: str) -> str:
    """What fx says, without the whole graph, which it puts into its errors."""
    return _GRAPH.sub("", text).strip()


_GRAPH = re.compile(r"(graph = )?graph\(\):(\n    .*?)+?((?=, name = )|$)")


def _near(node: fx.Node) -> str:
    """The line of the nearest node, from there on, that has one."""
    while node.op != "root" and "stack_trace" not in node.meta:
        node = node.next
    return line_of(node)


# --- what it has left -----------------------------------------------------------------------------


def outside_of(graph: fx.Graph) -> dict[str, list[str]]:
    """What a pass must leave, by what people call it."""

    def named(op: str) -> list[str]:
        nodes = [n for n in graph.nodes if n.op == op]
        return [n.meta["leaf"].path if "leaf" in n.meta else str(n.target) for n in nodes]

    opaque = [n for n in graph.nodes if _may_be_opaque(n.target) and _is_opaque(n)]
    return {
        "arguments": named("placeholder"),
        "calls of primitives and random ops": [str(n.target) for n in opaque],
    }


def check_same(
    name: str, old: fx.Graph, new: fx.Graph, before: dict[str, list[str]],
    after: dict[str, list[str]], stays: Mapping[fx.Node, fx.Node],
) -> None:  # fmt: skip
    """Raise `PassError` where the outside of a function has changed.

    Args:
        before, after: what `outside_of` says of both.
        stays: nodes that were there before, and which.
    """
    for what in before:
        if before[what] != after[what]:
            raise PassError(
                f"the pass {name!r} has changed the {what} of forward: "
                f"{_difference(before[what], after[what])}. A pass changes what lies between them"
            )
    wanted, given = results_of(old), results_of(new)
    pairs: list[tuple[Any, Any]] = list(zip(wanted, given))
    if len(wanted) != len(given):
        raise PassError(
            f"the pass {name!r} returns {count(len(given), 'output')}, and forward {len(wanted)}"
        )
    held = (n for n in old.nodes if n.op in ("placeholder", "get_attr") and is_tensor(n))
    owned = {storage_key(n.meta["val"]) for n in held}
    made: set[int] = set()
    for i, (was, now) in enumerate(pairs):
        a, b = was.meta["val"], now.meta.get("val")
        if not is_tensor(now) or (sizes(was), a.dtype, a.device) != (sizes(now), b.dtype, b.device):
            raise PassError(
                f"the pass {name!r} makes output {i} ({line_of(was)}) another tensor: "
                f"{_brief(a)} before, {_brief(b)} after. {first_other(stays)}Give it the shape, "
                "dtype and device that it had"
            )
        was_given, is_given = storage_key(a) in owned, storage_key(b) in owned
        if was_given != is_given or (was_given and not same_place(a, b)):
            raise PassError(
                f"the pass {name!r} makes output {i} ({line_of(was)}) other memory of an "
                "argument than it was. Leave in-place updates, and copies that are returned"
            )
        made.add(storage_key(b))
    if len(made) < len({storage_key(was.meta["val"]) for was, _ in pairs}):
        raise PassError(
            f"the pass {name!r} makes two outputs one memory, which were two. Leave the copy"
        )


def first_other(stays: Mapping[fx.Node, fx.Node]) -> str:
    """Where a pass has first put a value of another kind in the place of one; "": nowhere."""
    for node, old in stays.items():
        for x, y in zip(operands(node), operands(old)):
            a, b = x.meta["val"], y.meta["val"]
            if x not in stays and (sizes(x), a.dtype) != (sizes(y), b.dtype):
                return (
                    f"{line_of(x)}: {x.target} gives {_brief(a)} in place of {y.target}, which "
                    f"gave {_brief(b)}. "
                )
    return ""


def _difference(before: list[str], after: list[str]) -> str:
    """What of a list is new, what is gone; or that its order is another one."""
    gone, new = Counter(before) - Counter(after), Counter(after) - Counter(before)
    parts = [f"{' and '.join(gone)} gone"] if gone else []
    parts += [f"{' and '.join(new)} new"] if new else []
    return ", ".join(parts) or "they come in another order"


def constants_of(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that read constants."""
    return graph.find_nodes(op="get_attr")


def check_constants(name: str, new: fx.Graph, stays: Mapping[fx.Node, fx.Node]) -> None:
    """Raise `PassError` for a constant without a value, or with another one than it had."""
    for node in constants_of(new):
        value, val = node.meta.get("value"), node.meta.get("val")
        if node in stays and value is not stays[node].meta["value"]:
            raise PassError(
                f"the pass {name!r} has changed the constants of forward: {node.target} has "
                "another value. Insert a get_attr of a new name"
            )
        if not isinstance(value, torch.Tensor) or not isinstance(val, torch.Tensor):
            raise PassError(
                f"the pass {name!r} has changed the constants of forward: it reads "
                f'{node.target}, of which it gives no value. Put the tensor into meta["value"], '
                'and a fake of it into meta["val"]'
            )
        if (value.dtype, value.shape, value.stride()) != (val.dtype, val.shape, val.stride()):
            raise PassError(
                f"the pass {name!r} gives the constant {node.target} a value of "
                f"{value.dtype} {tuple(value.shape)}, and its fake is of {val.dtype} "
                f"{tuple(val.shape)}"
            )


def _brief(x: Any) -> str:
    if not isinstance(x, torch.Tensor):
        return f"{type(x).__name__}"
    shape = ", ".join(str(n if isinstance(n, int) else n.node.expr) for n in x.shape)
    return f"{str(x.dtype).removeprefix('torch.')} ({shape}) on {x.device}"


@functools.cache
def _may_be_opaque(target: Any) -> bool:
    """Whether calls of an op may draw, or write what they are given and return nothing, as
    primitives do."""
    schema = getattr(target, "_schema", None)
    draws = torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())
    return draws or (schema is not None and schema.is_mutable and not schema.returns)


def _is_opaque(node: fx.Node) -> bool:
    return draws(node.target, node.args, node.kwargs) or bool(written_by(node))
