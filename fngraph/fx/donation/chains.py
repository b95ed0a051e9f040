"""Chains of ops that can work in place, from a leaf's new value back to the leaf's buffer.

`add(mul(p, 0.9), g)` is `p.mul_(0.9).add_(g)`: each op can take the place of what the one before it
left there. All ways are found here; `inplace` says which of them will do.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from fngraph.fx import schemas
from fngraph.fx.donation.liveness import keys
from fngraph.fx.nodes import is_loop_result, is_op, is_tensor, line_of, mutates, written_by

_VISITS = 3  # of one op in the search, since a row of n diamonds has 2**n ways through it


@dataclasses.dataclass(frozen=True, slots=True)
class Hop:
    """One op of a chain.

    Attributes:
        how: "alias" (a view, or an op in place already), "same" (a clone, which falls away),
            "twin", "scatter", "out" (see `fngraph.fx.schemas`), "carry" (a loop's result, in the
            place of what the loop begins with), or "start" (out=, of nothing that the buffer
            holds).
        operand: the argument in whose place the result goes; None for "start".
    """

    node: fx.Node
    how: str
    operand: fx.Node | None

    @property
    def maker(self) -> fx.Node:
        """The node that writes: of a loop's result, the loop."""
        return self.node.args[0] if self.how == "carry" else self.node  # type: ignore[return-value]

    def __str__(self) -> str:
        return f"{self.maker.target} ({line_of(self.node)})"


def hops(node: fx.Node) -> Iterator[Hop]:
    """Each way in which a node's value can take the place of one of its arguments."""
    if is_loop_result(node):
        loop, i = node.args
        carried = loop.target.kind != "cond" and i < loop.target.state  # type: ignore[union-attr,operator]
        if carried and i not in loop.target.seats:  # type: ignore[union-attr]
            yield Hop(node, "carry", loop.args[i])  # type: ignore[union-attr,index,arg-type]
        return
    if not is_op(node) or not is_tensor(node):
        return
    op: Any = node.target
    value = node.meta["val"]
    (key,) = keys(node)
    tensors = [a for a in node.args if isinstance(a, fx.Node) and keys(a)]
    shared = [a for a in node.all_input_nodes if key in keys(a)]
    if shared and mutates(node):
        shared = [a for a in written_by(node) if key in keys(a)]
    if shared:
        yield Hop(node, "alias", shared[0])
    elif schemas.is_functional(op):
        fits = [a for a in tensors if _alike(a.meta["val"], value)]
        first = fits and fits[0] is node.args[0]
        if op in schemas.COPIES:
            yield from (Hop(node, "same", a) for a in fits)
        elif first and schemas.in_place(op):
            yield Hop(node, "twin", fits[0])
        elif first and schemas.scattered_view(op):
            yield Hop(node, "scatter", fits[0])
        if op not in schemas.COPIES and schemas.is_pointwise(op) and schemas.out_form(op):
            rest = fits[1:] if first and schemas.in_place(op) else fits
            yield from (Hop(node, "out", a) for a in dict.fromkeys(rest))


def _alike(a: Any, b: torch.Tensor) -> bool:
    if not isinstance(a, torch.Tensor) or not all(isinstance(n, int) for n in (*a.shape, *b.shape)):
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def leading_to(new: fx.Node, buffer: fx.Node, from_nothing: bool) -> Iterator[tuple[Hop, ...]]:
    """Chains that lead to `new` from the buffer's old value, or else from nothing in the buffer."""
    (home,) = keys(buffer)
    visits: Counter[fx.Node] = Counter()
    pending: list[tuple[fx.Node, Any]] = [(new, ())]  # a chain is a linked list of hops
    while pending:
        node, rest = pending.pop()
        visits[node] += 1
        if home in keys(node):
            if not from_nothing:
                yield _listed(rest)
            continue
        if visits[node] > _VISITS:
            continue
        if from_nothing and _can_start(node):
            yield _listed((Hop(node, "start", None), rest))
        for hop in reversed(list(hops(node))):
            pending.append((hop.operand, (hop, rest)))  # type: ignore[arg-type]


def _can_start(node: fx.Node) -> bool:
    fresh = not any(key in keys(a) for a in node.all_input_nodes for key in keys(node))
    if not fresh or not schemas.is_functional(node.target):
        return False
    op: Any = node.target
    return op in schemas.COPIES or bool(schemas.out_form(op) or schemas.fill_form(op))


def _listed(links: Any) -> tuple[Hop, ...]:
    found = []
    while links:
        hop, links = links
        found.append(hop)
    return tuple(found)
