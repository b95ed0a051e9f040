"""What processes along an axis of a mesh tell each other: functions of a tensor, as ops of a trace.

    x_TE = fg.all_reduce(linear(x_TF, w_EF), mesh["tp"])      # the sum of every process's part

All processes along the axis must call the same ones in the same order, on tensors of one shape and
dtype; a step compares that before it captures anything (`fngraph.ranks.agreement`). They are no
primitives: nothing is cut at them, so that a FULL graph holds them, and a piece. NCCL's are
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
from fngraph.core.where import user_line
from fngraph.errors import RankError
from fngraph.ops.opaque import define_op
from fngraph.ranks.faults import failing_as, group_of
from fngraph.ranks.mesh import Axis, Mesh, divisors
from fngraph.torch_facts.names import all_gather_into, reduce_scatter_into

REDUCTIONS = ("sum", "max", "min")
_REDUCED = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32,
            torch.int8, torch.uint8)  # fmt: skip
"""What gloo and NCCL both add and compare; bytes of any dtype are moved."""


def all_reduce(x: Tensor, axis: Axis, op: str = "sum") -> Tensor:
    """The sum, or the largest or smallest, of every process's `x`, on each of them.

    Args:
        x: any shape, the same on all of them; floats of 16 to 64 bits, integers of 8, 32 or 64.
            Of bool, "max" is whether any is true, "min" whether all are; "sum" takes complex too.
            Whether "max" and "min" keep a NaN is the transport's: gloo keeps some.
        op: "sum", "max" or "min".

    Raises:
        RankError: another op or dtype; no axis, or one whose processes are gone; a gradient through
            it; with the user's line. While it runs: a process that fails, or does not come within
            the mesh's timeout; with which one that is, if it can be known.
    """
    if op not in REDUCTIONS:
        raise RankError(
            f"{user_line()}: all_reduce(op={op!r}): pass {', '.join(map(repr, REDUCTIONS))}"
            f"{text.did_you_mean(str(op), REDUCTIONS)}"
        )
    if _check("all_reduce", x, axis, adds=op).size == 1:
        return x
    return torch.ops.fngraph.all_reduce(x, op, axis.name, axis.group)


def all_gather(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """Every process's `x`, laid one behind the other along `dim` in the order of their ranks.

    Args:
        x: any dtype, and a shape of one dim or more, the same on all of them.

    Raises:
        RankError: no such dim; else as `all_reduce`.
    """
    if _check("all_gather", x, axis, dim).size == 1:
        return x
    return torch.ops.fngraph.all_gather(x, dim % x.ndim, axis.size, axis.name, axis.group)


def reduce_scatter(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """This process's part of the sum of every process's `x`: of `dim` split evenly, its rank's.

    Raises:
        RankError: no such dim, or one that cannot be split evenly; else as `all_reduce`.
    """
    if _check("reduce_scatter", x, axis, dim, split=True, adds="sum").size == 1:
        return x
    return torch.ops.fngraph.reduce_scatter(x, dim % x.ndim, axis.size, axis.name, axis.group)


def all_to_all(x: Tensor, axis: Axis, dim: int = 0) -> Tensor:
    """`x` is split evenly along `dim`, part j goes to rank j; what comes, in the order of ranks.

    Args:
        x: any dtype, and a shape of one dim or more, the same on all of them.

    Raises:
        RankError: no such dim, or one that cannot be split evenly; else as `all_reduce`.
    """
    if _check("all_to_all", x, axis, dim, split=True).size == 1:
        return x
    return torch.ops.fngraph.all_to_all(x, dim % x.ndim, axis.size, axis.name, axis.group)


def _check(
    name: str, x: Any, axis: Any, dim: int | None = None, split: bool = False, adds: str = ""
) -> Axis:
    """The axis, if all is right; a number of T or R rows is looked at when it is known."""
    why = _why_no_axis(axis) or _why_not(x, dim, axis.size, split, adds)
    if not why and axis.size > 1 and dist.is_initialized():  # else it is traced ahead of its group
        group = group_of(axis.group, axis.name)
        there = dist.get_world_size(group), dist.get_rank(group)
        if there != (axis.size, axis.rank):
            why = (
                f"{axis!r} is another process's or another mesh's: here its group has "
                f"{there[0]} processes, and this is rank {there[1]}. Take it from the mesh that "
                "this process has made"
            )
    if why:
        raise RankError(f"{user_line()}: {name}: {why}")
    return axis  # type: ignore[no-any-return]


def _why_no_axis(axis: Any) -> str:
    if isinstance(axis, Axis):
        return ""
    given = f"the axis is {axis!r}, of type {type(axis).__name__}. "
    if isinstance(axis, Mesh):
        return given + f"Pass one of the mesh's: mesh[{next(iter(axis.names), 'tp')!r}]"
    if isinstance(axis, str):
        return given + f"A mesh is no ambient state: pass the mesh's own, mesh[{axis!r}]"
    return given + "Pass one of a mesh: mesh['tp'], of mesh = fg.make_mesh(tp=2)"


def _why_not(x: Any, dim: Any, size: int, split: bool, adds: str) -> str:
    if not isinstance(x, Tensor):
        return f"takes a tensor, not a {type(x).__name__}"
    if dim is not None and (type(dim) is not int or not -x.ndim <= dim < x.ndim):
        return f"dim={dim!r} of a tensor of shape {list(x.shape)}, which has {x.ndim} dims"
    if split and dim is not None and type(n := x.shape[dim]) is int and n % size:
        return uneven(n, dim, x, size)
    least_or_most = adds in ("max", "min")
    known = x.dtype in _REDUCED or (least_or_most and x.dtype is torch.bool)
    if adds and not known and (least_or_most or not x.is_complex()):
        fix = "Convert it: x.float()"
        if x.dtype is torch.bool:
            fix = '"max" is any, "min" is all'
        elif x.is_complex():
            fix = "Complex numbers have no order: take x.abs(), or x.real"
        return f"{adds!r} of {str(x.dtype).removeprefix('torch.')} is not there. {fix}"
    return ""


def uneven(n: int, dim: int, x: Tensor, size: int) -> str:
    """What is wrong with a split."""
    return (
        f"{n} elements along dim {dim} of {list(x.shape)} cannot be split evenly over {size} "
        "processes. Pad them to a multiple, or make the axis one of "
        f"{text.ranges(divisors(n))}"
    )


def reduced(x: Tensor, op: str, axis: str, group: str, after: Any = None) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    wire = out.view(torch.uint8) if out.dtype is torch.bool else out
    with failing_as("all_reduce", axis, group) as found:
        dist.all_reduce(wire, getattr(dist.ReduceOp, op.upper()), group=found)
    return out


def _gathered(x: Tensor, dim: int, size: int, axis: str, group: str, after: Any = None) -> Tensor:
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    with failing_as("all_gather", axis, group) as found:
        all_gather_into(_bytes(out), _bytes(x.contiguous()), found)
    return out.unflatten(0, (size, -1)).movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _scattered(x: Tensor, dim: int, size: int, axis: str, group: str, after: Any = None) -> Tensor:
    parts = _parts("reduce_scatter", x, dim, size)
    out = parts.new_empty(parts.shape[1:])
    with failing_as("reduce_scatter", axis, group) as found:
        reduce_scatter_into(out, parts.flatten(0, 1), found)
    return out


def _exchanged(x: Tensor, dim: int, size: int, axis: str, group: str, after: Any = None) -> Tensor:
    parts = _parts("all_to_all", x, dim, size)
    out = torch.empty_like(parts)
    with failing_as("all_to_all", axis, group) as found:
        dist.all_to_all_single(_bytes(out), _bytes(parts), group=found)
    return out.movedim(0, dim).flatten(dim, dim + 1).contiguous()


def _bytes(x: Tensor) -> Tensor:
    """As what any backend moves."""
    return x if x.dtype in _REDUCED else x.view(torch.uint8)


def _parts(name: str, x: Tensor, dim: int, size: int) -> Tensor:
    """(size, ...): what each process gets, one behind the other in memory."""
    if x.shape[dim] % size:
        raise RankError(f"{name}: {uneven(x.shape[dim], dim, x, size)}")
    return x.unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()


def _same(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _longer(x: Tensor, dim: int, size: int, *_: Any) -> Tensor:
    return x.new_empty([n * size if i == dim else n for i, n in enumerate(x.shape)])


def _shorter(x: Tensor, dim: int, size: int, *_: Any) -> Tensor:
    return x.new_empty([n // size if i == dim else n for i, n in enumerate(x.shape)])


def refused(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise RankError(
            f"{user_line()}: {name} under a gradient or a transform of torch.func: whether it is "
            "to sum gradients over processes as well, only the caller knows. Differentiate what is "
            "around it, and reduce the gradients: fg.all_reduce(grads, axis)"
        )

    return refuse


WHO = "str axis, str group, Tensor? after=None"
for _name, _how, _run, _fake in (
    ("all_reduce", "str op", reduced, _same),
    ("all_gather", "int dim, int size", _gathered, _longer),
    ("reduce_scatter", "int dim, int size", _scattered, _shorter),
    ("all_to_all", "int dim, int size", _exchanged, _same),
):
    # `after`: one that must come before; see `fngraph.fx.pieces.collectives.keep_order`
    _schema = f"(Tensor x, {_how}, {WHO}) -> Tensor"
    define_op(_name, _schema, _run, _fake, refused(_name))
