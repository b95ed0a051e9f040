"""What a tape holds: ops over tensors at fixed addresses; as a graph, nodes and edges.

An edge goes from what last wrote some bytes to what reads them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fngraph.errors import CaptureError
from fngraph.graphs.inside import Node
from fngraph.graphs.tape.arena import subtract
from fngraph.torch_facts.memory import extent, kind_of, overlaps_itself
from fngraph.torch_facts.names import tree_leaves
from fngraph.torch_facts.schemas import written

_COPIES = {"aten::copy_", "aten::copy", "aten::clone", "aten::_to_copy"}
_OVERWRITE = {"aten::copy_", "aten::fill_", "aten::zero_"}  # without reading it
_Range = tuple[int, int]  # (address, bytes)


class TapeOp(NamedTuple):
    """One op.

    Attributes:
        fn: torch's overload, or `Nested`.
        into: where its results are copied to; nowhere, if it writes them itself. None for one that
            is no tensor.
    """

    fn: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    into: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.fn.name()}({', '.join(map(_brief, self.args))})"


class Nested(NamedTuple):
    """Ops that are repeated while a predicate holds, or run if it does: a tape within a tape.

    Attributes:
        kind: "while" or "if".
    """

    kind: str
    ops: tuple[TapeOp, ...]

    def __call__(self, pred: torch.Tensor) -> None:
        if self.kind == "if":
            if pred.item():
                perform(self.ops)
            return
        while pred.item():
            perform(self.ops)

    def name(self) -> str:
        """What it is called among ops."""
        return self.kind


def perform(ops: Sequence[TapeOp]) -> None:
    """Do each op again, in the memory that it was recorded with; what fails gets a note of it."""
    op = None
    try:
        for op in ops:
            results = op.fn(*op.args, **op.kwargs)
            if op.into:
                deliver(op, results)
    except Exception as error:
        error.add_note(f"in {op}")
        raise


def count_of(ops: Sequence[TapeOp]) -> int:
    """How many ops there are, with those within others."""
    inner = [op.fn.ops for op in ops if isinstance(op.fn, Nested)]
    return len(ops) + sum(map(count_of, inner))


def lines_of(ops: Sequence[TapeOp], depth: int = 0) -> list[str]:
    """One line an op, in order; what is within another stands further in."""
    found = []
    for i, op in enumerate(ops):
        found.append(f"{'    ' * depth}{i:4} {op}")
        if isinstance(op.fn, Nested):
            found += lines_of(op.fn.ops, depth + 1)
    return found


def deliver(op: TapeOp, results: Any) -> None:
    """Copy an op's results to where they belong, but those that are there.

    A result may be undefined, where nothing asked for it (a masked gradient), or a workspace of
    size 0: then nobody reads it.

    Raises:
        CaptureError: a result is not what torch's rule said, by which later ops were recorded.
    """
    for target, value in zip(op.into, tree_leaves(results), strict=True):
        if target is None or value is None or target.numel() == value.numel() == 0:
            continue
        if (target.shape, target.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"{op} gave {_brief(value)}, and torch's rule for it says {_brief(target)}, by "
                "which the tape has recorded what follows. Give it arguments of one dtype, or run "
                "this in mode NONE"
            )
        if target.data_ptr() != value.data_ptr():
            if overlaps_itself(target):
                raise CaptureError(
                    f"{op} gave {_brief(value)}, and torch's rule for it says that elements of it "
                    "share memory. Clone its arguments, or run this in mode NONE"
                )
            target.copy_(value)


def _brief(arg: Any) -> str:
    if isinstance(arg, torch.Tensor):
        return kind_of(arg)
    if isinstance(arg, list | tuple):
        return f"[{', '.join(map(_brief, arg))}]"
    return str(arg)


def nodes_of(ops: Sequence[TapeOp]) -> tuple[Node, ...]:
    """One node an op: a memcpy where one layout and dtype is copied as it is, else a kernel."""
    return tuple(map(_node, ops))


def edges_of(ops: Sequence[TapeOp]) -> tuple[tuple[int, int], ...]:
    """(writer, reader) by index: who last wrote the bytes that an op reads."""
    reads, writes = list(map(_read, ops)), list(map(_written, ops))
    spans = [list(map(_range, tensors)) for tensors in writes]
    whole = [all(x.is_contiguous() for x in tensors) for tensors in writes]
    found = []
    for j, tensors in enumerate(reads):
        left = list(map(_range, tensors))
        for i in range(j - 1, -1, -1):
            if not left:
                break
            rest = subtract(left, spans[i])
            if rest != left:
                found.append((i, j))
                left = rest if whole[i] else left
    return tuple(sorted(found))


def _node(op: TapeOp) -> Node:
    if isinstance(op.fn, Nested):
        return Node("other", op.fn.kind)
    name = op.fn._schema.name
    target = _written(op)
    source = [x for x in _tensors(op.args) if not any(x is y for y in target)][:1]
    if name in _COPIES and source and len(target) == 1 and _alike(source[0], target[0]):
        return Node("memcpy", name)
    return Node("kernel", name)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether copying is moving bytes: one dtype, and one dense layout."""
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    dense = extent(a.shape, a.stride()) == a.numel()
    return alike and dense and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def _written(op: TapeOp) -> list[torch.Tensor]:
    if isinstance(op.fn, Nested):
        return [x for inner in op.fn.ops for x in _written(inner)]
    return _tensors([*written(op.fn, op.args, op.kwargs), *op.into])


def _read(op: TapeOp) -> list[torch.Tensor]:
    """All but what is only written; what is updated in place is read too."""
    if isinstance(op.fn, Nested):  # a turn that is not taken leaves what was written before
        inner = [x for one in op.fn.ops for x in (*_read(one), *_written(one))]
        return [*_tensors(op.args), *inner]
    outs = {a.name for a in op.fn._schema.arguments if a.is_out}
    args = op.args[1:] if op.fn._schema.name in _OVERWRITE else op.args
    return _tensors((args, {k: v for k, v in op.kwargs.items() if k not in outs}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _range(x: torch.Tensor) -> _Range:
    return x.data_ptr(), extent(x.shape, x.stride()) * x.itemsize
