"""Donation: leaf k's new value ends up in leaf k's own buffer, and a table says how.

A leaf that was updated in place and comes back costs nothing. A functional update is rewritten to
happen in the buffer where it can (`inplace`). Any other new value is copied into the buffer at the
end, after everything that still reads the old one. `Donation` says which and why.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from fngraph.core.text import html, table
from fngraph.errors import DonationError
from fngraph.fx.donation.inplace import make_in_place
from fngraph.fx.donation.liveness import Memory
from fngraph.fx.donation.loops import settle
from fngraph.fx.generators import has_effect
from fngraph.fx.leaves import Leaf, same_place
from fngraph.fx.nodes import (
    STAYS,
    inputs_of,
    is_loop,
    is_loop_result,
    is_op,
    line_of,
    name_of,
    results_of,
    written_by,
)
from fngraph.fx.tracing.refusals import Refusals
from fngraph.fx.tracing.tracer import Graph
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.raising import may_raise


@dataclasses.dataclass(frozen=True, slots=True)
class Donation:
    """What became of one donated leaf.

    Attributes:
        how: "in place", "unchanged" or "copied".
        reason: which op writes it, and the user's line; for a copy, what forced it.
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

    def _repr_html_(self) -> str:
        return html(self.as_text())

    def as_text(self) -> str:
        """One line a leaf: path, how, why."""
        return table(["leaf", "how", "why"], [[r.path, r.how, r.reason] for r in self.rows])

    __repr__ = as_text


aten = torch.ops.aten
_NAMED = 3  # ops that one row of the table names at most
COPY_LIMIT = 64 << 20
"""Bytes of the largest leaf that is copied without a word: under 30 us of an H200's bandwidth, and
less than the cache of one layer of a model that serves, which is what a copy must not double."""


def donate(
    graph: Graph,
    leaves: Sequence[Leaf],
    returns: Mapping[int, int],
    allow_copies: bool | int,
    refuse: Refusals,
) -> DonationTable:
    """Put each donated leaf's new value into its buffer, in `graph`, and say how.

    Args:
        returns: index of a donated leaf to the index of the output that is its new value.
        allow_copies: how many bytes a leaf may have that must be copied; or False, True.

    Raises:
        DonationError: an output has another shape or dtype than its leaf, or a leaf must be copied
            that is too large for it; with paths.
    """
    inputs = inputs_of(graph.gm.graph)
    returns = _fitting(graph, leaves, inputs, results_of(graph.gm.graph), returns, refuse)
    memory = Memory(graph.gm.graph)
    copied: dict[int, str] = {}
    for k, out in returns.items():
        new = results_of(graph.gm.graph)[out]
        if not same_place(inputs[k].meta["val"], new.meta["val"]):
            origin = _origin(new, inputs, leaves)  # before the graph is changed
            if (why := make_in_place(new, inputs[k], memory)) is not None:
                copied[k] = f"{origin}; {why}"

    settle(graph.gm)
    writers = _writers(graph.gm)
    rows = []
    for k in returns:
        lines = writers.get(storage_key(inputs[k].meta["val"]), [])
        null_slots = k not in copied and all(line.startswith("fngraph.") for line in lines)
        names = ", ".join(list(dict.fromkeys(lines))[:_NAMED])
        how = ("in place", f"by {names}") if lines else ("unchanged", "returned as it came")
        how = ("copied", copied[k]) if k in copied else how
        rows.append(Donation(leaves[k].path, *how, null_slots))
    _refuse_copies(leaves, copied, allow_copies, refuse)
    copies = {k: returns[k] for k in copied}
    append_copies(graph.gm, copies, set(returns.values()))
    return DonationTable(tuple(rows))


def drop_dead(graph: fx.Graph, raising: bool = False) -> None:
    """Erase ops whose results nobody reads: they would seem to need an old value, or mix rows.

    Args:
        raising: let those stay that may raise an error, for ever: `forward` itself would.
    """
    for node in reversed(graph.nodes):
        if raising and all(_is_unread_part(user) for user in node.users) and _may_raise(node):
            node.meta[STAYS] = True
        gives = is_op(node) and node.target._schema.returns  # type: ignore[union-attr]
        gives = gives or is_loop(node) or is_loop_result(node)
        if gives and not node.users and not has_effect(node):
            graph.erase_node(node)


def _is_unread_part(node: fx.Node) -> bool:
    return node.target is operator.getitem and not node.users


def _may_raise(node: fx.Node) -> bool:
    if is_loop(node):
        return any(_may_raise(x) for one in node.target.graphs for x in one.graph.nodes)  # type: ignore[union-attr]
    return is_op(node) and may_raise(node.target, node.meta.get("val"))


def _origin(new: fx.Node, inputs: Sequence[fx.Node], leaves: Sequence[Leaf]) -> str:
    if new in inputs:
        return f"it is {leaves[inputs.index(new)].path}"
    if is_loop_result(new):
        return f"{new.args[0].target} makes it ({line_of(new)})"  # type: ignore[union-attr]
    maker = new.target if new.op == "call_function" else "a constant"
    return f"{maker} makes it ({line_of(new)})"


def _refuse_copies(
    leaves: Sequence[Leaf],
    copied: Mapping[int, str],
    allow_copies: bool | int,
    refuse: Refusals,
) -> None:
    if allow_copies is True:
        return
    limit = -1 if allow_copies is False else allow_copies
    large = {leaves[k]: why for k, why in copied.items() if leaves[k].nbytes > limit}
    if large:
        lines = [f"{leaf.path}, {_size(leaf.nbytes)}: {why}" for leaf, why in large.items()]
        which = "1 large donated leaf" if len(large) == 1 else f"{len(large)} large donated leaves"
        refuse(
            DonationError(
                f"{which}, {_size(sum(leaf.nbytes for leaf in large))}, would be copied at each "
                "step, which takes as much memory again:\n" + "\n".join(lines) + "\nRead the old "
                "value before the new one is made, and make it with index_put, slice_scatter, "
                "where or arithmetic; or allow the copy: fg.graphify(..., allow_copies=True)"
            )
        )


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**20:.1f} MiB" if nbytes >= 2**20 else f"{nbytes} bytes"


def _fitting(
    graph: Graph,
    leaves: Sequence[Leaf],
    inputs: Sequence[fx.Node],
    results: Sequence[fx.Node],
    returns: Mapping[int, int],
    refuse: Refusals,
) -> dict[int, int]:
    """`returns` without the new values that do not fit their buffers, which are refused."""
    fits = {}
    for k, out in returns.items():
        old, new = inputs[k].meta["val"], results[out].meta["val"]
        want, got = _brief(graph, old), _brief(graph, new)
        if want == got:
            fits[k] = out
            continue
        same_shape = want.partition("[")[2] == got.partition("[")[2]
        fix = f"new.to({old.dtype})" if same_shape else "index_put or slice_scatter into it"
        refuse(
            DonationError(
                f"the donated leaf {leaves[k].path} is {want} but comes back as {got}; its new "
                f"value must fit its buffer. Make it fit ({fix}), or do not donate it"
            )
        )
    return fits


def _brief(graph: Graph, t: torch.Tensor) -> str:
    sizes = ", ".join(graph.dim(n).text for n in t.shape)
    return f"{str(t.dtype).removeprefix('torch.')}[{sizes}]@{t.device}"


def _writers(gm: fx.GraphModule) -> dict[int, list[str]]:
    """Storage key to a description of each op that writes it."""
    found: dict[int, list[str]] = {}
    for node in gm.graph.nodes:
        for target in written_by(node):
            key = storage_key(target.meta["val"])
            found.setdefault(key, []).append(f"{name_of(node)} ({line_of(node)})")
    return found


def append_copies(gm: fx.GraphModule, copies: Mapping[int, int], returned: set[int]) -> None:
    """Clone what still reads an old value, copy the new ones in, return the buffers themselves.

    A buffer that another one still needs is written after it, so that `a, b = new, a` clones
    nothing; a swap has no such order, and one side is cloned.
    """
    inputs, output = inputs_of(gm.graph), gm.graph.output_node()
    results = list(results_of(gm.graph))
    buffer = {k: storage_key(inputs[k].meta["val"]) for k in copies}

    def cloned(node: fx.Node) -> fx.Node:
        clone = gm.graph.call_function(aten.clone.default, (node,))
        clone.meta["val"] = torch.empty_like(node.meta["val"])
        return clone

    with gm.graph.inserting_before(output):
        for out, node in enumerate(results):
            if out not in returned and storage_key(node.meta["val"]) in buffer.values():
                results[out] = cloned(node)
        sources = {k: results[out] for k, out in copies.items()}
        while sources:
            needed = {storage_key(node.meta["val"]) for node in sources.values()}
            k = next((k for k in sources if buffer[k] not in needed), None)
            if k is None:
                k = next(iter(sources))
                for j, node in sources.items():
                    if storage_key(node.meta["val"]) == buffer[k]:
                        sources[j] = cloned(node)
            source = sources.pop(k)
            copy = gm.graph.call_function(aten.copy_.default, (inputs[k], source))
            copy.meta["val"] = inputs[k].meta["val"]
            if "stack_trace" in source.meta:  # the line of what it copies
                copy.meta["stack_trace"] = source.meta["stack_trace"]
            results[copies[k]] = inputs[k]
    output.args = (results,)
    gm.graph.lint()
