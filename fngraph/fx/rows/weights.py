"""Which leaves are weights: numbers that are taken to be finite, whatever padding looks up.

Held ones are. A donated one is if it is trained, so that its new value is its old one with
something added, or scaled: w - lr * g. What is written by rows, or chosen, is a state of requests,
each with what is its own; a running maximum begins at -inf; of what only comes back nobody knows
who writes it, unless others beside it are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.nodes import (
    inputs_of,
    is_loop,
    is_op,
    operands,
    results_of,
    storages_written,
    written_by,
)
from fngraph.fx.rows.boxes import is_one
from fngraph.fx.rows.writes import WRITES
from fngraph.fx.schemas import named, plain_name, reads_nothing
from fngraph.torch_facts.memory import storage_key

_BY_PLACE = (*WRITES, "slice_scatter", "select_scatter")
_TRAINS = frozenset(
    """add sub rsub mul div neg addcmul addcdiv lerp clamp clamp_min clamp_max _to_copy clone alias
    detach view _unsafe_view reshape t transpose permute expand contiguous _fused_adam _fused_adamw
    _fused_sgd _fused_adagrad""".split()
)
"""Ops that make a new value of an old one, of which something is left in each element."""


def weights_of(
    gm: fx.GraphModule, leaves: Sequence[Leaf], returns: Mapping[int, int]
) -> set[fx.Node]:
    """The placeholders of leaves that are weights.

    Args:
        returns: index of a donated leaf to the index of the output that is its new value.
    """
    inputs = inputs_of(gm.graph)
    held = {node for node, leaf in zip(inputs, leaves) if leaf.role is Role.HELD}
    donated = {node for node, leaf in zip(inputs, leaves) if leaf.role is Role.DONATED}
    lasting = _lasting(gm, donated) if donated else None
    if lasting is None:
        return held
    results = results_of(gm.graph)
    news = {inputs[leaf]: results[i] for leaf, i in returns.items()}
    kept = {x for x, new in news.items() if x in lasting and new in lasting}
    trained = {x for x in kept if news[x] is not x or any(x in written_by(n) for n in x.users)}
    floats = any(x.meta["val"].dtype.is_floating_point for x in trained)
    return held | kept if floats else held


def _lasting(gm: fx.GraphModule, donated: set[fx.Node]) -> set[fx.Node] | None:
    """Donated values and what is trained of them, without those that are overwritten by others;
    None if any is written by rows."""
    memory = {storage_key(node.meta["val"]) for node in donated}
    made, lasting, lost = set(donated), set(donated), set[fx.Node]()
    for node in gm.graph.nodes:
        if node.op != "call_function" or made.isdisjoint(node.all_input_nodes):
            continue
        if is_loop(node):
            if storages_written([node]) & memory:
                return None
            made.add(node)
            continue
        if not is_op(node):  # one of several results
            made.add(node)
            lasting.update([node] if not lasting.isdisjoint(node.all_input_nodes) else ())
            continue
        if reads_nothing(node.target):
            continue
        if plain_name(node.target) in _BY_PLACE and node.args[0] in made:
            return None
        written = set(written_by(node))
        if any(storage_key(x.meta["val"]) in memory for x in written - donated):
            return None  # a part of it, or a view of the whole
        made.add(node)
        if _trains(node, lasting):
            lasting.add(node)
        else:
            lost |= written & donated
    return lasting - lost


def _trains(node: fx.Node, lasting: set[fx.Node]) -> bool:
    """Whether something of an old value is left in each element of a new one."""
    name = plain_name(node.target).removeprefix("_foreach_")
    args = named(node.target, node.args, node.kwargs)
    if name == "copy":
        return args["src"] in lasting
    if name == "where":  # of all, as where a step is left out
        one = all(map(is_one, args["condition"].meta["val"].shape))
        return one and {args["self"], args["other"]} <= lasting
    if name.startswith("clamp") and len(operands(node)) > 1:
        return False  # between other rows
    return name in _TRAINS and not lasting.isdisjoint(node.all_input_nodes)
