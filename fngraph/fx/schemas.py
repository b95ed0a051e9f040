"""What an op's schema, its tags and its result say of a call: writes, draws, waits.

In-place forms of functional ops, read off their schemas; there is no table of ops.

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

aten = torch.ops.aten
_QUANTIZED = (torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4)
_OFF = {"dropout_p": 0.0, "p": 0.0, "train": False, "training": False}


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors (or graph nodes, when given nodes) that an op writes, by its schema."""
    if not func._schema.is_mutable:
        return []
    found: list[Any] = []
    for i, spec in enumerate(func._schema.arguments):
        if spec.alias_info is not None and spec.alias_info.is_write:
            value = kwargs.get(spec.name) if i >= len(args) else args[i]
            found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if value is not None]


def draws(func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an op uses a generator; dropout that is switched off carries the tag all the same."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    schema = func._schema.arguments  # torch leaves out what equals the default
    given = {a.name: a.default_value for a in schema}
    given |= dict(zip((a.name for a in schema), args)) | dict(kwargs)
    return not any(name in given and given[name] == off for name, off in _OFF.items())


def leaves_device(func: Any, args: Any, result: Any) -> bool:
    """Whether an op copies from an accelerator to the host."""
    if func is not aten._to_copy.default:
        return False
    return args[0].device.type != "cpu" and result.device.type == "cpu"


def is_plain(x: torch.Tensor) -> bool:
    """Whether a tensor is memory with strides, of numbers that mean themselves."""
    return x.layout is torch.strided and x.dtype not in _QUANTIZED


def waits_for_shape(func: Any, results: Sequence[torch.Tensor]) -> bool:
    """Whether the shape of a result depends on values."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    if torch.Tag.dynamic_output_shape not in func.tags:
        return False  # the tag is on x[indices] too, which is harmless
    return any(free_unbacked_symbols(t) for t in results)


aten = torch.ops.aten
Op = torch._ops.OpOverload
_OPTIONS = {"dtype", "layout", "device", "pin_memory"}  # which an out= argument answers


def _arguments(op: Op) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


def is_functional(op: Any) -> bool:
    """Whether `op` is one of torch's own that returns one new tensor and writes nothing."""
    if not isinstance(op, Op) or op.namespace != "aten" or op._schema.is_mutable:
        return False
    returns = op._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"


@functools.cache
def in_place(op: Op) -> Op | None:
    """`foo_` of `foo`: writes into its first argument, and nothing else."""
    twin = getattr(getattr(aten, op.overloadpacket.__name__ + "_", None), op._overloadname, None)
    if twin is None or torch.Tag.inplace_view in twin.tags or _arguments(twin) != _arguments(op):
        return None
    written = [a.alias_info is not None and a.alias_info.is_write for a in twin._schema.arguments]
    return twin if written[0] and not any(written[1:]) else None


@functools.cache
def scattered_view(op: Op) -> Op | None:
    """`slice` of `slice_scatter`: the view into which the second argument is copied."""
    name = op.overloadpacket.__name__
    # as_strided counts from the start of a storage, which is another one in a buffer
    if not name.endswith("_scatter") or name == "as_strided_scatter":
        return None
    packet = getattr(aten, name.removesuffix("_scatter"), None)
    want = [a for a in _arguments(op) if a[0] != "src"]
    views = [getattr(packet, o) for o in packet.overloads()] if packet else []
    return next((v for v in views if _arguments(v) == want and not v._schema.is_mutable), None)


@functools.cache
def out_form(op: Op) -> tuple[Op, str] | None:
    """The overload of `op` that takes out=, and what it calls that argument."""
    want = _arguments(op)
    fewer = [a for a in want if a[0] not in _OPTIONS]
    found = {}
    for name in op.overloadpacket.overloads():
        twin = getattr(op.overloadpacket, name)
        outs = [a.name for a in twin._schema.arguments if a.is_out]
        generated = torch.Tag.generated in twin.tags  # makes a tensor and copies it
        if len(outs) == len(twin._schema.returns) == 1 and not generated:
            found[tuple(_arguments(twin))] = twin, outs[0]
    return found.get(tuple(want)) or found.get(tuple(fewer))


def is_pointwise(op: Any) -> bool:
    """Whether element i of the result depends on elements i alone, so that it may go over them."""
    return torch.Tag.pointwise in op.tags


def reads_nothing(op: Any) -> bool:
    """Whether an op asks its tensors for their shapes and no more (zeros_like, new_zeros)."""
    return is_functional(op) and _constant(op) is not None


@functools.cache
def fill_form(op: Op) -> Op | None:
    """`zeros` of `zeros_like` and `new_zeros`, with out=."""
    twin = getattr(getattr(aten, _constant(op) or "", None), "out", None)
    known = {"size", "fill_value", "memory_format"}
    return twin if twin and known.issuperset(n for n, _ in _arguments(twin)) else None


def _constant(op: Op) -> str | None:
    name = op.overloadpacket.__name__
    like, new = name.endswith("_like"), name.startswith("new_")
    return name.removesuffix("_like").removeprefix("new_") if like or new else None


def rounds_alike(op: Any) -> bool:
    """Whether an op gives the same bits in any layout; mm picks a kernel by strides."""
    return is_pointwise(op) or op in MOVES or op in COPIES or reads_nothing(op)


MOVES = (aten.index_put.default, aten.index_copy.default, aten.index_fill.int_Scalar,
         aten.index_fill.int_Tensor, aten.scatter.src, aten.scatter.value, aten.tril.default,
         aten.triu.default, aten.masked_scatter.default, aten.copy.default)  # fmt: skip
"""Ops that put values where an index says and compute none; what no schema says."""
COPIES = (aten.clone.default, aten._to_copy.default)
"""Ops that return what they were given, in memory of its own; what no schema says."""
