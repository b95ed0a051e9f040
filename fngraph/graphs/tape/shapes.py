"""What an op would return, without memory: asked of torch once for arguments that look the same.

A recording asks it of each op. Torch's rules are Python and take a millisecond, and layers repeat,
steps of a scan do, and so do recordings.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from fngraph.torch_facts.schemas import as_computed
from fngraph.torch_facts.tracing import FakeTensorMode

_TORCHS = ("aten", "prims")  # whose rules look at nothing but arguments


class Like(NamedTuple):
    """What a tensor looks like.

    Attributes:
        dense: whether it is strided and not quantized; if not, it has no `stride`.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    dense: bool = True


def mapped(fn: Callable[[Any], Any], x: Any) -> Any:
    """An op's arguments with `fn` of each that is no list, tuple or dict of others.

    Torch's own looks for every kind of tree, and takes several times as long.
    """
    if isinstance(x, list):
        return [mapped(fn, item) for item in x]
    if isinstance(x, tuple):
        return tuple([mapped(fn, item) for item in x])
    if isinstance(x, dict):
        return {name: mapped(fn, item) for name, item in x.items()}
    return fn(x)


def expected(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """What `func` would return, one by one, with a `Like` in the place of each tensor."""
    key = _frozen(tuple(args)), _frozen(dict(kwargs))
    if func.namespace in _TORCHS and _is_hashable(key):
        return _known(func, key, torch.get_default_dtype())
    return _asked(func, key)


def _is_hashable(key: Any) -> bool:
    try:
        hash(key)
    except TypeError:
        return False
    return True


@functools.lru_cache(4096)
def _known(func: Any, key: Any, default: torch.dtype) -> tuple[Any, ...]:
    return _asked(func, key)


def _asked(func: Any, key: Any) -> tuple[Any, ...]:
    """The shape of one result is the same anywhere, and a meta tensor says it in half the time. Of
    several some are the device's own affair (what a norm saves for its backward, a workspace),
    which a fake tensor of the CPU knows.
    """
    several = len(func._schema.returns) > 1
    device = torch.device("cpu" if several else "meta")
    with FakeTensorMode() if several else contextlib.nullcontext():
        args, kwargs = (_thawed(part, device) for part in key)
        if "device" in {a.name for a in func._schema.arguments}:
            kwargs["device"] = device
        kwargs.pop("pin_memory", None)
        results = as_computed(func, args, func(*args, **kwargs))
    return tuple(map(_looks, results if several else (results,)))


def _looks(x: Any) -> Any:
    if isinstance(x, list | tuple):
        return [_looks(item) for item in x]
    if not isinstance(x, torch.Tensor):
        return x
    dense = x.layout is torch.strided and not x.is_quantized
    return Like(tuple(x.shape), x.stride() if dense else (), x.dtype, dense)


def _frozen(x: Any) -> tuple[Any, ...]:
    """`x` as what can be compared: (kind, value), or a `Like`. 2, 2.0 and True are three values."""
    if isinstance(x, torch.Tensor):
        return Like(tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, list | tuple):
        return list if isinstance(x, list) else tuple, tuple(map(_frozen, x))
    if isinstance(x, dict):
        return dict, tuple((name, _frozen(value)) for name, value in x.items())
    if isinstance(x, torch.Generator):  # there are none of "meta"
        return type(None), None
    return type(x), x


def _thawed(x: tuple[Any, ...], device: torch.device) -> Any:
    """What `_frozen` was made of, without memory."""
    if isinstance(x, Like):
        return torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device)
    kind, value = x
    if kind is dict:
        return {name: _thawed(item, device) for name, item in value}
    if kind in (list, tuple):
        return kind(_thawed(item, device) for item in value)
    return value
