"""What is known of a traced value's rows, and one op with what is known of its arguments.

A value *keeps* its rows, or padding is *mixed* into them. A batch runs as a key of more tokens and
requests, so dims in T and R, the *moving* ones, are longer there.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from fngraph.fx.nodes import SIZES
from fngraph.fx.rows.boxes import Boxes
from fngraph.fx.schemas import named, plain_name

OFFSETS = "offsets"  # query_start_loc: from 0, a token or more each; padding never falls below
RISING = "rising"  # other offsets: padding repeats the last true one; none falls
FINITE = "finite"  # numbers that are not known, but neither NaN nor infinite, as weights are not
VANISHING = "vanishing"  # 0, or NaN if all true elements along the dim are NaN: of a softmax
BEYOND = "beyond"  # padding that counts on where the true rows end: arange(T)
_MOVING = "fngraph.moving"  # of a node's meta: its value, and the dims of that in T or R
WRITTEN = "padding has written there, in this call or in one before"
Fill = torch.Tensor | str  # a tensor has one element along the dims in T and R


@dataclasses.dataclass(frozen=True, slots=True)
class Kept:
    """A value that keeps its rows.

    Attributes:
        fills: by dim in T or R, what lies beyond the true rows of it, at true rows of the other
            ones; a dim left out: unknown.
        value: a constant's own.
        said: who says that the fills, as indices, are rows kept for padding: "pad", the field's
            own; "where", a choice between them and true ones; "", nobody.
        unsaid: a staged leaf whose pad names no row (left out, or -1), if the fills are its.
        low: a number that no true element is below, of integers.
        span: what all elements lie between, padding too, of integers; None: unknown.
        window: a slice of rows out of memory that has more true ones: fit for reading alone.
        held: weights, or made of weights alone; taken to be finite.
        reserved: of a write, the rows by dim that its padding goes to, since they are kept for it.
        dirty: what such writes, of this call or one before, have left in true rows: it is not bare
            forward's. Every other fact but `fills` and `span` is of what is not dirty.
        left: of a primitive that writes, what stays dirty in each tensor that it writes.
        skips: of a lookup, the rows that its index is said not to name in true rows.
    """

    fills: Mapping[int, Fill] = dataclasses.field(default_factory=dict)
    value: torch.Tensor | None = None
    said: str = ""
    unsaid: str | None = None
    low: float = -math.inf
    span: Any = None
    window: bool = False
    held: bool = False
    reserved: Mapping[int, torch.Tensor] = dataclasses.field(default_factory=dict)
    dirty: Boxes = ()
    left: Mapping[fx.Node, Boxes] = dataclasses.field(default_factory=dict)
    skips: Mapping[fx.Node, frozenset[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Mixed:
    """A value with padding in its true rows, and the op that brought it there.

    Attributes:
        fails: how the op that gives the value may fail at rows of padding, with an error or the
            end of the process, whoever reads what it gives; "" if it does not.
    """

    node: fx.Node
    why: str
    fails: str = ""


VOUCHED = "fg.trust_rows(result)"
"""How forward says that rows are kept where that is not known; a pass says it otherwise."""


class Mixes(Exception):
    """Raised by a rule: padding would get into true rows, or fail there. The text goes on after
    'forward'."""

    def __init__(self, text: str, fails: bool = False) -> None:
        super().__init__(text)
        self.fails = fails


@dataclasses.dataclass(frozen=True, slots=True)
class OpCall:
    """One op: its arguments by their names in the schema, and what is known of them."""

    node: fx.Node
    args: Mapping[str, Any]
    states: Mapping[fx.Node, Any]
    text: Callable[[Any], str]  # a size in T and R
    name: str = ""  # `sum` for aten.sum.dim_IntList and for aten.sum_

    @classmethod
    def of(cls, node: fx.Node, states: Mapping[fx.Node, Any], text: Callable[[Any], str]) -> OpCall:
        """The call of a node's op."""
        args = named(node.target, node.args, node.kwargs)
        return cls(node, args, states, text, plain_name(node.target))

    @property
    def value(self) -> torch.Tensor:
        """The result's fake."""
        return self.node.meta["val"]  # type: ignore[no-any-return]

    @property
    def zero(self) -> torch.Tensor:
        """Padding of zeros, in the result's dtype."""
        return torch.zeros((), dtype=self.value.dtype)

    def rows(self, x: Any) -> Kept:
        """What is known of an argument; of a number, its value."""
        if isinstance(x, fx.Node):
            return self.states[x]  # type: ignore[no-any-return]
        return Kept(value=torch.tensor(x)) if isinstance(x, bool | int | float) else Kept()

    def fill(self, x: fx.Node, dim: int) -> torch.Tensor | None:
        """What padding along `dim` of `x` holds, if known, in the shape of one row of it."""
        known = self.rows(x).fills.get(dim)
        if not isinstance(known, torch.Tensor):
            return None
        moving = moving_dims(x)
        shape = [1 if i in moving else int(n) for i, n in enumerate(x.meta["val"].shape)]
        return known.expand(shape)

    def dim(self, x: fx.Node, i: int) -> str:
        """The size of a dim as a person writes it."""
        return self.text(x.meta["val"].shape[i])


def is_moving(size: Any) -> bool:
    """Whether a number depends on T or R."""
    if type(size) is int:
        return False
    if isinstance(size, fx.Node):
        size = size.meta.get("val")
    return isinstance(size, SIZES) and bool(size.node.expr.free_symbols)


def moving_dims(x: fx.Node) -> tuple[int, ...]:
    """The dims of a tensor that are longer in a key than in its batch."""
    value = x.meta["val"]
    known = x.meta.get(_MOVING)
    if known is None or known[0] is not value:  # asked for many times, by every op that reads it
        known = value, tuple(i for i, n in enumerate(value.shape) if is_moving(n))
        x.meta[_MOVING] = known
    return known[1]  # type: ignore[no-any-return]


def ndim(x: fx.Node) -> int:
    """How many dims a tensor has."""
    return x.meta["val"].dim()  # type: ignore[no-any-return]


def is_finite(fill: Any) -> bool:
    """Whether padding that holds this is finite."""
    if isinstance(fill, torch.Tensor):
        if not fill.is_floating_point():
            return True
        if fill.numel() == 1:
            return math.isfinite(fill.item())
        wide = fill.float() if fill.itemsize == 1 else fill  # float8 has no isfinite
        return bool(wide.isfinite().all())
    return fill == FINITE
