"""The functions of a loop, traced once each: what they leave in the graph is taken out again.

A function is called in the trace that goes on, over tensors of its own that stand for what changes
from turn to turn. So each op of it is looked at as any other of `forward`. The nodes that it has
left become a graph of their own, and what they read of the others becomes an operand.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.core.where import user_line
from fngraph.fx.blocks.fakes import fakes_like
from fngraph.fx.loops.closures import Flat, here
from fngraph.fx.nodes import is_size, storages_written
from fngraph.fx.tracing.constants import COPIES
from fngraph.fx.tracing.outside import foreign
from fngraph.fx.tracing.purity import PurityMode
from fngraph.torch_facts.memory import storage_key, with_bits
from fngraph.torch_facts.names import DisableTorchFunction, alive, without_modes
from fngraph.torch_facts.tracing import (
    FakeTensor,
    get_proxy_slot,
    has_proxy_slot,
    no_python_dispatcher,
    preserved_proxies,
    track_tensor_tree,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Body:
    """What one function has left at the end of the graph.

    Attributes:
        inputs: nodes of the tensors that it was given.
        nodes: its own, in order.
        outputs: nodes of what it returned, its own or others.
        fakes: what it returned.
        carries: whether its first outputs are new values of its first inputs.
    """

    inputs: tuple[fx.Node, ...]
    nodes: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    fakes: tuple[torch.Tensor, ...]
    carries: bool = True

    @property
    def reads(self) -> list[fx.Node]:
        """What it reads, or returns, of the graph around it."""
        own = {*self.inputs, *self.nodes}
        read = [x for node in self.nodes for x in node.all_input_nodes]
        return [x for x in dict.fromkeys((*read, *self.outputs)) if x not in own]


def fake_like(x: torch.Tensor, shape: Sequence[Any] | None = None) -> FakeTensor:
    """A fake in memory of its own: laid out as a copy of `x` is; of another shape: contiguous."""
    assert isinstance(x, FakeTensor)
    with without_modes(), x.fake_mode, no_python_dispatcher(), DisableTorchFunction():
        if shape is None:
            return torch.empty_like(x)  # type: ignore[return-value]
        return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)  # type: ignore[return-value]


def track(fake: Any, node: fx.Node, tracer: Any) -> Any:
    """Say which node made a fake; the fake."""
    with without_modes(), no_python_dispatcher(), DisableTorchFunction():
        return track_tensor_tree(fake, tracer.proxy(node), constant=None, tracer=tracer)


def shape_of(x: torch.Tensor) -> tuple[Any, ...]:
    """A tensor's sizes, which nobody sees us ask for: they would seem to be kept by `forward`."""
    with DisableTorchFunction():
        return tuple(x.shape)


def fakes_of(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Other fakes over the same memory, which a node's values are not to be."""
    with without_modes(), no_python_dispatcher(), DisableTorchFunction():
        return [fakes_like(x, {storage_key(x): x}) for x in results]


@contextlib.contextmanager
def left_by(mode: PurityMode) -> Iterator[list[fx.Node]]:
    """A context in which a function is called; the list has, at its end, the nodes that it left."""
    nodes, left = mode.tracer.graph.nodes, list[fx.Node]()
    before = len(nodes)
    stamps, mode.blocks = mode.blocks, {}  # a stamp of a body is of nodes that go
    try:
        with preserved_proxies(mode.tracer):
            yield left
    finally:
        mode.blocks = stamps
    left += list(nodes)[before:]


def trace_body(
    mode: PurityMode,
    fn: Flat,
    examples: Sequence[FakeTensor],
    names: Sequence[str],
    carries: bool = True,
) -> Body:
    """Call `fn` over `examples`, and tell what it has left in the graph.

    Args:
        examples: in memory of their own, one for each tensor that `fn` takes.
        names: of their nodes.
        carries: see `Body`.

    Raises:
        ClosureError: it returned a tensor that is none of this trace.
        whatever `fn` raises.
    """
    tracer, line = mode.tracer, user_line()
    inputs = []
    with left_by(mode) as left:
        for name, fake in zip(names, examples):
            node = tracer.graph.create_node("call_function", _given, (), {}, name)
            node.meta["stack_trace"] = line
            track(fake, node, tracer)
            inputs.append(node)
        mode.made.note(list(examples), line)
        results = here(list(fn(list(examples))))
        outputs = [node_of(mode, x, line) for x in results]
    own = own_of(left, inputs)
    return Body(tuple(inputs), tuple(own), tuple(outputs), tuple(results), carries)


def _given() -> None:
    """What a function is given, until its nodes are a graph of their own."""


def node_of(mode: PurityMode, x: torch.Tensor, line: str) -> fx.Node:
    """The node of a tensor of this trace.

    Raises:
        ClosureError: it is none.
    """
    x = alive(x)
    if not isinstance(x, FakeTensor) or not has_proxy_slot(x, mode.tracer):
        mode.refuse(error := foreign(line, x, mode.owners))
        raise error
    slot: Any = get_proxy_slot(x, mode.tracer)
    return slot.proxy.node  # type: ignore[no-any-return]


def own_of(region: Sequence[fx.Node], inputs: Sequence[fx.Node] = ()) -> list[fx.Node]:
    """The nodes of a function's own: not sizes of what is around it, which may be asked for again,
    nor constants, which are the same at each turn."""
    written = storages_written(region)
    inside: set[fx.Node] = set(inputs)
    found = []
    for node in region:
        if node in inside or node.op == "get_attr":
            continue
        outer = inside.isdisjoint(node.all_input_nodes)
        if outer and (is_size(node) or is_constant(node, written)):
            continue
        inside.add(node)
        found.append(node)
    return found


def is_constant(node: fx.Node, written: Collection[int] = ()) -> bool:
    """Whether it is a literal, or a copy of one that nothing writes."""
    while node.op == "call_function" and node.target in COPIES:
        if storage_key(node.meta["val"]) in written:
            return False
        if not isinstance(given := node.args[0], fx.Node):
            return True  # a copy of a number
        node = given
    return node.op == "get_attr"


def outline(
    tracer: Any,
    functions: Sequence[Body],
    threaded: Mapping[int, fx.Node],
    more: Sequence[fx.Node] = (),
) -> tuple[list[fx.GraphModule], list[fx.Node]]:
    """Take the functions' nodes out of the graph: each as a graph, of what it was given and then of
    all that any of them reads around them, which comes second.

    Args:
        threaded: inputs that are a node of the graph around them, by number.
        more: nodes to count to what is read.
    """
    read = [x for one in functions for x in one.reads]
    reads = list(dict.fromkeys((*read, *threaded.values(), *more)))
    graphs = [_graph(one, reads, threaded) for one in functions]
    for one in reversed(functions):
        for node in reversed((*one.inputs, *one.nodes)):
            tracer.graph.erase_node(node)
    return graphs, reads


def _move(graph: fx.Graph, key: int, to: torch.Tensor) -> None:
    """Say that what lies in a storage lies where `to` does: an input that was one of the graph
    around, whose views and writes are of that."""
    memory, starts = {key: to}, {key: to.storage_offset() * to.itemsize}
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and storage_key(value) == key:
            with without_modes(), no_python_dispatcher(), DisableTorchFunction():
                moved = fakes_like(value, memory, None, starts)
                node.meta["val"] = with_bits(moved, value.is_conj(), value.is_neg())
        for inner in getattr(node.target, "graphs", ()):
            _move(inner.graph, key, to)


def _graph(one: Body, reads: Sequence[fx.Node], threaded: Mapping[int, fx.Node]) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    own = [node for i, node in enumerate(one.inputs) if i not in threaded]
    for node in (*own, *reads):
        copies[node] = graph.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for i, node in threaded.items():
        copies[one.inputs[i]] = copies[node]
    for node in one.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for i, node in threaded.items():
        _move(graph, storage_key(one.inputs[i].meta["val"]), node.meta["val"])
    kept = [x for i, x in enumerate(one.outputs) if i not in threaded or not one.carries]
    graph.output(tuple(copies[x] for x in kept))
    return fx.GraphModule({}, graph)
