"""A copy of a graph that a pass may edit, and what a pass has edited in it.

Most passes match nowhere, so that this is asked at each of them: objects are compared, and no text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import fx


class Copy(NamedTuple):
    """A copy of a graph, which a pass may edit, and what it was before.

    Arguments are looked at as objects: fx never changes those of a node, but gives it others.

    Attributes:
        twins: for each of its nodes the one that it is a copy of.
        calls: for each of them its target, arguments and keywords.
    """

    graph: fx.Graph
    twins: dict[fx.Node, fx.Node]
    calls: dict[fx.Node, tuple[Any, Any, Any]]

    @classmethod
    def of(cls, old: fx.Graph) -> Copy:
        """A copy as it is made. Arguments are given to nodes that are there: `graph_copy` looks for
        sizes in each of them, which takes half as long again."""
        graph = fx.Graph()
        env: dict[fx.Node, fx.Node] = {}
        for node in old.nodes:
            new = graph.create_node(node.op, node.target, (), {}, node.name, node.type)
            if node.args:
                new.args = fx.map_arg(node.args, env.__getitem__)
            if node.kwargs:
                new.kwargs = fx.map_arg(node.kwargs, env.__getitem__)
            new.meta = dict(node.meta)
            env[node] = new
        calls = {new: (new.target, new.args, new.kwargs) for new in env.values()}
        return cls(graph, {new: old for old, new in env.items()}, calls)

    def differs(self, graph: fx.Graph) -> bool:
        """Whether a graph is another one: its nodes, their order, their ops or arguments."""
        nodes = list(graph.nodes)
        if nodes != list(self.calls):
            return True
        return any(not self.is_as_it_was(x) and not _equal(*self.now_and_then(x)) for x in nodes)

    def is_as_it_was(self, x: fx.Node) -> bool:
        """Whether nobody has given a node of the copy another target or other arguments."""
        target, args, kwargs = self.calls[x]
        return x.target is target and x.args is args and x.kwargs is kwargs

    def now_and_then(self, x: fx.Node) -> tuple[Any, Any]:
        """The call that a node of the copy is, and the one that it was."""
        return (x.target, x.args, x.kwargs), self.calls[x]

    def touched(self, nodes: Iterable[fx.Node]) -> list[fx.Node]:
        """Those of its nodes that have been given another op or other arguments."""
        return [x for x in nodes if not self.is_as_it_was(x)]

    def edited(self, touched: Iterable[fx.Node]) -> set[fx.Node]:
        """Those of them that are another op, or have other constants; which nodes they read does
        not matter."""
        return {x for x in touched if not _equal(*map(_constants, self.now_and_then(x)))}

    def has_its_metas(self) -> bool:
        """Whether metas, too, are those of the nodes that it is a copy of."""
        for x, old in self.twins.items():
            mine, theirs = x.meta, old.meta
            if len(mine) != len(theirs):
                return False
            for name in mine:
                if name not in theirs or mine[name] is not theirs[name]:
                    return False
        return True


def _constants(call: Any) -> Any:
    return fx.map_arg(call, lambda x: None)


def _equal(a: Any, b: Any) -> bool:
    """Whether arguments are equal: nodes as objects, all else as it prints, so that -0.0 is not 0
    and nan is nan."""
    if a is b:
        return True
    if type(a) is not type(b) or isinstance(a, fx.Node):
        return False
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return repr(a) == repr(b)
