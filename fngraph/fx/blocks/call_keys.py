"""What a call of a function can see, as a key: calls with equal keys leave the same in a trace.

Tensors count by what a trace knows of them; other arguments, defaults and closed-over values by
their own equality, type and text (1 is not 1.0). What has a state that no key shows (a module, an
object that is equal to itself alone) makes a call unlike any other.
"""

from __future__ import annotations

import contextvars
import dataclasses
import functools
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from fngraph.core import trees
from fngraph.core.structs import Exactly
from fngraph.fx.leaves import Leaf
from fngraph.fx.nodes import SIZES
from fngraph.fx.tracing.ambient import kernels
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import DisableTorchFunction, function_modes, innermost_transform
from fngraph.torch_facts.tracing import FakeTensor, get_proxy_slot, in_forward_mode

_WITHOUT_STATE = (
    types.MethodDescriptorType, types.WrapperDescriptorType, types.EllipsisType, torch.dtype,
    torch.layout, torch.memory_format,
)  # fmt: skip
_SETTLED = {"builtins", "torch", "fngraph", "einops", "numpy", *sys.stdlib_module_names}
"""Packages whose modules and classes stay as they are."""


class _Unlike(Exception):
    """The call depends on something that cannot be compared."""


@dataclasses.dataclass(frozen=True)
class BodyCall:
    """One call of a body inside a trace.

    Attributes:
        key: equal for calls that are alike.
        tensors: the tensors that it sees, in order.
        nodes: the graph node of each.
    """

    key: tuple[Any, ...]
    tensors: tuple[FakeTensor, ...]
    nodes: tuple[fx.Node, ...]

    def is_same(self, other: BodyCall | None) -> bool:
        """Whether both see the very same tensors, and the rest alike."""
        if other is None or self.key != other.key:
            return False
        return all(a is b for a, b in zip(self.tensors, other.tensors))


def call_of(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    owners: Mapping[int, Leaf],
    tracer: Any,
) -> BodyCall | None:
    """What `fn(*args, **kwargs)` sees; None if that cannot be said.

    Args:
        owners: storage key to the leaf that was passed to the traced function with that storage.
        tracer: torch's, which knows the node of each tensor.
    """
    seen = _Seen(owners, tracer)
    try:
        seen.ambient()
        with DisableTorchFunction():  # or each x.shape goes through torch's own modes
            seen.add((fn, args, dict(kwargs)))
        key = tuple(seen.parts)
        hash(key)
    except (_Unlike, TypeError, ValueError):  # unhashable; a memoryview says it by a ValueError
        return None
    return BodyCall(key, tuple(seen.tensors), tuple(seen.nodes))


class _Seen:
    """Collects the parts of a key."""

    def __init__(self, owners: Mapping[int, Leaf], tracer: Any) -> None:
        self.owners, self.tracer = owners, tracer
        self.parts: list[Any] = []
        self.tensors: list[FakeTensor] = []
        self.nodes: list[fx.Node] = []
        self.numbers: dict[Any, int] = {}

    def number(self, thing: Any) -> int:
        """The same for the same thing, in order of appearance."""
        return self.numbers.setdefault(thing, len(self.numbers))

    def ambient(self) -> None:
        """What torch's own state has to say. Transforms see what no node shows."""
        modes = function_modes()
        foreign = any(not type(m).__module__.startswith(("torch.", "fngraph.fx.")) for m in modes)
        transformed = innermost_transform() is not None
        if foreign or transformed or in_forward_mode():
            raise _Unlike
        for device in ("cpu", "cuda"):
            self.parts += [torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)]
        self.parts += [
            torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype(),
            *kernels(), *modes,
        ]  # fmt: skip

    def add(self, tree: Any) -> None:
        """A tree: its structure and each of its leaves."""
        leaves, treedef = trees.flatten(tree, is_leaf=_shows_more)
        self.parts += [treedef, str(treedef)]  # text, because 1 == 1.0 in a static field
        for leaf in leaves:
            self.leaf(leaf)

    def leaf(self, x: Any) -> None:
        """Whatever is no tree. A dict comes here too, be it of a class that is none."""
        kind = type(x)
        if isinstance(x, torch.Tensor):
            self.tensor(x)
        elif isinstance(x, SIZES):
            self.parts += [kind, x.node.expr]
        elif isinstance(x, dict):
            self.parts += [kind, tuple(x)]
            self.add((tuple(x.values()), getattr(x, "__dict__", None)))
        elif isinstance(x, tuple | list):
            self.parts += [kind, len(x)]
            self.add((tuple(x), getattr(x, "__dict__", None)))
        elif isinstance(x, types.FunctionType):
            self.function(x)
        elif isinstance(x, functools.partial):
            self.add((kind, x.func, x.args, x.keywords, vars(x)))
        elif isinstance(x, types.MethodType):
            self.add((kind, x.__func__, x.__self__))
        elif has_state(x):
            raise _Unlike
        else:
            hash(x)  # or it may change: a set
            self.parts += [Exactly((x,)), repr(x)]

    def function(self, fn: types.FunctionType) -> None:
        """By what it would do: code, defaults, closure and what was put on it. Its globals are what
        they are."""
        if ("function", id(fn)) in self.numbers:  # it may close over itself
            self.parts.append(self.number(("function", id(fn))))
            return
        self.number(("function", id(fn)))
        self.parts += [fn.__code__, id(fn.__globals__)]
        self.add((fn.__defaults__, fn.__kwdefaults__, vars(fn)))
        for cell in fn.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # still empty
                self.parts.append("empty")
            else:
                self.add(value)

    def tensor(self, x: torch.Tensor) -> None:
        """What a trace knows of a tensor, and which others are the same or share its memory."""
        slot = get_proxy_slot(x, self.tracer, None)
        if type(x) is not FakeTensor or slot is None or slot.constant is not None:
            raise _Unlike
        if x.requires_grad or x.is_conj() or x.is_neg() or x.layout is not torch.strided:
            raise _Unlike
        node, storage = slot.proxy.node, storage_key(x)
        owner = self.owners.get(storage)
        sizes = (*x.shape, *x.stride(), x.storage_offset(), x.untyped_storage().nbytes())
        self.parts += [
            x.dtype, x.device, x.dim(), owner and owner.role,
            *(s.node.expr if isinstance(s, torch.SymInt) else s for s in sizes),
            self.number(id(x)), self.number(node), self.number(("storage", storage)),
        ]  # fmt: skip
        self.tensors.append(x)
        self.nodes.append(node)


def has_state(x: Any) -> bool:
    """Whether an object may change without a change of what it is equal to."""
    if isinstance(x, types.BuiltinFunctionType):
        return not isinstance(x.__self__, types.ModuleType | None)
    if isinstance(x, type | types.ModuleType):  # both are namespaces, in which anything may change
        home = x.__module__ if isinstance(x, type) else x.__name__
        return home.partition(".")[0] not in _SETTLED
    if isinstance(x, contextvars.ContextVar):
        return True
    return type(x).__hash__ is object.__hash__ and not isinstance(x, _WITHOUT_STATE)


def _shows_more(x: Any) -> bool:
    """Whether a tree's own look at a container would miss a part of it: the order of a dict's keys,
    what was put on an instance of the user's own kind of tuple."""
    return isinstance(x, dict) or (isinstance(x, tuple | list) and bool(getattr(x, "__dict__", 0)))
