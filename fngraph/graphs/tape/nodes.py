"""The tape's calls as nodes of a graph, with edges from what wrote memory to what reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fngraph.graphs.inside import Node
from fngraph.graphs.tape.arena import subtract
from fngraph.torch_facts.names import tree_leaves

Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
_COPIES = {"aten::copy_", "aten::copy", "aten::clone", "aten::_to_copy"}
_OVERWRITE = {"aten::copy_", "aten::fill_", "aten::zero_"}  # without reading it
_Range = tuple[int, int]  # (address, bytes)


def nodes(calls: Sequence[Call]) -> tuple[Node, ...]:
    """One node a call: a memcpy where one layout and dtype is copied as it is, else a kernel."""
    return tuple(_node(call) for call in calls)


def edges(calls: Sequence[Call]) -> tuple[tuple[int, int], ...]:
    """(writer, reader) by index: who last wrote the bytes that a call reads."""
    spans = [(list(map(_span, _read(c))), list(map(_span, _written(c)))) for c in calls]
    whole = [all(x.is_contiguous() for x in _written(c)) for c in calls]
    found = []
    for j, (left, _) in enumerate(spans):
        for i in range(j - 1, -1, -1):
            if not left:
                break
            rest = subtract(left, spans[i][1])
            if rest != left:
                found.append((i, j))
                left = rest if whole[i] else left
    return tuple(sorted(found))


def _node(call: Call) -> Node:
    name = _operator(call)._schema.name
    target = _written(call)
    source = [x for x in _tensors(call[1]) if not any(x is y for y in target)][:1]
    if name in _COPIES and source and len(target) == 1 and _alike(source[0], target[0]):
        return Node("memcpy", name)
    return Node("kernel", name)


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether copying is moving bytes: one dtype, and one dense layout."""
    alike = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    dense = _span(a)[1] == a.numel() * a.itemsize
    return alike and dense and a.is_conj() == b.is_conj() and a.is_neg() == b.is_neg()


def _operator(call: Call) -> Any:
    """The op: a call is one, or `_call_and_copy` of one."""
    fn, args, _ = call
    return fn if hasattr(fn, "_schema") else args[0]


def _given(call: Call) -> tuple[Any, ...]:
    """The op's args and kwargs, and further tensors that results are copied to."""
    fn, args, kwargs = call
    return (args, kwargs, ()) if hasattr(fn, "_schema") else args[1:]


def _written(call: Call) -> list[torch.Tensor]:
    args, kwargs, results = _given(call)
    schema = _operator(call)._schema.arguments
    named = dict(zip((a.name for a in schema), args)) | kwargs
    written = [
        named.get(a.name) for a in schema if a.alias_info is not None and a.alias_info.is_write
    ]
    return _tensors((written, results))


def _read(call: Call) -> Iterable[torch.Tensor]:
    """All but what is only written; what is updated in place is read too."""
    args, kwargs, _ = _given(call)
    schema = _operator(call)._schema
    outs = {a.name for a in schema.arguments if a.is_out}
    args = args[1:] if schema.name in _OVERWRITE else args
    return _tensors((args, {k: v for k, v in kwargs.items() if k not in outs}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.numel()]


def _span(x: torch.Tensor) -> _Range:
    extent = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride()))
    return x.data_ptr(), extent * x.itemsize
