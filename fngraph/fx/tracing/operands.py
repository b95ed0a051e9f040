"""What an op was given, in the caller's own words: paths, lines, dtypes and sizes.

Torch's errors name neither tensors nor lines ("expected m1 and m2 to have the same dtype"). What it
says of a call that `forward` makes is told with them; `except` of forward's finds torch's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fngraph.core.text import count
from fngraph.errors import OperatorError
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.nodes import flat
from fngraph.fx.tracing.outside import Made
from fngraph.torch_facts.memory import kind_of
from fngraph.torch_facts.names import DisableTorchFunction
from fngraph.torch_facts.tracing import FakeTensor

_MOST = 4  # operands that are named one by one


class Operand(NamedTuple):
    """A tensor that an op was given.

    Attributes:
        where: its path, or the line that makes it.
        kind: dtype and sizes, `float32[T, 8]`, in torch's names for T and R.
        leaf: the argument of `forward` that it is, or is a view of.
    """

    where: str
    kind: str
    dtype: torch.dtype
    leaf: Leaf | None

    @property
    def is_held(self) -> bool:
        """Whether it is the caller's, who can convert it once."""
        return self.leaf is not None and self.leaf.role is not Role.STAGED

    def __str__(self) -> str:
        return f"{self.where}, {self.kind}"


def operands_of(given: Any, made: Made) -> list[Operand]:
    """The tensors among an op's arguments, in order, each once."""
    tensors = {id(x): x for x in flat(given) if isinstance(x, torch.Tensor)}
    with DisableTorchFunction():  # a size that is asked for would seem to be kept
        return [_operand(x, made) for x in tensors.values()]


def _operand(x: torch.Tensor, made: Made) -> Operand:
    """A view is told as the tensor that it is a view of: an op is often given a turned weight."""
    found = made.origin(x) if isinstance(x, FakeTensor) else None
    if found is None:
        return Operand("a tensor", kind_of(x), x.dtype, None)
    first, told, leaf = found
    kind = kind_of(first if first.dtype is x.dtype else x)
    where = f"what {told} makes" if leaf is None else leaf.path
    return Operand(where, kind, x.dtype, leaf)


def listed(operands: Sequence[Operand]) -> str:
    """`It was given params['w'], float32[8, 8]; and what model.py:12 makes, bfloat16[T, 8]`."""
    shown = [str(one) for one in operands[:_MOST]]
    more = len(operands) - _MOST
    shown += [count(more, "tensor") + " more"] if more > 0 else []
    return f"It was given {'; '.join(shown[:-1])}{'; and ' if shown[1:] else ''}{shown[-1]}"


def refused_by_torch(line: str, name: str, operands: Sequence[Operand], said: str) -> OperatorError:
    """The error about a call of which torch says that it is one.

    Args:
        name: of the call; `__add__` is told as add.
        said: torch's class and words.
    """
    fix = "Make them fit. Called by itself, forward should fail here too"
    if "same dtype" in said:
        fix = _one_dtype(operands)
    elif "does not require grad" in said:
        fix = _GRADIENTS
    return OperatorError(
        f"{line}: forward calls {name.strip('_')}, which torch refuses ({said}). "
        f"{listed(operands)}. {fix}"
    )


_GRADIENTS = (
    "What a graph is given asks for no gradient, also where the caller's tensors do. Take it with "
    "torch.func.grad, or of leaves that forward makes: w = w.detach().requires_grad_(); "
    "torch.autograd.grad(loss, w)"
)


def mixed(line: str, name: str, operands: Sequence[Operand], said: str) -> OperatorError:
    """The error about a call whose kernel wants one dtype, which no rule of torch's for fakes asks.

    Args:
        said: torch's class and words, if it was asked.
    """
    told = f" ({said})" if said else ""
    return OperatorError(
        f"{line}: forward calls {name.strip('_')} on tensors of different dtypes, which torch has "
        f"no kernel for{told}. {listed(operands)}. {_one_dtype(operands)}"
    )


def _one_dtype(operands: Sequence[Operand]) -> str:
    """How to give tensors one dtype, that of an activation where there is one; "" if they have it.
    Integers become what floats are."""
    floats = [one for one in operands if one.dtype.is_floating_point or one.dtype.is_complex]
    own = [one for one in floats or operands if not one.is_held]
    target = (own or floats or operands)[0]
    other = next((one for one in operands if one.dtype is not target.dtype), None)
    if other is None:
        return ""
    ways = [_as(other, target.dtype)] + ([_as(target, other.dtype)] if other in floats else [])
    return f"Give them one dtype: {', or '.join(ways)}"


def _as(one: Operand, dtype: torch.dtype) -> str:
    if one.leaf is None:
        return f"{one.where}, .to({dtype})"
    return f"{one.leaf.path}.to({dtype}){' ahead of the call' if one.is_held else ''}"
