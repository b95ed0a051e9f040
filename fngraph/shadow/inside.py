"""Inside of a piece's function: its ops as it runs, each held to the traced op that it stands for.

Where a function gives something else than its ops one by one, one of them gave it something else,
or what an op made was changed before the next one read it. Compiled code is one op, and not seen
into.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.generators import drawn
from fngraph.fx.nodes import computed, flat, inputs_of, operands, storages_written
from fngraph.fx.rows.rehearsal import is_unwritten
from fngraph.shadow.nodes import Tolerances, difference
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import TorchDispatchMode

Found = tuple[fx.Node, str, bool]  # the node, how it differs, whether within the tolerances
_Before = Mapping[tuple[fx.Node, fx.Node], tuple[torch.Tensor, fx.Node]]
_AHEAD = 4  # ops of the trace that may be left out


class _Holding(TorchDispatchMode):
    """Compares each op of a function with its node, as it runs."""

    def __init__(
        self, nodes: Sequence[fx.Node], made: Mapping[fx.Node, Any], before: _Before,
        within: Tolerances,
    ) -> None:  # fmt: skip
        super().__init__()
        self.nodes, self.made, self.before, self.within = nodes, made, before, within
        self.at = 0
        self.found: list[Found] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = self._node_of(func, args)
        if node is not None:
            for x, given in _given(node, args):
                if (node, x) in self.before:
                    want, writer = self.before[node, x]
                    self._note(writer, given, want, "leaves something else than by itself")
                else:
                    self._compare(x, given, "is changed before it is read")
        result = func(*args, **(kwargs or {}))
        if node is not None and isinstance(result, torch.Tensor):
            self._compare(node, result, "gives something else than by itself")
        return result

    def _node_of(self, func: Any, args: Any) -> fx.Node | None:
        for ahead in range(self.at, min(self.at + _AHEAD, len(self.nodes))):
            node = self.nodes[ahead]
            if str(node.target) == str(func) and _is_alike(node, args):
                self.at = ahead + 1
                return self.nodes[ahead]
        return None

    def _compare(self, node: fx.Node, got: torch.Tensor, verb: str) -> None:
        want = self.made.get(node)
        if node.op == "call_function" and isinstance(want, torch.Tensor):
            self._note(node, got, want, verb)

    def _note(self, node: fx.Node, got: torch.Tensor, want: torch.Tensor, how: str) -> None:
        if got.shape != want.shape or any(node is other for other, *_ in self.found):
            return
        if (what := difference(got, want, self.within)) is not None:
            self.found.append((node, f"{how}: {what[0]}", what[1]))


def _given(node: fx.Node, args: Any) -> list[tuple[fx.Node, torch.Tensor]]:
    """A node's arguments, those in lists too, with the tensors that a call has in their places."""
    return [(x, given) for x, given in zip(flat(node.args), flat(args))
            if isinstance(x, fx.Node) and isinstance(given, torch.Tensor)]  # fmt: skip


def _is_alike(node: fx.Node, args: Any) -> bool:
    """Whether a call's tensors have the dtypes and dims of the node's: else it is another one."""
    for x, given in _given(node, args):
        fake = x.meta.get("val")
        if isinstance(fake, torch.Tensor) and (fake.dtype, fake.dim()) != (
            given.dtype,
            given.dim(),
        ):
            return False
    return True


def _memory_before(gm: fx.GraphModule, given: Sequence[Any]) -> _Before:
    """What an op finds in memory that ops before it have written, and the last of those, for each
    of its arguments there: as the graph does it op by op."""
    values: dict[fx.Node, Any] = dict(zip(inputs_of(gm.graph), given))
    writers: dict[int, fx.Node] = {}
    copies: dict[fx.Node, torch.Tensor] = {}  # since the last write
    found: dict[tuple[fx.Node, fx.Node], tuple[torch.Tensor, fx.Node]] = {}
    for node in gm.graph.nodes:
        if node.op == "get_attr":
            values[node] = getattr(gm, str(node.target))
        if node.op != "call_function":
            continue
        for x in operands(node):
            writer = writers.get(storage_key(x.meta["val"]))
            if writer is not None:
                found[node, x] = copies.setdefault(x, values[x].clone()), writer
        values[node] = computed(node, values)
        for key in storages_written([node]):
            writers[key] = node
            copies = {x: y for x, y in copies.items() if storage_key(x.meta["val"]) != key}
    return found


def look_inside(
    gm: fx.GraphModule, made: Mapping[fx.Node, Any], call: Any, given: Sequence[Any],
    within: Tolerances,
) -> list[Found]:  # fmt: skip
    """The nodes of a piece of which its function makes something else, in the order of the graph.

    Args:
        made: what each node gives by itself.
        call: runs the function, on the same inputs.
        given: the same inputs again, for a run op by op, which writes them.
    """
    nodes = [n for n in gm.graph.nodes if n.op == "call_function"]
    touched = storages_written(nodes)
    kept = {
        node: x
        for node, x in made.items()
        if isinstance(node.meta.get("val"), torch.Tensor)
        and storage_key(node.meta["val"]) not in touched
        and not is_unwritten(node)
        and drawn(node) is None
    }
    holding = _Holding(nodes, kept, _memory_before(gm, given) if touched else {}, within)
    with holding:
        call()
    order = {node: k for k, node in enumerate(nodes)}
    return sorted(holding.found, key=lambda one: order[one[0]])
