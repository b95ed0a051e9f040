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
from fngraph.fx.nodes import storages_written
from fngraph.fx.rows.rehearsal import is_unwritten
from fngraph.shadow.nodes import Tolerances, difference
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import TorchDispatchMode

Found = tuple[fx.Node, str, bool]  # the node, how it differs, whether within the tolerances
_AHEAD = 4  # ops of the trace that may be left out


class _Holding(TorchDispatchMode):
    """Compares each op of a function with its node, as it runs."""

    def __init__(
        self, nodes: Sequence[fx.Node], made: Mapping[fx.Node, Any], within: Tolerances
    ) -> None:
        super().__init__()
        self.nodes, self.made, self.within = nodes, made, within
        self.at = 0
        self.found: list[Found] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        node = self._node_of(func)
        if node is not None:
            for x, given in zip(node.args, args):  # of lists only the results are compared
                if isinstance(x, fx.Node) and isinstance(given, torch.Tensor):
                    self._compare(x, given, "is changed before it is read")
        result = func(*args, **(kwargs or {}))
        if node is not None and isinstance(result, torch.Tensor):
            self._compare(node, result, "gives")
        return result

    def _node_of(self, func: Any) -> fx.Node | None:
        for ahead in range(self.at, min(self.at + _AHEAD, len(self.nodes))):
            if str(self.nodes[ahead].target) == str(func):
                self.at = ahead + 1
                return self.nodes[ahead]
        return None

    def _compare(self, node: fx.Node, got: torch.Tensor, verb: str) -> None:
        want = self.made.get(node)
        if node.op != "call_function" or not isinstance(want, torch.Tensor):
            return
        if got.shape != want.shape or any(node is other for other, *_ in self.found):
            return
        if (what := difference(got, want, self.within)) is not None:
            how = verb if verb != "gives" else "gives something else than by itself"
            self.found.append((node, f"{how}: {what[0]}", what[1]))


def look_inside(
    gm: fx.GraphModule, made: Mapping[fx.Node, Any], call: Any, within: Tolerances
) -> list[Found]:
    """The nodes of a piece of which its function makes something else, in the order of the graph.

    Args:
        made: what each node gives by itself.
        call: runs the function, on the same inputs.
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
    holding = _Holding(nodes, kept, within)
    with holding:
        call()
    order = {node: k for k, node in enumerate(nodes)}
    return sorted(holding.found, key=lambda one: order[one[0]])
