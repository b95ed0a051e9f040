"""Donation: leaf k's new value ends up in leaf k's own buffer.

A leaf that was updated in place and comes back costs nothing. Any other new value is copied into
the buffer at the end, after everything that still reads the old one. `Donation` says which and why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fngraph.core.text import table
from fngraph.errors import DonationError
from fngraph.fx.leaves import Leaf, same_place, storage_key
from fngraph.fx.purity import written
from fngraph.fx.trace import Graph

aten = torch.ops.aten


@dataclasses.dataclass(frozen=True, slots=True)
class Donation:
    """What became of one donated leaf.

    Attributes:
        how: "in place", "unchanged" or "copied".
        reason: which op writes it, and the user's line.
        null_slots: only primitives write it, so a batch of nothing but padding leaves it as it is.
    """

    path: str
    how: str
    reason: str
    null_slots: bool


@dataclasses.dataclass(frozen=True, slots=True)
class DonationTable:
    """Every donated leaf, in order."""

    rows: tuple[Donation, ...]

    def as_text(self) -> str:
        """One line a leaf: path, how, why."""
        return table(["leaf", "how", "why"], [[r.path, r.how, r.reason] for r in self.rows])

    __repr__ = as_text


def donate(graph: Graph, leaves: Sequence[Leaf], returns: Mapping[int, int]) -> DonationTable:
    """Add the final copies to `graph` (in place) and say how each donated leaf is updated.

    Args:
        returns: index of a donated leaf to the index of the output that is its new value.

    Raises:
        DonationError: an output has another shape or dtype than its leaf; with paths.
    """
    nodes = graph.gm.graph.nodes
    inputs = [n for n in nodes if n.op == "placeholder"]
    (output,) = (n for n in nodes if n.op == "output")
    results = list(output.args[0])
    _check(graph, leaves, inputs, results, returns)

    writers = _writers(graph.gm)
    rows, copies = [], {}
    for k, out in returns.items():
        old, new = inputs[k], results[out]
        lines = writers.get(storage_key(old.meta["val"]), [])
        null_slots = all(line.startswith("fngraph.") for line in lines)
        if same_place(old.meta["val"], new.meta["val"]):
            how = ("in place", f"by {lines[-1]}") if lines else ("unchanged", "returned as it came")
        else:
            op = new.target if new.op == "call_function" else new.op
            how = ("copied", f"{op} makes a new tensor ({new.meta.get('stack_trace', 'forward')})")
            copies[k] = out
            null_slots = False
        rows.append(Donation(leaves[k].path, *how, null_slots))
    _append_copies(graph.gm, inputs, output, results, copies, set(returns.values()))
    return DonationTable(tuple(rows))


def _check(
    graph: Graph,
    leaves: Sequence[Leaf],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    returns: Mapping[int, int],
) -> None:
    for k, out in returns.items():
        old, new = inputs[k].meta["val"], results[out].meta["val"]
        want, got = _brief(graph, old), _brief(graph, new)
        if want != got:
            same_shape = want.partition("[")[2] == got.partition("[")[2]
            fix = f"new.to({old.dtype})" if same_shape else "index_put or slice_scatter into it"
            raise DonationError(
                f"the donated leaf {leaves[k].path} is {want} but comes back as {got}; its new "
                f"value must fit its buffer. Make it fit ({fix}), or do not donate it"
            )


def _brief(graph: Graph, t: torch.Tensor) -> str:
    sizes = ", ".join(graph.dim(n).text for n in t.shape)
    return f"{str(t.dtype).removeprefix('torch.')}[{sizes}]@{t.device}"


def _writers(gm: fx.GraphModule) -> dict[int, list[str]]:
    """Storage key to a description of each op that writes it."""
    found: dict[int, list[str]] = {}
    for node in gm.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for target in written(node.target, node.args, node.kwargs):
                where = node.meta.get("stack_trace", "forward")
                key = storage_key(target.meta["val"])
                found.setdefault(key, []).append(f"{node.target} ({where})")
    return found


def _append_copies(
    gm: fx.GraphModule,
    inputs: Sequence[fx.Node],
    output: fx.Node,
    results: list[fx.Node],
    copies: Mapping[int, int],
    returned: set[int],
) -> None:
    """Clone what still reads an old value, copy the new ones in, return the buffers themselves."""
    overwritten = {storage_key(inputs[k].meta["val"]) for k in copies}

    def cloned(node: fx.Node) -> fx.Node:
        if storage_key(node.meta["val"]) not in overwritten:
            return node
        clone = gm.graph.call_function(aten.clone.default, (node,))
        clone.meta["val"] = torch.empty_like(node.meta["val"])
        return clone

    with gm.graph.inserting_before(output):
        for out, node in enumerate(results):
            if out not in returned:
                results[out] = cloned(node)
        sources = {k: cloned(results[out]) for k, out in copies.items()}
        for k, out in copies.items():
            copy = gm.graph.call_function(aten.copy_.default, (inputs[k], sources[k]))
            copy.meta["val"] = inputs[k].meta["val"]
            results[out] = inputs[k]
    output.args = (results,)
    gm.graph.lint()
