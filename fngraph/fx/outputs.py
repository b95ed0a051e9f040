"""What may come out of `forward`: tensors of its own, whose true rows come before the padding.

A key's result has more rows than the batch; the caller gets the leading slice. That is right for a
dim that is T or R itself, and for one that a row-major view made of it: (T, 8) to (8*T,). It would
be wrong, silently, for `cat([x, y])`, whose second half does not begin where the first one's true
rows end.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, has_proxy_slot

from fngraph.core import Dim
from fngraph.errors import ClosureError, FieldError, OperatorError, OutputError, PurityError
from fngraph.fx.leaves import Leaf, Role, storage_key
from fngraph.fx.refusals import Refusals
from fngraph.fx.schemas import is_plain

aten = torch.ops.aten
_ROW_MAJOR = {aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default,
              aten.detach.default, aten.reshape.default, aten._reshape_alias.default}  # fmt: skip
_FILLS = {aten.ones.default, aten.zeros.default, aten.full.default, aten.new_ones.default,
          aten.new_zeros.default, aten.new_full.default, aten.arange.default}  # fmt: skip


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


def check_rows(node: fx.Node, dims: Sequence[Dim], path: str, dim: Any) -> None:
    """Raise unless the true part of an output is a leading slice of the padded one.

    Args:
        dim: size to `Dim`, of the graph that `node` is in.

    Raises:
        OutputError: naming the op that mixes rows and padding.
    """
    for i, size in enumerate(dims):
        if not size.letters or size.text in ("T", "R"):
            continue
        culprit = node if i else _introduces(node, size, dim)
        if culprit is not None:
            line = culprit.meta.get("stack_trace", "forward")
            raise OutputError(
                f"{line}: {path} has the dim {size}, in which {culprit.target} leaves rows of "
                "padding between the true ones, so no slice of a padded result is the result. "
                "Return the parts one by one, with T or R rows each"
            )


def _introduces(node: fx.Node, size: Dim, dim: Any) -> fx.Node | None:
    """The op that made a leading dim `size` other than by a row-major view of T or R, if any."""
    pending, seen = [node], set()
    while pending:
        current = pending.pop()
        if current in seen or current.op == "placeholder":
            continue
        seen.add(current)
        alike = [n for n in current.all_input_nodes if _leading(n, dim) == size]
        if alike:
            pending += alike
        elif not _views_rows(current, dim) and not _fills_rows(current, size):
            return current
    return None


def _views_rows(node: fx.Node, dim: Any) -> bool:
    while node.target in _ROW_MAJOR:
        node = node.all_input_nodes[0]
        leading, *rest = [dim(n) for n in node.meta["val"].shape] or [None]
        if leading is not None and leading.text in ("T", "R"):
            return not any(size.letters for size in rest)  # rows of one length only
    return False


def _fills_rows(node: fx.Node, size: Dim) -> bool:
    """Made of one value, or of its own index: a shorter one is the start of a longer one."""
    grows = size(T=2, R=1) >= size(T=1, R=1) and size(T=2, R=2) >= size(T=2, R=1)
    return grows and node.target in _FILLS


def _leading(node: fx.Node, dim: Any) -> Dim | None:
    value = node.meta.get("val")
    return dim(value.shape[0]) if isinstance(value, torch.Tensor) and value.dim() else None
