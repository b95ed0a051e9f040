"""What may come out of `forward`: tensors of its own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.errors import ClosureError, FieldError, OperatorError, OutputError, PurityError
from fngraph.fx.leaves import Leaf, Role
from fngraph.fx.schemas import is_plain
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.tracing import FakeTensor, get_proxy_mode, has_proxy_slot


def check_values(outputs: Sequence[Any], paths: Sequence[str], refuse: Refusals) -> list[Any]:
    """Refuse output leaves that are not tensors that `forward` computed; the rest as they are.

    Raises:
        OutputError: something other than a tensor. ClosureError: a tensor from outside.
    """
    mode: Any = get_proxy_mode()
    checked = []
    for path, value in zip(paths, outputs):
        error: PurityError | None = None
        if not isinstance(value, torch.Tensor):
            error = OutputError(
                f"forward returns {path} = {_brief(value)}, which a graph would freeze. Return "
                "tensors only; sizes are known from batch.spec outside"
            )
        elif not isinstance(value, FakeTensor):
            error = ClosureError(
                f"forward returns {path}, {tuple(value.shape)} {value.dtype}, which was not passed "
                "to it. Make it an argument, and return a copy of it: x.clone()"
            )
        elif not is_plain(value):
            error = OperatorError(
                f"forward returns {path}, which has no plain memory ({value.layout}, "
                f"{value.dtype}). Return plain tensors: x.to_dense(), x.dequantize()"
            )
        elif not has_proxy_slot(value, mode.tracer):
            error = PurityError(
                f"forward returns {path}, which no op of this trace has made: another thread has, "
                "or another trace. Compute it in forward, on its own thread"
            )
        if error is not None:
            refuse(error)
            value = torch.zeros(())
        checked.append(value)
    return checked


def _brief(value: Any) -> str:
    if inspect.isgenerator(value) or inspect.iscoroutine(value):
        return f"a {type(value).__name__}: forward is written with yield or async"
    return f"{value!r} ({type(value).__name__})"


def check_owned(
    results: Sequence[fx.Node], paths: Sequence[str], owners: Mapping[int, Leaf], refuse: Refusals
) -> None:
    """Refuse an output that is memory of an argument that was not donated.

    Raises:
        OutputError: naming the argument.
    """
    for node, path in zip(results, paths):
        leaf = owners.get(storage_key(node.meta["val"]))
        if leaf is not None and leaf.role is not Role.DONATED:
            why = "the next step rewrites its memory" if leaf.role is Role.STAGED else (
                "writing to the result would write to it"
            )  # fmt: skip
            refuse(
                OutputError(
                    f"forward returns {leaf.path} itself or a view of it as {path}. It is "
                    f"{leaf.role.value}: {why}. Return a copy: x.clone()"
                )
            )


def check_dims(
    results: Sequence[fx.Node], paths: Sequence[str], dim: Any, refuse: Refusals
) -> None:
    """Refuse an output with a size that is not made of T, R and ints by + - * // % **.

    Raises:
        OutputError: with the line of the op that makes it.
    """
    for node, path in zip(results, paths):
        for size in node.meta["val"].shape:
            try:
                dim(size)
            except FieldError:
                line = node.meta.get("stack_trace", "forward")
                refuse(
                    OutputError(
                        f"{line}: {path} has the dim {size}, and a size is made of T, R and ints "
                        "with + - * // % ** only. Compute with one of these, and slice outside"
                    )
                )
