"""Which nodes share a storage, and when each storage is read or written, in program order."""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator

import torch
from torch import fx

from fngraph.fx.nodes import is_loop, is_op, is_size, line_of, mutates, name_of, written_by
from fngraph.fx.schemas import reads_nothing
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import tree_leaves


@dataclasses.dataclass(frozen=True, slots=True)
class Use:
    """One op that touches a storage.

    Attributes:
        time: its place in the program; infinite for what the function returns.
        writes: whether it may change what is there.
    """

    time: float
    node: fx.Node
    writes: bool

    def __str__(self) -> str:
        if self.node.op == "output":
            return "forward returns"
        return f"{name_of(self.node)} ({line_of(self.node)}) {'writes' if self.writes else 'reads'}"


def keys(node: fx.Node) -> list[int]:
    """The storages of a node's results."""
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return [storage_key(value)]
    if not isinstance(value, list | tuple):
        return []
    return [storage_key(x) for x in tree_leaves(value) if isinstance(x, torch.Tensor)]


class Memory:
    """A graph's storages. `add` and `move` keep it true while the graph is changed."""

    def __init__(self, graph: fx.Graph) -> None:
        self.at: dict[fx.Node, int] = {}
        self.members: dict[int, list[fx.Node]] = {}
        for time, node in enumerate(graph.nodes):
            self.add(node, time)

    def add(self, node: fx.Node, time: int) -> None:
        """Take in a node of the graph."""
        self.at[node] = time
        for key in dict.fromkeys(keys(node)):
            self.members.setdefault(key, []).append(node)

    def uses(self, key: int) -> Iterator[Use]:
        """Every op that reads or writes a storage; views and questions of size do neither."""
        for member in self.members.get(key, ()):
            for user in member.users:
                if user.op == "output":
                    yield Use(math.inf, user, False)
                elif not _looks_only(user):
                    yield Use(self.at[user], user, _writes(user, member))

    def move(self, key: int, into: int) -> None:
        """Count the nodes of one storage to another one, whose values they have now."""
        self.members[into] += [n for n in self.members.pop(key) if into in keys(n)]


def _looks_only(node: fx.Node) -> bool:
    """Whether a node makes a view or asks for a size, and touches no element."""
    if mutates(node):
        return False
    if is_size(node) or reads_nothing(node.target):
        return True
    if not is_op(node):
        if node.target is not operator.getitem:
            return False
        if isinstance(node.args[0].meta["val"], list | tuple):  # type: ignore[union-attr]
            return True
    made = keys(node)
    given = {key for a in node.all_input_nodes for key in keys(a)}
    return bool(made) and given.issuperset(made)


def _writes(node: fx.Node, member: fx.Node) -> bool:
    if not is_op(node) and not is_loop(node):
        return True  # a higher-order op: nothing says that it does not
    return member in written_by(node)
