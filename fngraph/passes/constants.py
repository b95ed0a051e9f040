"""Constants of a step: what is made of nothing but literals is computed once, when it is traced.

    1 / theta ** (arange(0, D, 2) / D)     ->  a tensor that the graph reads, as one of literals is

The very ops run, on the device, under the state that a step runs under, so that the bits are those
that each step would have computed. The trace holds the result with the tensors of literals, so it
is an input of the pieces that read it: their code and what code is kept by know nothing of its
values.

What stays: results above `MOST_BYTES`; random draws, and memory that nobody has filled; memory that
is written later, or returned; views, which cost nothing; ops of anybody but torch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import fx

from fngraph.core.text import count
from fngraph.fx.generators import has_effect
from fngraph.fx.nodes import is_op, is_tensor, line_of, storages_written
from fngraph.fx.schemas import is_functional
from fngraph.passes.running.checks import Rewritten
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import DisableTorchFunction
from fngraph.torch_facts.schemas import is_view

MOST_BYTES = 1 << 16
"""Of one result, and of each value on the way to it. Frequencies of a rope take some hundreds."""


def fold_constants(graph: fx.Graph) -> Rewritten:
    """The graph with a constant for each such result."""
    values: dict[fx.Node, torch.Tensor] = {}
    large: dict[str, None] = {}
    try:
        for node in _made_of_literals(graph, values, large):
            with _as_in_a_step(node.meta["val"].device.type):
                values[node] = _computed(node, values)
    except Exception as error:  # whatever a device raises that is not here
        return Rewritten(graph, 0, (f"constants are computed in each step: {error}",))
    ops = [node for node in values if node.op == "call_function"]
    numbers = _numbered(values)
    for node in reversed(ops):
        if is_view(node.target) and any(user not in values for user in node.users):
            del values[node]  # what it is a view of is the constant
    made: dict[int, fx.Node] = {}
    for node in ops:
        if node in values and any(user not in values for user in node.users):
            if numbers[node] not in made:
                made[numbers[node]] = _constant(graph, node, values[node])
            node.replace_all_uses_with(
                made[numbers[node]], delete_user_cb=lambda user: user not in values
            )
    for node in reversed(ops):
        if not node.users and not has_effect(node):
            graph.erase_node(node)
    return Rewritten(graph, len(made), tuple(large))


def _made_of_literals(
    graph: fx.Graph, values: dict[fx.Node, torch.Tensor], large: dict[str, None]
) -> Iterator[fx.Node]:
    """Each op whose arguments are numbers or among `values`, to which the caller adds its own.

    Args:
        large: gets a line for each that is too large.
    """
    apart = storages_written(graph.nodes)
    apart |= {storage_key(x.meta["val"]) for x in graph.output_node().all_input_nodes}
    for node in list(graph.nodes):
        if node.op == "get_attr":  # which nobody writes: a trace copies what is written
            values[node] = node.meta["value"].to(node.meta["val"].device)
        elif _computes(node) and all(x in values for x in node.all_input_nodes):
            val = node.meta["val"]
            numbers = (*val.shape, *val.stride(), val.storage_offset())
            if storage_key(val) in apart or not all(isinstance(n, int) for n in numbers):
                continue
            nbytes = val.numel() * val.itemsize
            if nbytes > MOST_BYTES and not is_view(node.target):
                large[
                    f"{line_of(node)}: {node.target} makes {count(nbytes, 'byte')} of literals, "
                    f"which each step computes: a constant has at most {MOST_BYTES}. Pass it in"
                ] = None
                continue
            yield node


def _computes(node: fx.Node) -> bool:
    """Whether a node's op gives the same each time. A draw's generator is in its custom meta."""
    if not is_op(node) or not is_tensor(node) or node.meta.get("custom"):
        return False
    op: Any = node.target
    if "empty" in op.overloadpacket.__name__ or node.meta["val"].device.type == "meta":
        return False
    return is_functional(op) or is_view(op)


def _computed(node: fx.Node, values: dict[fx.Node, torch.Tensor]) -> torch.Tensor:
    """What the op gives for what it reads.

    Raises:
        RuntimeError: something else than the trace has said.
    """
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda x: values[x])
    made: torch.Tensor = node.target(*args, **kwargs)  # type: ignore[operator]
    want = node.meta["val"]
    for said, own in ((want.shape, made.shape), (want.stride(), made.stride())):
        if tuple(said) != tuple(own):
            raise RuntimeError(f"{line_of(node)}: {node.target} gives {own}, traced as {said}")
    if (made.dtype, made.device) != (want.dtype, want.device):
        raise RuntimeError(f"{line_of(node)}: {node.target} gives {made.dtype} on {made.device}")
    return made


@contextlib.contextmanager
def _as_in_a_step(device: str) -> Iterator[None]:
    """No gradients, autocast or function modes: the trace has decided."""
    with torch.inference_mode(False), torch.no_grad(), torch.autocast(device, enabled=False):
        with DisableTorchFunction():
            yield


def _numbered(values: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """One number for all that are made alike."""
    numbers: dict[fx.Node, int] = {}
    known: dict[str, int] = {}
    for node in values:
        told = node.name
        if node.op == "call_function":
            given = fx.map_arg((node.args, dict(node.kwargs)), lambda x: f"%{numbers[x]}")
            told = f"{node.target} {given}"
        numbers[node] = known.setdefault(told, len(known))
    return numbers


def _constant(graph: fx.Graph, node: fx.Node, value: torch.Tensor) -> fx.Node:
    """A node that reads a constant, before the one that would compute it."""
    with graph.inserting_before(node):
        new = graph.get_attr(f"folded_{node.name}")
    new.meta = node.meta | {"value": value}
    return new
