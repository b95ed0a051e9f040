"""Ops of the `fngraph` library that return what they make: opaque to a trace, and no primitives.

A pass puts them there, or a model calls them; nothing is cut at them, and no backend is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fngraph.ops.primitives import LIBRARY
from fngraph.ops.transforms import is_transformed
from fngraph.torch_facts.names import BelowAutograd


def define_op(
    name: str,
    schema: str,
    run: Callable[..., Any],
    fake: Callable[..., Any],
    transformed: Callable[..., Any],
) -> Any:
    """Make `torch.ops.fngraph.<name>`; its default overload.

    Args:
        schema: its arguments and results in torch's words, "(Tensor x) -> Tensor".
        run: what it does on any device.
        fake: results of the right shapes and dtypes.
        transformed: what runs in its place, or says why nothing can, where a gradient, a tangent or
            a `torch.func` transform goes through it.
    """
    LIBRARY.define(name + schema)
    op = getattr(torch.ops.fngraph, name).default

    def below_autograd(*args: Any) -> Any:
        if is_transformed(*args):
            return transformed(*args)
        with BelowAutograd():
            return op(*args)

    LIBRARY.impl(name, run, "CompositeExplicitAutograd")
    LIBRARY.impl(name, below_autograd, "Autograd")
    LIBRARY.impl(name, transformed, "FuncTorchBatched")
    torch.library.register_fake(f"fngraph::{name}", fake, lib=LIBRARY)
    return op
