"""What an op's schema says: what it writes, whether it is a view, its twin that takes out=; and
what it does not say, of the results of some."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fngraph.torch_facts.names import OpOverload, has_kernel

aten = torch.ops.aten

SYNCS = {aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default}
"""Ops that bring a value back to the host, and wait for it."""

_KNOWN_AT_TRACE = ("aten::_assert_tensor_metadata", "aten::sym_constrain_range")

_OPTIONS = {"dtype", "layout", "device", "pin_memory"}  # which an out= argument answers


def gives_nothing(func: Any) -> bool:
    """Whether an op has no result, writes nothing, and so is there for something that no graph has:
    to raise an error, to print. What a trace knows by then, dtypes and bounds of sizes, is no such.
    """
    schema = func._schema
    if schema.returns or any(a.alias_info and a.alias_info.is_write for a in schema.arguments):
        return False
    return not schema.name.startswith(_KNOWN_AT_TRACE)


def written(func: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Any]:
    """The tensors (or graph nodes, when given nodes) that an op writes, by its schema."""
    found: list[Any] = []
    for i, name in _written_arguments(func):
        value = kwargs.get(name) if i >= len(args) else args[i]
        found += value if isinstance(value, list | tuple) else [value]
    return [value for value in found if value is not None]


@functools.cache
def _written_arguments(func: Any) -> tuple[tuple[int, str], ...]:
    """Place and name of each argument that an op writes."""
    given = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in given if a.alias_info and a.alias_info.is_write)


@functools.cache
def out_names(func: Any) -> tuple[str, ...]:
    """Names of an op's arguments that are out=."""
    return tuple(a.name for a in func._schema.arguments if a.is_out)


def is_view(func: Any) -> bool:
    """Whether an op gives other tensors of the same memory, and does nothing on the device."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.is_mutable:
        return False
    return any(r.alias_info is not None for r in schema.returns)


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Whether torch runs an op as the others that it is made of.

    silu's and mish's backward are made of others too and yet have kernels, which run: of numbers in
    bfloat16 these compute in float32, and round once.
    """
    own = has_kernel(op.name(), "CPU") or has_kernel(op.name(), "CUDA")
    return op._can_decompose() and not own


def inputs_of(op: OpOverload) -> list[tuple[str, str]]:
    """(name, type) of an op's arguments but those that are out=."""
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]


@functools.cache
def out_twins(op: OpOverload) -> tuple[tuple[OpOverload, tuple[str, ...]], ...]:
    """Overloads of a functional op that put each of its results where out= says, and the names of
    those arguments. One with the same inputs comes before one that lacks dtype, device, ..."""
    want = inputs_of(op)
    fewer = [a for a in want if a[0] not in _OPTIONS]
    same, rest = [], []
    for name in op.overloadpacket.overloads():
        twin = getattr(op.overloadpacket, name)
        outs = tuple(a.name for a in twin._schema.arguments if a.is_out)
        if outs and len(outs) == len(op._schema.returns):
            have = inputs_of(twin)
            if have == want:
                same.append((twin, outs))
            elif have == fewer:
                rest.append((twin, outs))
    return (*same, *rest)


_NORMS = {"aten::native_layer_norm", "aten::native_group_norm", "aten::native_batch_norm",
          "aten::_native_batch_norm_legit", "aten::_native_batch_norm_legit_no_training",
          "aten::_batch_norm_with_update", "aten::_batch_norm_no_update"}  # fmt: skip


def as_computed(op: OpOverload, args: Sequence[Any], results: Any) -> Any:
    """An op's results without memory, as the CPU's kernel gives them and torch's rule does not.

    What a norm saves is of its weights' dtype where that is another than its input's: float32
    beside bfloat16. The rule, up to torch 2.13, says the input's.
    """
    if op._schema.name not in _NORMS:
        return results
    given = [x.dtype for x in args if isinstance(x, torch.Tensor)]
    others = [dtype for dtype in given if dtype is not given[0]]
    out, *saved = results
    return (out, *(x.to(others[0]) for x in saved)) if others else results
