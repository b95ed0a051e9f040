"""What may come out of `forward`: tensors of its own, whose true rows come before the padding.

A key's result has more rows than the batch; the caller gets the leading slice. That is right for a
dim that is T or R itself, and for one that a row-major view made of it: (T, 8) to (8*T,). It would
be wrong, silently, for `cat([x, y])`, whose second half does not begin where the first one's true
rows end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fngraph.core import Dim
from fngraph.errors import ClosureError, OutputError
from fngraph.fx.leaves import Leaf, Role, storage_key

aten = torch.ops.aten
_ROW_MAJOR = {aten.view.default, aten._unsafe_view.default, aten.clone.default, aten.alias.default,
              aten.detach.default, aten.reshape.default, aten._reshape_alias.default}  # fmt: skip
_FILLS = {aten.ones.default, aten.zeros.default, aten.full.default, aten.new_ones.default,
          aten.new_zeros.default, aten.new_full.default, aten.arange.default}  # fmt: skip


def check_values(outputs: Sequence[Any], paths: Sequence[str]) -> None:
    """Raise unless every output leaf is a tensor that `forward` computed.

    Raises:
        OutputError: something other than a tensor. ClosureError: a tensor from outside.
    """
    for path, value in zip(paths, outputs):
        if not isinstance(value, torch.Tensor):
            raise OutputError(
                f"forward returns {path} = {value!r}, a {type(value).__name__}, which a graph "
                "would freeze. Return tensors only; sizes are known from batch.spec outside"
            )
        if not isinstance(value, FakeTensor):
            raise ClosureError(
                f"forward returns {path}, {tuple(value.shape)} {value.dtype}, which was not passed "
                "to it. Make it an argument, and return a copy of it: x.clone()"
            )


def check_owned(
    results: Sequence[fx.Node], paths: Sequence[str], owners: Mapping[int, Leaf]
) -> None:
    """Raise if an output is memory of an argument that was not donated.

    Raises:
        OutputError: naming the argument.
    """
    for node, path in zip(results, paths):
        leaf = owners.get(storage_key(node.meta["val"]))
        if leaf is not None and leaf.role is not Role.DONATED:
            raise OutputError(
                f"forward returns {leaf.path} itself or a view of it as {path}. It is "
                f"{leaf.role.value}: its memory is rewritten under the caller's feet. Return a "
                "copy: x.clone()"
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
