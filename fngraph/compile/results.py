"""What compiled code gives back: tensors of its own; views are made of them outside of it.

An op's results must be no views of its arguments nor of one another. So the code of a piece returns
the memory that it makes, each storage once and whole, and every result of the piece is that memory,
or an argument's, with sizes, strides and an offset of its own.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import (
    inputs_of,
    is_op,
    is_tensor,
    line_of,
    name_of,
    op_name,
    results_of,
    storages_written,
    written_by,
)
from fngraph.fx.pieces.collectives import keep_order
from fngraph.fx.schemas import draws
from fngraph.torch_facts.memory import storage_key


@dataclasses.dataclass(frozen=True)
class View:
    """A result as memory that is at hand.

    Attributes:
        of: index of the tensor: the piece's arguments, then what the code has made.
        whole: whether it is that tensor itself.
        like: a fake of it.
        base: a fake of the tensor.
    """

    of: int
    whole: bool
    like: torch.Tensor
    base: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a piece is called as compiled code.

    Attributes:
        gm: the piece, which returns new memory alone; of (T, R, *tensors).
        inputs: fakes of its tensors.
        made: fakes of what it returns.
        written: for each input, whether it is written.
        views: the piece's own results.
    """

    gm: fx.GraphModule
    inputs: tuple[torch.Tensor, ...]
    made: tuple[torch.Tensor, ...]
    written: tuple[bool, ...]
    views: tuple[View, ...]


def plan_of(gm: fx.GraphModule) -> Plan | str:
    """How to call a piece as compiled code; or why it stays as it was traced."""
    nodes = list(gm.graph.nodes)
    inputs = list(filter(is_tensor, inputs_of(gm.graph)))
    fakes = [_fake(n) for n in inputs]
    storages = [storage_key(x) for x in fakes]
    values = [x for n in nodes if isinstance(x := _fake(n), torch.Tensor)]
    written = storages_written(nodes)
    if any(x.is_complex() or x.is_conj() or x.is_neg() for x in values):
        return "it computes with complex numbers"
    if any(is_op(n) and draws(n.target, n.args, n.kwargs) for n in nodes):
        return "it draws random numbers"
    if any(storages.count(key) > 1 for key in written & set(storages)):
        return "it writes memory that two of its arguments share"
    if not inputs:
        return "it has no arguments"
    first: dict[int, fx.Node] = {}  # the node that makes a storage
    for node in nodes:
        if isinstance(value := _fake(node), torch.Tensor):
            first.setdefault(storage_key(value), node)
    if (scatter := scattered_and_lost(nodes, storages, first)) is not None:
        return (
            f"{name_of(scatter)} ({line_of(scatter)}) writes a part of memory that is overwritten "
            "later, and what it made is kept elsewhere: Inductor would keep what overwrites it"
        )
    bases = [*inputs]
    views = []
    for node in results_of(gm.graph):
        value = _fake(node)
        base = first[storage_key(value)]
        if base not in bases:
            bases.append(base)
        if value.dtype != _fake(base).dtype:
            return f"{node.name} is a view of another dtype"
        views.append(View(bases.index(base), base is node, value, _fake(base)))
    makes = bases[len(inputs) :]
    if not makes and not written & set(storages):
        return "it makes views alone"

    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.graph_copy(gm.graph, env)
    graph.output(tuple(env[node] for node in makes))
    keep_order(graph)
    graph.eliminate_dead_code(is_impure_node=_stays)
    return Plan(
        fx.GraphModule({}, graph),
        tuple(fakes),
        tuple(_fake(node) for node in makes),
        tuple(key in written for key in storages),
        tuple(views),
    )


def scattered_and_lost(
    nodes: Sequence[fx.Node], arguments: Sequence[int], first: Mapping[int, fx.Node]
) -> fx.Node | None:
    """A scatter whose result Inductor would read too late; or None.

    It puts a scatter of an argument's memory into that memory, where this is overwritten later
    anyway; but a result that is no more than copied or returned it reads at the very end. Seen in
    torch 2.13, of `torch.compile` as well: `n = a.index_put(i, v); a.copy_(c); b.copy_(n)`.

    Args:
        arguments: the storages of the piece's arguments.
        first: the node that makes each storage.
    """
    stems = {key: key for key in arguments}  # the argument that memory may be taken for
    made: dict[int, fx.Node] = {}  # what holds a scatter's result
    lost: set[int] = set()  # arguments that are overwritten behind a scatter
    kept: list[tuple[int, fx.Node]] = []
    for node in nodes:
        read = [x for x in node.all_input_nodes if is_tensor(x)]
        if node.op == "output":
            kept += [(stems[k], made[k]) for x in read
                     if (k := storage_key(_fake(x))) in made and k not in arguments]  # fmt: skip
        if not isinstance(_fake(node), torch.Tensor):
            continue
        if not is_op(node) or not read:
            continue
        name = op_name(node).partition("::")[2]
        scatters = any(part in name for part in _SCATTERS)
        target = next(iter(written_by(node)), None)
        into = storage_key(_fake(read[0] if target is None else target))
        if target is None:
            if into in stems and (scatters or name in _SAME):
                key = storage_key(_fake(node))
                stems.setdefault(key, stems[into])
                if scatters or into in made:
                    made.setdefault(key, node if scatters else made[into])
            continue
        if name in _OVERWRITES:
            source = storage_key(_fake(read[-1]))
            if source in made and source != into:
                kept.append((stems[source], made[source]))
            if any(stems[k] == into for k in made):
                lost.add(into)
        if into in stems and (scatters or first[into] is not target):
            made[into] = node
    return next((node for argument, node in kept if argument in lost), None)


_SCATTERS = ("scatter", "index_put", "index_add", "index_copy", "index_fill", "index_reduce")
_SAME = ("clone", "contiguous", "_to_copy", "alias_copy", "mul", "add", "sub", "div")
"""What may be taken away, as `x * 1` is."""
_OVERWRITES = ("copy_", "fill_", "zero_")


def _fake(node: fx.Node) -> Any:
    return node.meta.get("val")


def _stays(node: fx.Node) -> bool:
    return node.op in ("placeholder", "output") or bool(written_by(node))


def with_numbers(gm: fx.GraphModule, numbers: Sequence[int | None]) -> fx.GraphModule:
    """The same, with numbers in place of its first arguments; None: it stays an argument."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(gm.graph, env))
    for node, number in zip(inputs_of(graph), numbers):
        if number is None:
            continue

        def put(x: fx.Node, node: fx.Node = node, number: int = number) -> Any:
            return number if x is node else x

        for user in list(node.users):
            user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), put)
        graph.erase_node(node)
    return fx.GraphModule({}, graph)
