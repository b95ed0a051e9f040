"""What an op's schema, its tags and its result say of a call: writes, draws, waits."""

from __future__ import annotations

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
