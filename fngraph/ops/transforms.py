"""Gradients, tangents and `torch.func` transforms of primitives.

A primitive is opaque: torch would take what it returns for a constant. So where a transform or a
gradient goes through one, it is inlined: its plain torch form runs in its place, which every
transform knows. It is no cut then, and no backend is asked.

Its ops are marked by its name, and so are the gradients that leave it: like the primitive, they
take care of padding, whose rows they leave zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.autograd.forward_ad import unpack_dual


def is_transformed(*args: Any) -> bool:
    """Whether gradients, tangents or an active `torch.func` transform may ask for a rule."""
    if torch._C._are_functorch_transforms_active():
        return True
    tensors = [x for x in args if isinstance(x, torch.Tensor)]
    reverse = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    return reverse or any(unpack_dual(x).tangent is not None for x in tensors)


@contextlib.contextmanager
def inlined(name: str) -> Iterator[None]:
    """Mark the ops of a primitive's plain form, for whoever traces them."""
    with fx.traceback.annotate({"inlined": name}):
        yield


class Entry(torch.autograd.Function):
    """What goes in, as it is; on the way back, gradients are marked as a primitive's own.

    Args:
        name: of the primitive.
        tensors: all that a gradient may be asked of.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.primitive = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with inlined(ctx.primitive):
            return None, *[None if g is None else g * 1 for g in grads]

    @staticmethod
    def jvp(ctx: Any, name: Any, *tangents: Any) -> Any:
        return tuple(None if t is None else t.view_as(t) for t in tangents)
