"""Collectives in a traced graph: who takes part, in which order they come, what must be alike.

An op of ours with an argument `group` is one. All processes of a group must come to the same ones in
the same order, or they wait for each other, or take what is not meant for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.fx.nodes import flat, is_op, is_tensor, line_of, operands
from fngraph.fx.rows.ranks import shown
from fngraph.fx.rows.state import Kept, moving_dims, op_name
from fngraph.fx.schemas import named


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
        found.append(Collective(op_name(node), args["axis"], args["group"], line_of(node)))
    return tuple(found)


def keep_order(graph: fx.Graph) -> None:
    """Make each wait for the one before it, as an argument: a compiler that is free to move ops
    would move them in one process and not in the other."""
    before = None
    for node in filter(is_collective, graph.nodes):
        arguments = [a.name for a in node.target._schema.arguments]
        if before is not None and arguments[-1] == "after":
            node.args = (*node.args, before)
        before = node


def are_of_rows(graph: fx.Graph, facts: Mapping[fx.Node, Any]) -> bool:
    """Whether true rows of some collective are those of others, so that processes must bring as
    many tokens and requests each; not where `fg.trust_rows` says what becomes of them."""
    for node in filter(is_collective, graph.nodes):
        if isinstance(facts.get(node), Kept) and any(map(moving_dims, operands(node))):
            return True
    return False


def told_of(
    graph: fx.Graph, facts: Mapping[fx.Node, Any], text: Callable[[Any], str]
) -> dict[str, tuple[str, str]]:
    """What processes must have alike of a trace, in its order: name to text, and the user's line.

    Ops, shapes and dtypes; of collectives all but the group, and what is known of padding there.
    Numbers are left out: each process has offsets of its own.

    Args:
        facts: `facts_of` the graph.
        text: a size in T and R, as a person writes it.
    """
    told: dict[str, tuple[str, str]] = {}
    ops = [node for node in graph.nodes if is_op(node)]
    for i, node in enumerate(ops):
        results = [x for x in flat(node.meta.get("val")) if isinstance(x, torch.Tensor)]
        made = ", ".join(_kind(x, text) for x in results)
        how = ""
        args = named(node.target, node.args, node.kwargs)
        if is_collective(node):
            plain = {n: x for n, x in args.items() if n != "group" and not is_tensor(x) and x != ""}
            of = [shown(facts[x]) for x in operands(node) if isinstance(facts.get(x), Kept)]
            how = "; ".join(x for x in (str({k: v for k, v in plain.items() if v is not None}), *of) if x)
            how = f" {how}"
        told[f"op {i} of {len(ops)}"] = f"{node.target}{how} -> {made or 'no tensor'}", line_of(node)
    return told


def _kind(x: torch.Tensor, text: Callable[[Any], str]) -> str:
    return f"{str(x.dtype).removeprefix('torch.')}[{', '.join(map(text, x.shape))}]"
