"""What processes along an axis of a mesh tell each other: functions of a tensor, as ops of a trace.

    x_TE = fg.all_reduce(linear(x_TF, w_EF), mesh["tp"])      # the sum of every process's part

All processes along the axis must call the same ones in the same order, on tensors of one shape and
dtype; where that is known, `fngraph.ranks.agreement` compares it before anything is captured. They
are no primitives: nothing is cut at them, so that a FULL graph holds them, and a piece. NCCL's are
captured, gloo's run on the tape. The results are new tensors.

Source: torch.distributed's functions of these names, whose order of parts this has.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fngraph.core import text
from fngraph.errors import RankError
from fngraph.ops.opaque import define_op
from fngraph.ranks.mesh import Axis
from fngraph.torch_facts.names import resolve_group

REDUCTIONS = ("sum", "max", "min")
# torch 2.13 has other names for the two
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum, or the largest or smallest, of every process's `x`, on each of them.

    Args:
        x: any shape, the same on all of them.
        op: "sum", "max" or "min".

    Raises:
        RankError: another op; no axis.
    """
    if op not in REDUCTIONS:
        raise RankError(
            f"all_reduce(op={op!r}): pass {', '.join(map(repr, REDUCTIONS))}"
            f"{text.did_you_mean(op, REDUCTIONS)}"
        )
    if _check(x, axis).size == 1:
        return x
    return torch.ops.fngraph.all_reduce(x, op, axis.name, axis.group)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Every process's `x`, laid one behind the other along `dim` in the order of their ranks.

    Raises:
        RankError: no such dim; no axis.
    """
    if _check(x, axis, dim).size == 1:
        return x
    return torch.ops.fngraph.all_gather(x, dim % x.ndim, axis.size, axis.name, axis.group)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This process's part of the sum of every process's `x`: of `dim` split evenly, its rank's.

    Raises:
        RankError: no such dim, or one that cannot be split evenly; no axis.
    """
    if _check(x, axis, dim, split=True).size == 1:
        return x
    return torch.ops.fngraph.reduce_scatter(x, dim % x.ndim, axis.size, axis.name, axis.group)


def all_to_all(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """`x` is split evenly along `dim`, part j goes to rank j; what comes, in the order of ranks.

    Raises:
        RankError: no such dim, or one that cannot be split evenly; no axis.
    """
    if _check(x, axis, dim, split=True).size == 1:
        return x
    return torch.ops.fngraph.all_to_all(x, dim % x.ndim, axis.size, axis.name, axis.group)


def _check(x: Any, axis: Any, dim: int | None = None, split: bool = False) -> Axis:
    if not isinstance(axis, Axis):
        raise RankError(
            f"a collective was given {axis!r} as its axis. Pass one of a mesh: mesh['tp'], of "
            "mesh = fg.make_mesh(tp=2)"
        )
    if dim is not None and not -x.ndim <= dim < x.ndim:
        raise RankError(f"dim={dim} of a tensor of shape {list(x.shape)}, which has {x.ndim} dims")
    if split and dim is not None and isinstance(x.shape[dim], int):
        axis.part(x.shape[dim], f"elements along dim {dim} of {list(x.shape)}")
    return axis


def _reduced(x: Tensor, op: str, axis: str, group: str) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, getattr(dist.ReduceOp, op.upper()), group=resolve_group(group))
    return out


def _gathered(x: Tensor, dim: int, size: int, axis: str, group: str) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    _gather(out, x.contiguous(), group=resolve_group(group))
    return out.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _scattered(x: Tensor, dim: int, size: int, axis: str, group: str) -> Tensor:
    parts = _parts(x, dim, size)
    out = parts.new_empty(parts.shape[1:])
    _scatter(out, parts.flatten(0, 1), group=resolve_group(group))
    return out


def _exchanged(x: Tensor, dim: int, size: int, axis: str, group: str) -> Tensor:
    parts = _parts(x, dim, size)
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=resolve_group(group))
    return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _parts(x: Tensor, dim: int, size: int) -> Tensor:
    """(size, ...): what each process gets, one behind the other in memory."""
    return x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _longer(x: Tensor, dim: int, size: int, *_: Any) -> Tensor:
    return x.new_empty([n * size if i == dim else n for i, n in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, size: int, *_: Any) -> Tensor:
    return x.new_empty([n // size if i == dim else n for i, n in enumerate(x.shape)])


def _refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise RankError(
            f"{name} under a gradient or a transform of torch.func: whether it is to sum gradients "
            "over processes as well, only the caller knows. Differentiate what is around it, and "
            "reduce the gradients: fg.all_reduce(grads, axis)"
        )

    return refuse


for _name, _schema, _run, _fake in (
    ("all_reduce", "(Tensor x, str op, str axis, str group) -> Tensor", _reduced, _same),
    ("all_gather", "(Tensor x, int dim, int size, str axis, str group) -> Tensor", _gathered,
     _longer),
    ("reduce_scatter", "(Tensor x, int dim, int size, str axis, str group) -> Tensor", _scattered,
     _shorter),
    ("all_to_all", "(Tensor x, int dim, int size, str axis, str group) -> Tensor", _exchanged,
     _same),
):  # fmt: skip
    define_op(_name, _schema, _run, _fake, _refused(_name))
