"""`block`: a layer's body is traced once, and stamped for each further call that would trace alike.

A model runs one body many times over leaves that differ in their memory alone. In a trace, the
first such call runs the body; a later one with an equal key copies the graph nodes that it left,
with this call's tensors in the place of the first one's. The graph is the one that running the body
would have given. What cannot be told to be alike is run: that is slower, and never wrong.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import fx

from fngraph.core import trees
from fngraph.core.text import expect
from fngraph.core.where import user_line
from fngraph.errors import TreeError
from fngraph.fx.blocks.call_keys import BodyCall, call_of, has_state
from fngraph.fx.blocks.fakes import elements_of, fakes_like
from fngraph.fx.nodes import SIZES, is_size
from fngraph.fx.tracing.purity import PurityMode
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import (
    DisableTorchFunction,
    dispatch_mode,
    tree_leaves,
    without_modes,
)
from fngraph.torch_facts.tracing import (
    FakeTensor,
    get_proxy_mode,
    get_proxy_slot,
    no_python_dispatcher,
    track_tensor_tree,
)

Body = TypeVar("Body", bound=Callable[..., Any])
aten = torch.ops.aten
_OF_A_TENSOR = {aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default,
                aten.sym_storage_offset.default}  # fmt: skip
_FAKES = ("val", "eager_input_vals")  # what a node's meta says in fake tensors


def block(fn: Body) -> Body:
    """Mark a layer's body, so that a trace runs it once and stamps it for the other layers.

    Outside a trace it is `fn` itself. In one, a call is stamped if an earlier one was alike in all
    that the body can see of it: structure; shape, dtype, strides, device and role of each tensor;
    which tensors share memory; every other argument, default and closed-over value; autocast and
    other ambient state. The graph is the same as without, with the body's own lines.

    A body is run at each call, as without the mark, where this cannot be told: inside a transform
    (`torch.func.grad`, `vmap`) or where gradients are recorded, and with arguments that are not
    tensors, trees or hashable values, such as a module or an object with a state of its own.

    Like the rest of `forward`, the body must be pure. What Python reads from globals, or changes
    there, is not seen: a counter in a global would count one layer.

    Args:
        fn: any function of trees of tensors and hashable values, to trees of tensors.
    """
    expect(Callable, "a function", TreeError, body=fn)

    @functools.wraps(fn)
    def body(*args: Any, **kwargs: Any) -> Any:
        mode = None if torch.compiler.is_compiling() else dispatch_mode()
        if not isinstance(mode, PurityMode):
            return fn(*args, **kwargs)
        return _trace_or_stamp(mode, fn, args, kwargs)

    return body  # type: ignore[return-value]


def _trace_or_stamp(mode: PurityMode, fn: Any, args: Any, kwargs: Any) -> Any:
    proxies = get_proxy_mode()
    assert proxies is not None
    tracer: Any = proxies.tracer
    call = call_of(fn, args, kwargs, mode.owners, tracer)
    if call is None:
        return fn(*args, **kwargs)
    if call.key not in mode.blocks:
        before = len(tracer.graph.nodes)
        out = fn(*args, **kwargs)
        after = call_of(fn, args, kwargs, mode.owners, tracer)
        nodes = list(tracer.graph.nodes)[before:]
        mode.blocks[call.key] = stamp_of(call, after, nodes, out, tracer)
        return out
    stamp = mode.blocks[call.key]
    if stamp is None:
        return fn(*args, **kwargs)
    out = stamp.again(call, tracer)
    mode.made.note(trees.flatten(out)[0], user_line())
    return out


@dataclasses.dataclass(frozen=True)
class Stamp:
    """What one call of a body left in the graph. It holds none of the call's tensors.

    Attributes:
        inputs: the node of each tensor that the call saw.
        storages: the storage of each.
        nodes: those that the call added, in order.
        moved: input to the node of what was written into it.
        outputs: for each output leaf the node that made it, `_Input`, or the value itself.
        treedef: the outputs' structure.
    """

    inputs: tuple[fx.Node, ...]
    storages: tuple[int, ...]
    nodes: tuple[fx.Node, ...]
    moved: dict[int, fx.Node]
    outputs: tuple[Any, ...]
    treedef: Any

    @functools.cached_property
    def names(self) -> list[str]:
        """The nodes' names, without their numbers."""
        return [re.sub(r"_\d+$", "", node.name) for node in self.nodes]

    @functools.cached_property
    def lengths(self) -> dict[int, Any]:
        """Elements in each storage that the call made, of the dtype that it was made with."""
        found: dict[int, Any] = {}
        for fake in _fakes(self.nodes):
            if storage_key(fake) not in found:
                found[storage_key(fake)] = elements_of(fake)
        return found

    def again(self, call: BodyCall, tracer: Any) -> Any:
        """The outputs of another call, whose nodes are added to the tracer's graph."""
        copies = dict(zip(self.inputs, call.nodes))
        memory: dict[int, torch.Tensor] = dict(zip(self.storages, call.tensors))
        with without_modes(), no_python_dispatcher(), DisableTorchFunction():
            for node, name in zip(self.nodes, self.names):
                copies[node] = self._copy(node, name, copies, memory, tracer)

            def track(tensor: Any, node: fx.Node) -> Any:
                proxy = tracer.proxy(copies[node])
                return track_tensor_tree(tensor, proxy, constant=None, tracer=tracer)

            for i, node in self.moved.items():
                track(call.tensors[i], node)
            new = dict.fromkeys(x for x in self.outputs if isinstance(x, fx.Node))
            made = {n: track(fakes_like(n.meta["val"], memory, self.lengths), n) for n in new}
        leaves = [_output(x, call.tensors, made) for x in self.outputs]
        return trees.unflatten(self.treedef, leaves)

    def _copy(
        self, node: fx.Node, name: str, copies: dict[fx.Node, fx.Node], memory: Any, tracer: Any
    ) -> fx.Node:
        target = node.target
        if target in _OF_A_TENSOR and all(copies.get(n, n) is n for n in node.all_input_nodes):
            return node  # asked of a tensor from outside, for all calls
        if node.op == "get_attr":  # each call has its own literals
            target = tracer.get_fresh_qualname("_tensor_constant")
            setattr(tracer.root, target, getattr(tracer.root, str(node.target)).clone())
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: copies.get(n, n))
        copy = tracer.graph.create_node(node.op, target, args, kwargs, name)
        copy.meta = dict(node.meta)
        for key in _FAKES:
            if key in node.meta:
                copy.meta[key] = fakes_like(node.meta[key], memory, self.lengths)
        return copy


@dataclasses.dataclass(frozen=True)
class _Input:
    """An output that is the input of this index."""

    index: int


def _output(x: Any, tensors: Sequence[Any], made: dict[fx.Node, Any]) -> Any:
    if isinstance(x, _Input):
        return tensors[x.index]
    return made[x] if isinstance(x, fx.Node) else x


def stamp_of(
    call: BodyCall, after: BodyCall | None, nodes: list[fx.Node], out: Any, tracer: Any
) -> Stamp | None:
    """What a call left; None where another could not leave the same.

    That is where it changed what it was given, reached a tensor that `call` does not have, or
    returned something that is neither a tensor nor a value.

    Args:
        after: the same call, looked at again once it was made.
        nodes: those that the call added.
    """
    known = {*nodes, *call.nodes}
    asking = [node for node in nodes if node.target not in _OF_A_TENSOR]
    reached = {arg for node in asking for arg in node.all_input_nodes if not is_size(arg)}
    if after is None or not call.is_same(after) or reached - known:
        return None
    if any(fake.is_conj() or fake.is_neg() for fake in _fakes(nodes)):
        return None
    index = {id(tensor): i for i, tensor in enumerate(call.tensors)}
    leaves, treedef = trees.flatten(out)
    outputs: list[Any] = []
    for x in leaves:
        if id(x) in index:
            outputs.append(_Input(index[id(x)]))
        elif isinstance(x, torch.Tensor):
            slot = get_proxy_slot(x, tracer, None)
            if slot is None or slot.constant is not None or x.requires_grad:
                return None
            outputs.append(slot.proxy.node)
        elif not isinstance(x, SIZES) and (has_state(x) or type(x).__hash__ is None):
            return None
        else:
            outputs.append(x)
    moved = {i: b for i, (a, b) in enumerate(zip(call.nodes, after.nodes)) if a is not b}
    if {x for x in (*outputs, *moved.values()) if isinstance(x, fx.Node)} - set(nodes):
        return None
    storages = tuple(map(storage_key, call.tensors))
    return Stamp(call.nodes, storages, tuple(nodes), moved, tuple(outputs), treedef)


def _fakes(nodes: Sequence[fx.Node]) -> list[FakeTensor]:
    found = tree_leaves([node.meta.get(key) for node in nodes for key in _FAKES])
    return [x for x in found if isinstance(x, FakeTensor)]
