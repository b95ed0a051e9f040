"""Calls that are tried on zeros of the same shapes: torch's rules for fakes are not its kernels.

Some say no to what runs (`x[mask]` of a mask of bytes), some ask for less than a kernel does:
that of `mm` compares no dtypes, so that float32 weights under bfloat16 activations trace, and fail
at the first step.
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch

from fngraph.core.where import user_line
from fngraph.errors import FnGraphError, OperatorError
from fngraph.fx.nodes import SIZES, flat
from fngraph.fx.schemas import draws, is_pointwise
from fngraph.fx.tracing.refusals import Refusals, example_of, known_words
from fngraph.torch_facts.memory import extent
from fngraph.torch_facts.names import (
    are_transforms_active,
    tree_leaves,
    tree_map,
    without_modes,
)
from fngraph.torch_facts.tracing import no_python_dispatcher

_LARGEST = 1 << 24  # elements of a call that is tried
_PRODUCTS = {
    f"aten::{name}"
    for name in "mm bmm mv dot vdot addmm addbmm baddbmm addmv convolution linear".split()
}
"""Ops whose kernels want one dtype of all tensors, on every device; those to be tried take long."""


def check_traceable(
    error: Exception, name: str, func: Any, args: Any, kwargs: Any, refuse: Refusals
) -> Exception:
    """Refuse a call that torch runs, and of which its rules for fakes say that it is an error.

    Returns the error that `forward` is to see: torch's own of a run, where fakes raise one of
    another class, which an `except` of his would let by.

    Args:
        error: what the call has raised on fakes. Of one that is an error on numbers too, and of one
            that `explained` has words for, nothing is said here.
        name: what torch calls `func`.

    Raises:
        OperatorError: it runs on zeros of the same shapes.
    """
    text = said(error)
    ours = isinstance(error, FnGraphError) or are_transforms_active()
    if ours or known_words(error, text) is not None:
        return error
    if (eager := _fails(func, args, kwargs)) is not None:
        other = isinstance(error, ValueError) and isinstance(eager, RuntimeError)
        return eager if other else error
    refuse(
        OperatorError(
            f"{user_line()}: forward calls {name}, which torch runs but cannot trace ({text}). "
            "Write it with other ops or dtypes, x[mask.bool()] for a mask of bytes; or call it "
            "outside"
        )
    )
    return error


def said(error: Exception) -> str:
    """An error's class and first line."""
    return f"{type(error).__name__}: {(str(error).strip() or 'nothing said').partition(chr(10))[0]}"


class Dtypes:
    """Which ops have a kernel for the dtypes that they are given; asked once for each choice."""

    def __init__(self) -> None:
        self._known: dict[Any, str | None] = {}

    def refused(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """Torch's words about a call that no kernel does for its dtypes, "" where there are none;
        None: it has a kernel, as far as is known."""
        tensors = [x for x in (*flat(args), *flat(kwargs)) if isinstance(x, torch.Tensor)]
        dtypes = tuple([x.dtype for x in tensors])
        if len(set(dtypes)) < 2:
            return None
        name, overload = func._schema.name.removesuffix("_"), func._overloadname
        if name in _PRODUCTS and "dtype" not in overload:  # which say what they give
            return ""
        key = func, dtypes
        if key not in self._known:
            floats = {d for d in dtypes if d.is_floating_point or d.is_complex}
            on_cpu = all(x.device.type == "cpu" for x in tensors)  # other devices' kernels differ
            tried = len(floats) > 1 and on_cpu and name.startswith("aten::")
            known = not tried or is_pointwise(func) or draws(func, args, kwargs)
            self._known[key] = None if known else _mixed(func, args, kwargs)
        return self._known[key]


def _mixed(func: Any, args: Any, kwargs: Any) -> str | None:
    """What torch says of a call which it would do if all floats were of one dtype."""
    error = _fails(func, args, kwargs)
    if error is None or isinstance(error, Untried):
        return None
    return said(error) if _fails(func, args, kwargs, torch.float32) is None else None


class Untried(Exception):
    """A call of tensors that are too large, or that are not dense."""


def _fails(
    func: Any, args: Any, kwargs: Any, floats: torch.dtype | None = None
) -> Exception | None:
    """What a call raises on zeros in place of its tensors, on the CPU.

    Args:
        floats: the dtype of all zeros that are floating-point; None: their own.
    """
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
    if not all(x.layout is torch.strided for x in tensors):
        return Untried()
    if sum(math.prod(map(example_of, x.shape)) for x in tensors) > _LARGEST:
        return Untried()

    def zeros(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            dtype = floats if floats is not None and x.dtype.is_floating_point else x.dtype
            shape, stride = (tuple(map(example_of, ns)) for ns in (x.shape, x.stride()))
            return torch.zeros(extent(shape, stride), dtype=dtype).as_strided(shape, stride)
        return x.node.hint if isinstance(x, SIZES) else x

    try:
        with without_modes(), no_python_dispatcher(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch's, as an error it would be taken for one
            func(*tree_map(zeros, args), **tree_map(zeros, kwargs))
    except Exception as error:
        return error.with_traceback(None)
    return None
