"""Are the facts that the rules claim of a graph's values so? Both runs, node by node, compared.

The graph runs on a batch as it is, and on the same batch as a key has it. After each node, what
`facts` says of its value is looked up in the two: true rows are equal, padding holds what it
should, bounds hold. Then the true rows of the second are made those of the first, bit by bit, so
that what rounding does in one node is no difference in the next. Padding of which nothing is
claimed may hold anything, so it is given something: NaN, infinities. So may rows that are kept for
padding, wherever the facts have followed them.
"""

from __future__ import annotations

import dataclasses
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from fngraph.fx.loops.running import LoopCall, run_noted
from fngraph.fx.nodes import (
    computed,
    given_to,
    inputs_of,
    is_loop,
    is_loop_result,
    is_op,
    is_tensor,
    line_of,
    name_of,
    written_by,
)
from fngraph.fx.rows.bounds import ANY, size_of
from fngraph.fx.rows.boxes import elements
from fngraph.fx.rows.check import is_trusted, unfinished, vouched_for
from fngraph.fx.rows.indices import by_dim
from fngraph.fx.rows.loops import Several
from fngraph.fx.rows.state import (
    BEYOND,
    FINITE,
    OFFSETS,
    RISING,
    VANISHING,
    Kept,
    Mixed,
    moving_dims,
    ndim,
)
from fngraph.fx.schemas import draws, named, plain_name
from fngraph.torch_facts.names import tree_map_only

UNWRITTEN = ("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided")
_ODD = (0, -1, 7)
_LOUD = (math.nan, math.inf, -math.inf, 3e4, -0.0)
_TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9, torch.float32: 1e-4,
              torch.complex64: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Untrue:
    """A fact of one node that is not so.

    Attributes:
        fact: "rows", "fill", "value", "bound", "reserved" or "runs".
        text: what was expected and what was there.
    """

    node: fx.Node
    fact: str
    text: str

    def __str__(self) -> str:
        told = "what fg.trust_rows says here is not so: " if is_trusted(self.node) else ""
        return f"{line_of(self.node)}: {told}{self.text} ({name_of(self.node)})"


def rehearse(
    gm: fx.GraphModule,
    facts: Mapping[fx.Node, Any],
    true: Sequence[torch.Tensor],
    padded: Sequence[torch.Tensor],
) -> Untrue | None:
    """The first fact that does not hold for these leaves; None if all do.

    Args:
        facts: what `facts_of` says of each node.
        true: the graph's leaves at the batch's sizes. They are written if the graph writes them.
        padded: the same leaves at a key's.

    Raises:
        whatever the graph raises on the true leaves, which then say nothing about its rows.
    """
    return next(rehearsed(gm, facts, true, padded), None)


def rehearsed(
    gm: fx.GraphModule,
    facts: Mapping[fx.Node, Any],
    true: Sequence[torch.Tensor],
    padded: Sequence[torch.Tensor],
    sizes: Mapping[Any, int] | None = None,
    in_loop: bool = False,
) -> Iterator[Untrue]:
    """Every fact that does not hold, in the order of the graph; see `rehearse`.

    Args:
        sizes: of the key, in the facts' letters; None: those of `padded`.
    """
    sizes = _sizes(gm, padded) if sizes is None else sizes
    bare: dict[fx.Node, Any] = {}
    keyed: dict[fx.Node, Any] = {}
    leaves = iter(zip(true, padded))
    run = _needed(gm, facts)
    for node in gm.graph.nodes:
        if node.op == "output":
            for x, fact in zip(node.args[0], facts[node]):
                if isinstance(fact, Kept) and x in keyed and isinstance(bare[x], torch.Tensor):
                    yield from _compared(x, fact, bare[x], keyed[x], sizes)
            return
        if node.op == "placeholder":
            bare[node], keyed[node] = next(leaves)
            if isinstance(facts[node], Kept) and facts[node].dirty:
                _spoil(facts[node], bare[node], keyed[node], sizes)
            if in_loop and isinstance(facts[node], Kept) and is_tensor(node):
                _poison(node, facts[node], bare[node], keyed[node])
        elif is_loop(node):
            turns: list[LoopCall] = []
            bare[node] = run_noted(node.target, given_to(node, bare)[0], turns)
            if node in run and all(x in keyed for x in node.all_input_nodes):
                again: list[LoopCall] = []
                try:
                    keyed[node] = run_noted(node.target, given_to(node, keyed)[0], again)
                except Exception as error:
                    yield Untrue(node, "runs", f"padding makes it fail: {error}")
                    return
                yield from _of_turns(node, facts[node], turns, again, sizes)
            continue
        elif node.op == "get_attr":
            bare[node] = keyed[node] = operator.attrgetter(str(node.target))(gm)
        else:
            bare[node] = _run(node, bare)
            if node not in run or any(x not in keyed for x in node.all_input_nodes):
                continue
            try:
                keyed[node] = _run(node, keyed)
            except Exception as error:
                if isinstance(facts[node], Kept):
                    yield Untrue(node, "runs", f"padding makes it fail: {error}")
                return
        yield from _named(node, facts[node], bare)
        for x in (node, *written_by(node)):
            unread = x is node and not x.users  # positions of a sort of which values alone are used
            kept = isinstance(fact := facts[node], Kept) and not unfinished(x) and not unread
            if kept and isinstance(bare[x], torch.Tensor):
                fact = dataclasses.replace(fact, dirty=fact.left.get(x, fact.dirty))
                yield from _compared(x, fact, bare[x], keyed[x], sizes)
                yield from _taken(x, fact, bare[x], facts)
                _align(fact, bare[x], keyed[x])
                if x is node and not _is_view(x):
                    _poison(x, fact, bare[x], keyed[x])
                if fact.dirty and (x is not node or not _is_view(x)):
                    _spoil(fact, bare[x], keyed[x], sizes)


def _of_turns(
    node: fx.Node, fact: Any, turns: Sequence[LoopCall], again: Sequence[LoopCall],
    sizes: Mapping[Any, int],
) -> Iterator[Untrue]:  # fmt: skip
    """What differs within a loop, call by call."""
    if [turn.number for turn in turns] != [turn.number for turn in again]:
        if any(isinstance(x, Kept) for x in fact.results):
            yield Untrue(node, "runs", "it takes other turns in a key")
        return
    loop: Any = node.target
    for (number, true), (_, padded) in zip(turns, again):
        gm, facts = loop.graphs[number], fact.graphs[number]
        yield from rehearsed(gm, facts, true, padded, sizes, in_loop=True)


def _needed(gm: fx.GraphModule, facts: Mapping[fx.Node, Any]) -> set[fx.Node]:
    """What is run in a key: nodes of which something is claimed, what they read, and writes. Not
    what may fail at padding, and nobody vouches for: a bad index ends the process on a device."""
    found = vouched_for(gm)
    vouched = set(found)
    for node in reversed(gm.graph.nodes):
        fact = facts.get(node)
        if node in found or isinstance(fact, Kept | Several) or written_by(node):
            found.update((node, *node.all_input_nodes))
        fails = fact.fails if isinstance(fact, Mixed | Several) else ""
        if fails and node not in vouched:
            found.discard(node)
    return found


def _sizes(gm: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> dict[Any, int]:
    """What T and R are for these leaves."""
    found: dict[Any, int] = {}
    for node, leaf in zip(inputs_of(gm.graph), leaves):
        for size, n in zip(node.meta["val"].shape, leaf.shape):
            for symbol in getattr(size_of(size), "free_symbols", set()) - found.keys():
                first, second = (size_of(size).subs(symbol, i) for i in (0, 1))
                found[symbol] = (n - first) // (second - first)  # T, R + 1: of the first degree
    return found


def _run(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    result = computed(node, values)
    if is_unwritten(node):  # whatever was there, the same in both
        result = tree_map_only(torch.Tensor, _unwritten, result)
    return result


def is_unwritten(node: fx.Node) -> bool:
    """Whether a node's op makes memory that holds nothing yet."""
    return is_op(node) and plain_name(node.target) in UNWRITTEN


def _unwritten(x: torch.Tensor) -> torch.Tensor:
    return x.fill_(math.nan) if x.is_floating_point() and x.itemsize > 1 else x.zero_()


def _compared(
    node: fx.Node, fact: Kept, bare: torch.Tensor, keyed: torch.Tensor, sizes: Mapping[Any, int]
) -> Iterator[Untrue]:
    if any(k < n for k, n in zip(keyed.shape, bare.shape)):
        yield Untrue(node, "rows", f"{list(bare.shape)} true rows, in a key {list(keyed.shape)}")
        return
    same = _but_dirty(fact, bare, keyed[_leading(bare)])
    if not _draws(node) and not _alike(same, bare):
        yield Untrue(node, "rows", f"true rows are {_short(bare)}; in a key, {_short(same)}")
        return
    for dim, fill in fact.fills.items():
        beyond = keyed[_leading(bare, dim)]
        if not _holds(fill, beyond, keyed[_leading(bare)], dim):
            told = fill if isinstance(fill, str) else _short(fill)
            text = f"padding along dim {dim} should hold {told}, and holds {_short(beyond)}"
            yield Untrue(node, "fill", text)
    if fact.value is not None and not _alike(fact.value, bare.cpu()):
        yield Untrue(node, "value", f"should be {_short(fact.value)}, and is {_short(bare)}")
    yield from _outside(node, fact, bare, keyed, sizes)


def _taken(
    node: fx.Node, fact: Kept, bare: torch.Tensor, facts: Mapping[fx.Node, Any]
) -> Iterator[Untrue]:
    """Rows that are kept for padding, and that true rows name as well."""
    places = [
        x for x in node.users
        if (rows := _reserved(x, facts)) and not rows.keys().isdisjoint(_dims_of(node, x))
    ]  # fmt: skip
    for fill in fact.fills.values() if places else ():
        if isinstance(fill, torch.Tensor) and fill.numel() == 1 and (bare == fill).any():
            yield Untrue(
                node, "reserved", f"true rows name {_short(fill)} too, which padding writes to"
            )


def _named(node: fx.Node, fact: Any, bare: Mapping[fx.Node, Any]) -> Iterator[Untrue]:
    """The same of a lookup, which is said to leave them out."""
    for index, rows in fact.skips.items() if isinstance(fact, Kept) else ():
        taken = sorted(rows.intersection(bare[index].flatten().tolist()))
        if taken:
            text = f"true rows of an index name {taken} too, which padding writes to"
            yield Untrue(node, "reserved", text)


def _dims_of(index: fx.Node, write: fx.Node) -> set[int]:
    """The target's dims along which an index says where a write goes."""
    args = named(write.target, write.args, write.kwargs)  # type: ignore[arg-type]
    if "index" in args:
        return {args["dim"] % max(ndim(args["self"]), 1)} if args["index"] is index else set()
    return {d for d, x in by_dim(args["indices"]).items() if x is index}


def _reserved(node: fx.Node, facts: Mapping[fx.Node, Any]) -> Mapping[int, torch.Tensor]:
    fact = facts.get(node)
    return fact.reserved if isinstance(fact, Kept) else {}


def _outside(
    node: fx.Node, fact: Kept, bare: torch.Tensor, keyed: torch.Tensor, sizes: Mapping[Any, int]
) -> Iterator[Untrue]:
    if bare.dtype.is_floating_point or bare.dtype.is_complex:
        return
    if fact.low > -math.inf and bare.numel() and bare.min().item() < fact.low:
        yield Untrue(node, "bound", f"should be {fact.low} or more: {_short(bare)}")
    if fact.span not in (None, ANY) and keyed.numel():
        low, high = fact.span.at(sizes)
        if keyed.min().item() < low or keyed.max().item() > high:
            text = f"should lie from {low} to {high}, padding too: {_short(keyed)}"
            yield Untrue(node, "bound", text)


def _leading(bare: torch.Tensor, beyond: int | None = None) -> tuple[slice, ...]:
    """True rows; or what lies beyond them along one dim, at true rows of the others."""
    return tuple(slice(n, None) if d == beyond else slice(n) for d, n in enumerate(bare.shape))


def _holds(fill: Any, beyond: torch.Tensor, true: torch.Tensor, dim: int) -> bool:
    if not beyond.numel():
        return True
    if isinstance(fill, torch.Tensor):
        if fill.dtype != beyond.dtype:
            return False  # with others it would make another dtype
        wanted = fill.to(beyond.device).expand(beyond.shape) if fill.dim() else fill
        held = wanted.to(beyond.dtype).cpu().expand(beyond.shape)
        return _alike(beyond.cpu(), held, exact=not beyond.is_cuda)  # rules compute on the CPU
    if fill == BEYOND:
        first = true.shape[dim]
        counted = torch.arange(first, first + beyond.shape[dim], device=beyond.device)
        return bool((beyond.movedim(dim, -1) == counted).all())
    if fill == FINITE:
        return bool(beyond.isfinite().all())
    if fill == VANISHING:
        lost = true.isnan().all(dim, keepdim=True).expand(beyond.shape)
        return bool(torch.where(lost, beyond.isnan() | (beyond == 0), beyond == 0).all())
    assert fill in (OFFSETS, RISING)
    rising = torch.cat([true[-1:], beyond])
    return bool((rising.diff() >= 0).all())


def _alike(a: torch.Tensor, b: torch.Tensor, exact: bool = False) -> bool:
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    if not a.dtype.is_floating_point:
        return torch.equal(a, b)
    near = 0.0 if exact else _TOLERANCE.get(a.dtype, 0.1)
    if a.itemsize == 1:  # float8, for which torch has no comparisons
        a, b = a.float(), b.float()
    return torch.allclose(a, b, near, near, equal_nan=True)


def _align(fact: Kept, bare: torch.Tensor, keyed: torch.Tensor) -> None:
    """Make true rows equal bit by bit; where they are views of each other's rows they are."""
    if keyed.is_inference() and not torch.is_inference_mode_enabled():
        return
    same = keyed[_leading(bare)]
    shape_fits = same.shape == bare.shape
    overlapping = any(s == 0 and n > 1 for s, n in zip(same.stride(), same.shape))
    if shape_fits and not overlapping:
        same.copy_(_but_dirty(fact, same, bare))  # rounded in another order, or drawn


def _but_dirty(fact: Kept, dirty: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
    """Elements of one tensor where dirty rows are, and of another elsewhere."""
    if not fact.dirty:
        return rest
    at = elements(fact.dirty, rest)
    if rest.itemsize == 1:  # float8, of which torch cannot choose
        yes, no = (x.contiguous().view(torch.uint8) for x in (dirty, rest))
        return torch.where(at, yes, no).view(rest.dtype)
    return torch.where(at, dirty, rest)


def _spoil(fact: Kept, bare: torch.Tensor, keyed: torch.Tensor, sizes: Mapping[Any, int]) -> None:
    """Something loud in dirty rows, on which nothing may depend; within what is claimed of it."""
    same, dtype = keyed[_leading(bare)], keyed.dtype
    if keyed.is_inference() and not torch.is_inference_mode_enabled():
        return
    if dtype is torch.bool:
        loud = ~bare
    elif dtype.is_floating_point or dtype.is_complex:
        loud = keyed.new_tensor(_LOUD if keyed.itemsize > 1 else [1.0, -1.0])
    else:
        whole = torch.iinfo(dtype).min, torch.iinfo(dtype).max
        least, most = whole if fact.span in (None, ANY) else fact.span.at(sizes)
        loud = keyed.new_tensor([*(n for n in _ODD if least <= n <= most), least, most])
    loud = loud.flatten().repeat(same.numel() // loud.numel() + 1)[: same.numel()].view(same.shape)
    same.copy_(_but_dirty(fact, loud, same))


def _poison(node: fx.Node, fact: Kept, bare: torch.Tensor, keyed: torch.Tensor) -> None:
    """Something loud wherever nothing is claimed of padding, of floats."""
    moving = moving_dims(node)
    if not moving or not keyed.dtype.is_floating_point:
        return
    free = torch.ones(keyed.shape, dtype=torch.bool, device=keyed.device)
    free[_leading(bare)] = False
    for dim in fact.fills:
        free[_leading(bare, dim)] = False
    if keyed.itemsize > 1 and free.any():
        loud = keyed.new_tensor(_LOUD).repeat(-(-keyed.numel() // len(_LOUD)))
        keyed.copy_(torch.where(free, loud[: keyed.numel()].view(keyed.shape), keyed))


def _is_view(node: fx.Node) -> bool:
    """Whether other values may lie in the same memory."""
    if not is_op(node):
        return not is_loop_result(node)
    returns = node.target._schema.returns  # type: ignore[union-attr]
    reshaped = plain_name(node.target) in ("reshape", "contiguous", "_to_copy", "to", "expand")
    return reshaped or any(r.alias_info is not None for r in returns)


def _draws(node: fx.Node) -> bool:
    """Whether a value is drawn, so that two runs differ in it."""
    source = node if is_op(node) else node.args[0] if node.op == "call_function" else None
    if not isinstance(source, fx.Node) or not is_op(source):
        return False
    return draws(source.target, source.args, source.kwargs)


def _short(x: torch.Tensor) -> str:
    flat = x.detach().flatten()[:6].tolist() if x.itemsize > 1 else x.float().flatten()[:6].tolist()
    text = ", ".join(f"{n:.4g}" if isinstance(n, float) else str(n) for n in flat)
    return f"[{text}{', ...' if x.numel() > 6 else ''}]"
