"""Passes over `forward`, and over the functions of its loops: one as the other.

A function of a loop reads what is around it through operands. For a pass it stands open: a constant
that it is given is a constant again, and an argument of `forward` has its `Leaf`, so that a body
shows what the same lines show outside of a loop. Afterwards it is closed: constants that a pass has
made are operands that come behind the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx

from fngraph.errors import RowsError
from fngraph.fx.leaves import Leaf
from fngraph.fx.loops.bound import has_loops
from fngraph.fx.loops.node import NAMES, Loop
from fngraph.fx.nodes import inputs_of, is_loop
from fngraph.fx.tracing.tracer import Graph
from fngraph.passes.running.checks import constants_of
from fngraph.passes.running.copies import Copy
from fngraph.passes.running.frame import Applied, Facts, Pass, module_of, run_over

Refuse = Callable[[RowsError], None]


def run_passes(
    passes: Sequence[Pass], graph: Graph, leaves: Sequence[Leaf], facts: Facts, refuse: Refuse
) -> tuple[Graph, tuple[Applied, ...]]:
    """The graph after all passes, and what each did. The one that is given stays as it is.

    Args:
        facts: what is known of its rows, with what was vouched for.

    Raises:
        PassError: a pass that fails, or returns what is not the same function.
        RowsError: a new op that mixes rows.
    """
    for node, leaf in zip(inputs_of(graph.gm.graph), leaves):
        node.meta["leaf"] = leaf
    for node in constants_of(graph.gm.graph):
        node.meta["value"] = graph.constants[node.name]
    return _over(passes, graph, leaves, facts, refuse, "")


def _over(
    passes: Sequence[Pass], graph: Graph, leaves: Sequence[Leaf], facts: Facts, refuse: Refuse,
    where: str,
) -> tuple[Graph, tuple[Applied, ...]]:  # fmt: skip
    """The same of a graph whose nodes have their leaves and values."""
    after, applied, known = run_over(passes, graph, leaves, facts, refuse, where)
    if not has_loops(after.gm):
        return after, applied
    copy = Copy.of(after.gm.graph)
    found = [applied]
    for node in list(filter(is_loop, copy.graph.nodes)):
        found += _within(passes, after, node, known[copy.twins[node]].graphs, refuse)
    constants = {node.name: node.meta["value"] for node in constants_of(copy.graph)}
    after = dataclasses.replace(after, gm=module_of(copy.graph), constants=constants)
    return after, tuple(Applied.merged(one) for one in zip(*found))


def _within(
    passes: Sequence[Pass], graph: Graph, node: fx.Node, facts: Sequence[Facts], refuse: Refuse
) -> list[tuple[Applied, ...]]:
    """Run passes over the functions of a loop, whose node gets a loop of what they have become.

    Args:
        graph: what the node is in, as far as it is the same for all that is in it.
    """
    loop: Any = node.target
    found, graphs = [], []
    for name, gm, known in zip(NAMES[loop.kind], loop.graphs, facts, strict=True):
        open_ = _opened(graph, gm, node)
        known = {x: known[old] for x, old in open_.twins.items() if old in known}
        where = f"{name} of {loop}, {loop.line}"
        after, applied = _over(passes, open_.graph, (), known, refuse, where)
        graphs.append(after.gm)
        found.append(applied)
    _close(node, loop, graphs)
    return found


class _Open(NamedTuple):
    """A function as passes see it.

    Attributes:
        twins: for each of its nodes the one that it is a copy of.
    """

    graph: Graph
    twins: Mapping[fx.Node, fx.Node]


def _opened(graph: Graph, gm: fx.GraphModule, node: fx.Node) -> _Open:
    copy = Copy.of(gm.graph)
    twins = dict(copy.twins)
    for inside, outside in _pairs(copy.graph, node):
        if outside.op == "placeholder" and "leaf" in outside.meta:
            inside.meta["leaf"] = outside.meta["leaf"]
        elif outside.op == "get_attr":
            with copy.graph.inserting_after(inputs_of(copy.graph)[-1]):
                new = copy.graph.get_attr(str(outside.target))
            new.meta = inside.meta | {"value": outside.meta["value"]}
            inside.replace_all_uses_with(new)
    constants = {x.name: x.meta["value"] for x in constants_of(copy.graph)}
    return _Open(dataclasses.replace(graph, gm=module_of(copy.graph), constants=constants), twins)


def _pairs(inner: fx.Graph, node: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Inputs of a loop's function that are what the loop reads besides its own operands, each with
    that."""
    loop: Any = node.target
    rest = [x for x in node.args[loop.own :] if isinstance(x, fx.Node)]
    inputs = inputs_of(inner)
    return list(zip(inputs[len(inputs) - len(rest) :], rest, strict=True))


def _close(node: fx.Node, loop: Loop, graphs: Sequence[fx.GraphModule]) -> None:
    """Give a loop these functions, and what they read of constants as operands."""
    given = {id(x.meta["value"]): x for _, x in _pairs(graphs[0].graph, node) if x.op == "get_attr"}
    made: dict[int, fx.Node] = {}  # constants of its own, by their value: one that reads it
    for gm in graphs:
        for x in constants_of(gm.graph):
            if id(x.meta["value"]) not in given:
                made.setdefault(id(x.meta["value"]), x)
    for value, x in made.items():
        with node.graph.inserting_before(node):
            given[value] = new = node.graph.get_attr(_free(node.graph, str(x.target)))
        new.meta = dict(x.meta)
        node.args = (*node.args, new)
        for gm in graphs:
            with gm.graph.inserting_after(inputs_of(gm.graph)[-1]):
                new = gm.graph.placeholder(f"constant_{len(inputs_of(gm.graph))}")
            new.meta = {key: value for key, value in x.meta.items() if key != "value"}
    closed = []
    for gm in graphs:
        places = {id(x.meta["value"]): at for at, x in _pairs(gm.graph, node) if x.op == "get_attr"}
        for x in constants_of(gm.graph):
            x.replace_all_uses_with(places[id(x.meta["value"])])
            gm.graph.erase_node(x)
        gm.graph.lint()
        closed.append(fx.GraphModule({}, gm.graph))
    node.target = dataclasses.replace(loop, graphs=tuple(closed))


def _free(graph: fx.Graph, name: str) -> str:
    """A name that no constant of a graph has."""
    taken, i = {str(x.target) for x in constants_of(graph)}, 0
    while (tried := f"{name}_{i}" if i else name) in taken:
        i += 1
    return tried
