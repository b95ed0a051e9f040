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

from fngraph.torch_facts.names import are_transforms_active, dual_level


def is_transformed(*args: Any) -> bool:
    """Whether gradients, tangents or an active `torch.func` transform may ask for a rule.

    Args:
        args: of an op: tensors, lists of them, and whatever else.
    """
    if are_transforms_active():
        return True
    if not torch.is_grad_enabled() and dual_level() < 0:
        return False
    given = [y for x in args for y in (x if isinstance(x, list | tuple) else (x,))]
    tensors = [x for x in given if isinstance(x, torch.Tensor)]
    reverse = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    if reverse or dual_level() < 0:
        return reverse
    return any(unpack_dual(x).tangent is not None for x in tensors)


ASKED = "asked"  # of what is noted on a node: which primitive's argument it is, by their names


def asks(primitive: str, argument: str, x: torch.Tensor) -> torch.Tensor:
    """An argument of a primitive's plain form, with a note for whoever traces it."""
    with fx.traceback.annotate({ASKED: (primitive, argument)}):
        return x.view_as(x)


@contextlib.contextmanager
def inlined(name: str, mark: str = "inlined") -> Iterator[None]:
    """Mark the ops of a primitive's plain form, for whoever traces them."""
    with fx.traceback.annotate({mark: name}):
        yield


class _Border(torch.autograd.Function):
    """What passes, as it is. On the way back gradients do, and are marked."""

    generate_vmap_rule = True

    @staticmethod
    def forward(name: str, mark: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # results are no views, so that they may be written in place
        return tuple(x.clone() if mark == "inlined" else x.view_as(x) for x in tensors)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        name, mark, *_ = inputs
        ctx.marks = name, mark

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with inlined(*ctx.marks):
            return None, None, *[None if g is None else g * 1 for g in grads]

    @staticmethod
    def jvp(ctx: Any, name: Any, mark: Any, *tangents: Any) -> Any:
        return tuple(None if t is None else t.view_as(t) for t in tangents)


def enter(name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """All that gradients may be asked of, on the way into a primitive's plain form.

    Their gradients leave it: they are marked as its last ops.
    """
    return _Border.apply(name, "inlined_end", *tensors)  # type: ignore[no-any-return]


def leave(name: str, result: torch.Tensor) -> torch.Tensor:
    """The result, on the way out. Its gradients come in: they are marked as its own."""
    return _Border.apply(name, "inlined", result)[0]  # type: ignore[no-any-return]
