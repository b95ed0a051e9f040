"""Collectives in a traced graph: who takes part, in which order they come, what must be alike.

An op of ours with an argument `group` is one. All processes of a group must come to the same ones
in the same order, or they wait for each other, or take what is not meant for them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.fx.nodes import flat, is_op, is_tensor, line_of, operands
from fngraph.fx.rows.ranks import shown
from fngraph.fx.rows.state import Kept, moving_dims
from fngraph.fx.schemas import named, plain_name


class Collective(NamedTuple):
    """One in a graph.

    Attributes:
        op: "all_reduce".
        axis, group: of the mesh, and what torch calls its processes.
        line: the user's.
    """

    op: str
    axis: str
    group: str
    line: str


def is_collective(node: fx.Node) -> bool:
    """Whether a node's op is one."""
    if not is_op(node) or node.target.namespace != "fngraph":  # type: ignore[union-attr]
        return False
    return any(a.name == "group" for a in node.target._schema.arguments)  # type: ignore[union-attr]


def collectives_of(graph: fx.Graph) -> tuple[Collective, ...]:
    """In the order in which every process comes to them."""
    found = []
    for node in filter(is_collective, graph.nodes):
        args = named(node.target, node.args, node.kwargs)
        found.append(
            Collective(plain_name(node.target), args["axis"], args["group"], line_of(node))
        )
    return tuple(found)


def keep_order(graph: fx.Graph) -> None:
    """Make each wait for the one before it, as an argument: a compiler that is free to move ops
    would move them in one process and not in the other."""
    before = None
    for node in filter(is_collective, graph.nodes):
        arguments = [a.name for a in node.target._schema.arguments]
        if before is not None and arguments[-1] == "after":
            node.args = (*node.args, before)
        before = _tensor_of(graph, node)


def _tensor_of(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The node, or the first of its results where it has several."""
    if is_tensor(node):
        return node
    with graph.inserting_after(node):
        first = graph.call_function(operator.getitem, (node, 0))
    first.meta = {**node.meta, "val": node.meta["val"][0]}
    return first


def are_of_rows(graph: fx.Graph, facts: Mapping[fx.Node, Any]) -> bool:
    """Whether true rows of some collective are those of others, so that processes must bring as
    many tokens and requests each; not where `fg.trust_rows` says what becomes of them."""
    for node in filter(is_collective, graph.nodes):
        if isinstance(facts.get(node), Kept) and any(map(moving_dims, operands(node))):
            return True
    return False


def told_of(
    graph: fx.Graph, facts: Mapping[fx.Node, Any], text: Callable[[Any], str], padding: bool
) -> dict[str, tuple[str, str]]:
    """What processes must have alike of a trace, in its order: name to text, and the user's line.

    Ops, what they read, shapes and dtypes; of collectives all but the group. Other numbers are left
    out: each process has offsets of its own.

    Args:
        facts: `facts_of` the graph.
        text: a size in T and R, as a person writes it.
        padding: whether rows are right only if all know the same of what goes into collectives.
    """
    told: dict[str, tuple[str, str]] = {}
    names: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "output":
            told["outputs"] = _read(node, names), ""
        elif node.op in ("placeholder", "get_attr"):
            names[node] = f"%leaf{len(names)}"
        elif is_op(node):
            names[node] = f"%{len(told)}"
            results = [x for x in flat(node.meta.get("val")) if isinstance(x, torch.Tensor)]
            made = ", ".join(_kind(x, text) for x in results) or "no tensor"
            more = f" {_told(node, facts, padding)}" if is_collective(node) else ""
            does = f"{node.target}({_read(node, names)}){more} -> {made}"
            told[f"op {len(told)}"] = does, line_of(node)
        else:  # one of several results, or a size
            names[node] = _read(node, names)
    return told


def _read(node: fx.Node, names: Mapping[fx.Node, str]) -> str:
    return ", ".join(names[x] for x in node.all_input_nodes if is_tensor(x))


def _told(node: fx.Node, facts: Mapping[fx.Node, Any], padding: bool) -> str:
    """How a collective is called."""
    given = named(node.target, node.args, node.kwargs).items()
    args = [f"{n}={x}" for n, x in given if n != "group" and isinstance(x, int | str)]
    for fact in [facts[x] for x in operands(node)]:
        if not isinstance(fact, Kept):
            args.append("of mixed rows")
        elif padding and (known := shown(fact)):
            args.append(f"of {known}")
    return ", ".join(args)


def _kind(x: torch.Tensor, text: Callable[[Any], str]) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(text, x.shape))}]"


def nothing_said(graph: fx.Graph) -> dict[fx.Node, Kept]:
    """Claims for `facts_of`: of what collectives make it is known that it keeps its rows, and no
    more. Of donated state that padding has written there is more to know."""
    return {node: Kept() for node in graph.nodes if is_collective(node)}


def reads_dirty(graph: fx.Graph, facts: Mapping[fx.Node, Any]) -> bool:
    """Whether a collective reads rows that padding has written."""
    found = [facts[x] for node in filter(is_collective, graph.nodes) for x in operands(node)]
    return any(getattr(fact, "dirty", ()) for fact in found)
