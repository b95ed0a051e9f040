"""Torch's ambient states, as context managers, and modes of a user's own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fngraph.torch_facts.names import get_precision, set_precision

none = contextlib.nullcontext


@contextlib.contextmanager
def setting(get: Any, put: Any, value: Any) -> Iterator[None]:
    """`put(value)` for a while."""
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def dtype(d: torch.dtype) -> Any:
    return lambda: setting(torch.get_default_dtype, torch.set_default_dtype, d)


def autocast(**options: Any) -> Any:
    return lambda: torch.autocast("cpu", **{"dtype": torch.bfloat16, **options})


def precision(p: str) -> Any:
    backends = ("cuda", "mkldnn")

    def now() -> Any:
        """That of all, and of each, which is none of the words of all where nobody has set it."""
        return torch.get_float32_matmul_precision(), [get_precision(b, "matmul") for b in backends]

    def put(value: Any) -> None:
        whole, of_each = value
        torch.set_float32_matmul_precision(whole)
        for backend, one in zip(backends, of_each):
            set_precision(backend, "matmul", one)

    return lambda: setting(now, put, (p, []))


def deterministic(on: bool) -> Any:
    return lambda: setting(
        torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, on
    )


def device(d: str) -> Any:
    return lambda: torch.device(d)


class Doubles(TorchFunctionMode):
    """A user's mode that changes what `torch.tanh` means."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return out * 2 if func is torch.tanh else out


class Negates(TorchDispatchMode):
    """The same one level lower."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        return -out if func is torch.ops.aten.tanh.default else out
