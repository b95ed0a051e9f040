"""What torch itself leaves open, so that two runs of one program may differ.

A few kernels compute an infinity otherwise in a vector than behind the last whole one, gelu for
one; torch 2.11's rule for the shape of a norm is wrong where a dim has one element; what lies in
memory that nobody wrote is anything, and so is an integer made of a float beyond its range.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from fngraph.torch_facts.names import TorchDispatchMode, tree_map_only

EMPTY = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
PLACES = ((1, 0), (0, 3), (5, 16), (17, 1))
"""How many other numbers are put in front and behind."""


class Elsewhere(TorchDispatchMode):
    """Runs each pointwise op once more, on its numbers elsewhere in memory, and each op on none.

    Attributes:
        found: the ops that then compute something else, or of another shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fixed = not func._schema.is_mutable and torch.Tag.nondeterministic_seeded not in func.tags
        again = fixed and torch.Tag.pointwise in func.tags and str(func) not in self.found
        result = func(*args, **kwargs)
        if again and isinstance(result, Tensor) and result.numel() and _is_number(result):
            if not all(_same(_moved(func, args, kwargs, result, *at), result) for at in PLACES):
                self.found.add(str(func))
        if isinstance(result, Tensor) and not func.is_view and not func._schema.is_mutable:
            with contextlib.suppress(Exception):  # it may ask for values
                given = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs))
                if func(*given[0], **given[1]).shape != result.shape:
                    self.found.add(f"{func}, of another shape")
        return result


def _is_number(x: Tensor) -> bool:
    return x.dtype.is_floating_point and x.itemsize > 1


def _moved(func: Any, args: Any, kwargs: Any, result: Tensor, before: int, behind: int) -> Tensor:
    def moved(x: Tensor) -> Tensor:
        if not x.dim():
            return x
        flat = x.expand(result.shape).flatten()
        return torch.cat([flat[:1].expand(before), flat, flat[:1].expand(behind)])

    args, kwargs = tree_map_only(Tensor, moved, (args, kwargs))
    return func(*args, **kwargs)[before : before + result.numel()].view(result.shape)  # type: ignore[no-any-return]


def _same(a: Tensor, b: Tensor) -> bool:
    near = 1e-2 if a.itemsize < 4 else 1e-4
    return torch.allclose(a, b, near, near, equal_nan=True)


class Defined(TorchDispatchMode):
    """Raises at an integer that is made of a float beyond its range: each device has its own."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func is torch.ops.aten._to_copy.default and args[0].dtype.is_floating_point:
            least, most = -(2.0**31), 2.0**31
            whole = not result.dtype.is_floating_point and result.dtype is not torch.bool
            x = args[0].float()
            if whole and not bool(((x >= least) & (x < most)).all()):
                raise ValueError("an integer beyond its range")
        return result


class Unwritten(TorchDispatchMode):
    """Fills memory that nobody has written with a number, of floats."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        if func._schema.name.removeprefix("aten::") in EMPTY and _is_number(result):
            result.fill_(self.number)
        return result
