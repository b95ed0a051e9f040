"""What an op's schema and tags say of it: what it draws, waits for; its in-place form.

No table of ops says what works in place:

foo(x, ...)             ->  foo_(x, ...)                same overload, same arguments
foo(..., x, ...)        ->  foo(..., x, ..., out=x)     where foo is pointwise
foo_scatter(x, v, ...)  ->  foo(x, ...).copy_(v)        foo is the view of the same name
foo(...)                ->  foo(..., out=x)             where no argument lives in x
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fngraph.torch_facts.names import OpOverload
from fngraph.torch_facts.schemas import inputs_of, out_twins
from fngraph.torch_facts.tracing import free_unbacked_symbols

aten = torch.ops.aten
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_OFF = {"dropout_p": 0.0, "p": 0.0, "train": False, "training": False}
MOVES = (aten.index_put.default, aten.index_copy.default, aten.index_fill.int_Scalar,
         aten.index_fill.int_Tensor, aten.scatter.src, aten.scatter.value, aten.tril.default,
         aten.triu.default, aten.masked_scatter.default, aten.copy.default)  # fmt: skip
"""Ops that put values where an index says and compute none; what no schema says."""
COPIES = (aten.clone.default, aten._to_copy.default)
"""Ops that return what they were given, in memory of its own; what no schema says."""


def named(func: Any, args: Any, kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments by their names in the schema, in its order, defaults included."""
    names, defaults = _declared(func)
    return defaults | dict(zip(names, args)) | dict(kwargs)


@functools.cache
def _declared(func: OpOverload) -> tuple[tuple[str, ...], dict[str, Any]]:
    """An op's arguments by name, and what they are where they are left out."""
    schema = func._schema.arguments
    return tuple(a.name for a in schema), {a.name: a.default_value for a in schema}


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op uses a generator; dropout that is switched off carries the tag all the same."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    given = named(func, args, kwargs)  # torch leaves out what equals the default
    return not any(name in given and given[name] == off for name, off in _OFF.items())


def leaves_device(func: Any, args: Any, result: Any) -> bool:
    """Whether an op copies from an accelerator to the host."""
    if func is not aten._to_copy.default or not isinstance(args[0], torch.Tensor):
        return False  # a number, of which a transform makes a tensor
    return args[0].device.type != "cpu" and result.device.type == "cpu"


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is memory with strides, of numbers that mean themselves."""
    return x.layout is torch.strided and x.dtype not in _QUANTIZED


def waits_for_shape(func: Any, results: Sequence[torch.Tensor]) -> bool:
    """Whether the shape of a result depends on values."""
    if torch.Tag.dynamic_output_shape not in func.tags:
        return False  # the tag is on x[indices] too, which is harmless
    return any(free_unbacked_symbols(t) for t in results)


def is_functional(op: Any) -> bool:
    """Whether `op` is one of torch's own that returns one new tensor and writes nothing."""
    if not isinstance(op, OpOverload) or op.namespace != "aten" or op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


@functools.cache
def in_place(op: OpOverload) -> OpOverload | None:
    """`foo_` of `foo`: writes into its first argument, and nothing else."""
    twin = getattr(getattr(aten, op.overloadpacket.__name__ + "_", None), op._overloadname, None)
    if twin is None or torch.Tag.inplace_view in twin.tags or inputs_of(twin) != inputs_of(op):
        return None
    written = [a.alias_info is not None and a.alias_info.is_write for a in twin._schema.arguments]
    return twin if written[0] and not any(written[1:]) else None


@functools.cache
def scattered_view(op: OpOverload) -> OpOverload | None:
    """`slice` of `slice_scatter`: the view into which the second argument is copied."""
    name = op.overloadpacket.__name__
    # as_strided counts from the start of a storage, which is another one in a buffer
    if not name.endswith("_scatter") or name == "as_strided_scatter":
        return None
    packet = getattr(aten, name.removesuffix("_scatter"), None)
    want = [a for a in inputs_of(op) if a[0] != "src"]
    views = [getattr(packet, o) for o in packet.overloads()] if packet else []
    return next((v for v in views if inputs_of(v) == want and not v._schema.is_mutable), None)


@functools.cache
def out_form(op: OpOverload) -> tuple[OpOverload, str] | None:
    """The overload of `op` that takes out=, and what it calls that argument."""
    for twin, (name, *more) in out_twins(op):
        if not more and torch.Tag.generated not in twin.tags:  # which makes a tensor and copies it
            return twin, name
    return None


def plain_name(op: Any) -> str:
    """`sum` of aten.sum.dim_IntList and of aten.sum_; `__rshift__` of x >> 1 and of x >>= 1."""
    name = op._schema.name.partition("::")[2]
    return name.replace("__i", "__") if name.endswith("__") else name.removesuffix("_")


@functools.cache
def is_pointwise(op: OpOverload) -> bool:
    """Whether element i of the result depends on elements i alone, so that it may go over them.

    Torch, up to 2.13, tags abs, eq, >> and a dozen more, and not their forms in place.
    """
    twin = getattr(getattr(torch.ops, op.namespace), plain_name(op), None)
    forms = (op, getattr(twin, op._overloadname, op))
    return any(torch.Tag.pointwise in form.tags for form in forms)


@functools.cache
def reads_nothing(op: Any) -> bool:
    """Whether an op asks its tensors for their shapes and no more (zeros_like, new_zeros)."""
    return is_functional(op) and _constant(op) is not None


@functools.cache
def fill_form(op: OpOverload) -> OpOverload | None:
    """`zeros` of `zeros_like` and `new_zeros`, with out=."""
    twin = getattr(getattr(aten, _constant(op) or "", None), "out", None)
    known = {"size", "fill_value", "memory_format"}
    return twin if twin and known.issuperset(n for n, _ in inputs_of(twin)) else None


def _constant(op: OpOverload) -> str | None:
    name = op.overloadpacket.__name__
    like, new = name.endswith("_like"), name.startswith("new_")
    return name.removesuffix("_like").removeprefix("new_") if like or new else None


def rounds_alike(op: Any) -> bool:
    """Whether an op gives the same bits in any layout; mm picks a kernel by strides."""
    return is_pointwise(op) or op in MOVES or op in COPIES or reads_nothing(op)
