"""Sizes that an op's kernel wants to fit each other, and that torch's fakes do not ask about.

`x.index_put((mask,), one)` of a mask over T and an x of 7 rows traces, and runs if T is 7: in a key
of more tokens it is an error. An attention of fewer values than keys reads memory beyond them. Most
fakes ask (T == 7?), and the trace assumes what they are told; of the ops here, `needed` asks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import op_name
from fngraph.fx.schemas import named

Fit = tuple[tuple[Any, Any], ...]
"""Pairs of sizes, numbers or torch's expressions: those of one pair must be equal."""
_COUNT = None  # the size of a dim that has an element for each that is true in a mask


def needed(node: fx.Node) -> Iterator[Fit]:
    """What the kernel of an op's node wants of sizes, where its fake does not ask."""
    namespace, _, name = op_name(node).partition("::")
    wants = _WANTS.get(name.removesuffix("_")) if namespace == "aten" else None
    if wants is not None:
        yield from wants(named(node.target, node.args, node.kwargs))


def _shape(x: fx.Node) -> list[Any]:
    return [n.node.expr if isinstance(n, torch.SymInt) else n for n in x.meta["val"].shape]


def _equal(xs: Sequence[Any], ys: Sequence[Any]) -> Iterator[Fit]:
    """Of as many dims each; of others torch has ways of its own."""
    if len(xs) == len(ys):
        yield from (((x, y),) for x, y in zip(xs, ys))


def _put(args: Mapping[str, Any]) -> Iterator[Fit]:
    """index_put: a mask is as long as what it chooses of, indices spread, and values over them."""
    whole, d = _shape(args["self"]), 0
    taken: list[int] = []  # dims that are indexed
    wide: list[Any] = []  # the dims that the indices spread to
    for index in args["indices"]:
        masks = index is not None and index.meta["val"].dtype in (torch.bool, torch.uint8)
        dims = range(d, d + (index.meta["val"].dim() if masks else 1))
        d = dims.stop
        if index is None:
            continue
        taken += dims
        own = [_COUNT] if masks else _shape(index)
        if masks:
            yield from _equal(_shape(index), whole[dims.start : dims.stop])
        pairs = list(zip_longest(own[::-1], wide[::-1], fillvalue=1))
        yield from (((a, b), (a, 1), (b, 1)) for a, b in pairs if _COUNT not in (a, b))
        wide = [b if a == 1 else a for a, b in reversed(pairs)]
    rest = [n for d, n in enumerate(whole) if d not in taken]
    together = taken and taken[-1] - taken[0] == len(taken) - 1
    first = taken[0] if together else 0
    region = [*rest[:first], *wide, *rest[first:]]
    for a, b in zip_longest(_shape(args["values"])[::-1], region[::-1], fillvalue=1):
        if b is not _COUNT:
            yield (a, b), (a, 1)


def _add(args: Mapping[str, Any]) -> Iterator[Fit]:
    """index_add, index_reduce: a row for each index, each as long as those that there are."""
    whole, rows, index = (_shape(args[name]) for name in ("self", "source", "index"))
    if whole:
        whole[args["dim"]] = index[0] if index else 1
        yield from _equal(rows, whole)


def _select_scatter(args: Mapping[str, Any]) -> Iterator[Fit]:
    whole = _shape(args["self"])
    del whole[args["dim"]]
    yield from _equal(_shape(args["src"]), whole)


def _slice_scatter(args: Mapping[str, Any]) -> Iterator[Fit]:
    """Along the dim itself, of slices that go on to the end."""
    whole, part, dim, start = _shape(args["self"]), _shape(args["src"]), args["dim"], args["start"]
    end, start = args["end"], start or 0
    to_end = args["step"] == 1 and (end is None or (type(end) is int and end == sys.maxsize))
    if to_end and type(start) is int and start >= 0:
        whole[dim] -= start
    else:
        whole[dim] = part[dim]
    yield from _equal(part, whole)


def _attention(args: Mapping[str, Any]) -> Iterator[Fit]:
    """A value for each key: a kernel counts the keys alone."""
    yield ((_shape(args["key"])[-2], _shape(args["value"])[-2]),)


_WANTS: dict[str, Callable[[Mapping[str, Any]], Iterator[Fit]]] = {
    name: fn
    for fn, names in {
        _put: "index_put _index_put_impl _unsafe_index_put",
        _add: "index_add index_reduce",
        _select_scatter: "select_scatter",
        _slice_scatter: "slice_scatter",
        _attention: """_scaled_dot_product_flash_attention
            _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention
            _scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable""",
    }.items()
    for name in names.split()
}
