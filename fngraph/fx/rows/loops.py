"""What is known of a loop's rows: facts go through its functions until a turn tells no more.

What a carry is known to be at the beginning of a turn is what holds of the first one and of all
that a turn gives. So a turn is run abstractly again and again, each time with less that is claimed
of the carry, until what comes out claims no less. Bounds that go on growing are given up.

How many turns a loop takes, or which way a choice goes, must not be for padding to say.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from fngraph.fx.nodes import inputs_of, is_tensor, line_of
from fngraph.fx.rows.bounds import ANY
from fngraph.fx.rows.boxes import WHOLE, joined
from fngraph.fx.rows.dirty_moves import moved
from fngraph.fx.rows.shapes import one_number
from fngraph.fx.rows.state import FINITE, WRITTEN, Fill, Kept, Mixed, is_finite

Facts = Mapping[fx.Node, Any]
Run = Callable[[fx.GraphModule, Mapping[fx.Node, Any]], tuple[dict[fx.Node, Any], Facts]]
"""A graph's facts, of what is known of its inputs; and what is known of each node at its end."""
_TURNS = 4  # of which each may know of smaller bounds; the next ones know of none


@dataclasses.dataclass(frozen=True, slots=True)
class Several:
    """What is known of a loop.

    Attributes:
        results: of each result.
        graphs: of the values of each function, at any turn.
        left: of each operand that it writes, by number, once it is done.
        fails: how the loop itself may fail for padding: it may never end.
    """

    results: tuple[Kept | Mixed, ...]
    graphs: tuple[Facts, ...]
    left: Mapping[int, Kept | Mixed]
    fails: Mixed | None = None


def of_loop(node: fx.Node, states: Mapping[fx.Node, Any], run: Run) -> Several:
    """What is known of a loop's node, of what is known of its operands."""
    loop: Any = node.target
    given = [_given(states[x]) if is_tensor(x) else Kept() for x in node.args]  # type: ignore[index]
    state, rest = given[: loop.state], given[loop.own :]
    carries = loop.kind != "cond"
    for count in itertools.count():
        own = [*state, *(_shifted(x, -1) for x in given[loop.state : loop.own])] if carries else []
        told = [_turn(gm, (*own, *rest), run) for gm in loop.graphs]
        news = told[-1].outputs[: loop.state] if carries else ()
        later = [_join(a, b, x, count) for a, b, x in zip(state, news, _shapes(node))] or state
        after = list(rest)
        for i in loop.writes:
            at = i - loop.own
            for one in told:
                mine = one.inputs[len(own) + at]
                after[at] = _join(after[at], mine, _shapes(node)[i], count)
        settled = all(map(_same, (*state, *rest), (*later, *after)))
        if settled and carries and loop.turns != 1:
            grown = _without_growth(loop, state, own[loop.state :], rest, node, run)
            settled = all(map(_same, state, grown))
            later = grown
        state, rest = later, after
        if settled or not carries:
            break
    left = {i: rest[i - loop.own] for i in loop.writes}
    choice = (
        given[0] if not carries else told[0].outputs[0] if loop.kind == "while_loop" else Kept()
    )
    results = _results(loop, state, told, [x.shape for x in loop.results])
    if (why := _undecided(choice)) is None:
        return Several(tuple(results), tuple(one.facts for one in told), left)  # type: ignore[arg-type]
    mixed = Mixed(node, f"{_DOES[loop.kind]} by a predicate that padding can change: {why}")
    fails = dataclasses.replace(mixed, fails=mixed.why) if loop.kind == "while_loop" else None
    return Several(
        (mixed,) * len(results), tuple(one.facts for one in told), dict.fromkeys(left, mixed), fails
    )  # type: ignore[arg-type]


def _without_growth(
    loop: Any, state: Sequence[Any], xs: Sequence[Any], rest: Sequence[Any], node: fx.Node, run: Run
) -> list[Any]:
    """What is known of the carry, but not that padding is finite where a turn makes a large number
    a larger one: x * x and x * 2 overflow after some turns."""
    dtypes = [x.meta["val"].dtype for x in node.args[: loop.state]]  # type: ignore[union-attr]
    large = [
        _with(x, lambda f, dtype=dtype: _large(dtype) if _is_known_finite(f, dtype) else f)  # type: ignore[misc]
        for x, dtype in zip(state, dtypes)
    ]
    if not any(a is not b for a, b in zip(state, large)):
        return list(state)
    news = _turn(loop.graphs[-1], (*large, *xs, *rest), run).outputs
    found = []
    for x, new, dtype in zip(state, news, dtypes):
        fills = {} if isinstance(x, Mixed) else dict(x.fills)
        for dim, fill in list(fills.items()):
            after = getattr(new, "fills", {}).get(dim)
            if _is_known_finite(fill, dtype) and not _is_at_most(after, _large(dtype)):
                del fills[dim]
        found.append(x if isinstance(x, Mixed) else dataclasses.replace(x, fills=fills))
    return found


def _with(state: Any, change: Callable[[Fill], Fill]) -> Any:
    if isinstance(state, Mixed):
        return state
    fills = {dim: change(fill) for dim, fill in state.fills.items()}
    same = all(fills[dim] is fill for dim, fill in state.fills.items())
    return state if same else dataclasses.replace(state, fills=fills)


def _is_known_finite(fill: Fill, dtype: torch.dtype) -> bool:
    return isinstance(fill, str) and fill == FINITE and dtype.is_floating_point


def _large(dtype: torch.dtype) -> torch.Tensor:
    """A number whose square is one of the dtype."""
    return torch.tensor(torch.finfo(dtype).max ** 0.45, dtype=dtype)


def _is_at_most(fill: Fill | None, large: torch.Tensor) -> bool:
    if isinstance(fill, str):
        return fill == FINITE
    return fill is not None and bool((fill.abs() <= large).all())


_DOES = {"while_loop": "takes turns (fg.while_loop)", "cond": "chooses (fg.cond)"}


class _Turn(NamedTuple):
    """What is known of one function: its values, its results, and its inputs at its end."""

    facts: Facts
    outputs: tuple[Any, ...]
    inputs: tuple[Any, ...]


def _turn(gm: fx.GraphModule, given: Sequence[Any], run: Run) -> _Turn:
    inputs = inputs_of(gm.graph)
    found, ends = run(gm, dict(zip(inputs, given, strict=True)))
    return _Turn(found, tuple(found[gm.graph.output_node()]), tuple(ends[x] for x in inputs))


def _results(
    loop: Any, state: Sequence[Any], told: Sequence[_Turn], shapes: Sequence[Any]
) -> list[Kept | Mixed]:
    if loop.kind == "cond":
        a, b = told
        return [_join(x, y, s, 0) for x, y, s in zip(a.outputs, b.outputs, shapes)]
    if loop.kind == "while_loop":
        return list(state)
    (turn,) = told
    carry = turn.outputs[: loop.state] if loop.turns else state  # of the last turn
    return [*map(_plain, carry), *(_shifted(y, 1) for y in turn.outputs[loop.state :])]


def _undecided(choice: Any) -> str | None:
    """Why a predicate is not the same in a key as in its batch; None if it is."""
    if isinstance(choice, Mixed):
        return f"forward {choice.why} ({line_of(choice.node)}). Leave padding out of it: {_FIX}"
    return f"{WRITTEN}. Leave such rows out of it" if choice.dirty else None


_FIX = "torch.where(valid, x, 0), of a staged leaf that padding is told apart by"


def _given(state: Any) -> Kept | Mixed:
    """What is known of an operand, without the nodes of its own graph."""
    if isinstance(state, Mixed):
        return Mixed(state.node, state.why, state.fails)
    return _plain(state)


def _plain(state: Any) -> Any:
    if isinstance(state, Mixed):
        return state
    return dataclasses.replace(state, reserved={}, left={}, skips={})


def _shifted(state: Kept | Mixed, by: int) -> Kept | Mixed:
    """Of a tensor of such rows, 1; of a row of such a tensor, whichever it is, -1."""
    if isinstance(state, Mixed):
        return state
    fills: dict[int, Fill] = {}
    for dim, fill in state.fills.items():
        number = fill if isinstance(fill, str) and fill == FINITE else one_number(fill)
        if number is not None and dim + by >= 0:
            fills[dim + by] = number
    dirty = tuple(moved(state.dirty, lambda d: d + by if d + by >= 0 else None))
    return dataclasses.replace(_plain(state), fills=fills, value=None, dirty=dirty)


def _join(a: Any, b: Any, shape: Sequence[Any], count: int) -> Any:
    """What holds of both; after some turns, without what may go on growing.

    Args:
        count: turns so far.
    """
    if isinstance(a, Mixed) or isinstance(b, Mixed):
        return a if isinstance(a, Mixed) else b
    fills = {d: f for d, x in a.fills.items() if (f := _common(x, b.fills.get(d))) is not None}
    one = a.value is not None and b.value is not None and _equal(a.value, b.value)
    dirty = joined((*a.dirty, *b.dirty), shape)
    low, span = min(a.low, b.low), _spans(a.span, b.span)
    if count > _TURNS:
        low = a.low if low == a.low else -math.inf
        span = a.span if span == a.span else None
        dirty = dirty if dirty == a.dirty else WHOLE
    return Kept(
        fills, a.value if one else None, a.said if a.said == b.said else "", a.unsaid or b.unsaid,
        low, span, a.window or b.window, a.held and b.held, dirty=dirty,
    )  # fmt: skip


def _common(a: Fill, b: Fill | None) -> Fill | None:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and _equal(a, b):
        return a
    if isinstance(a, str) and isinstance(b, str) and a == b:
        return a
    return FINITE if b is not None and is_finite(a) and is_finite(b) else None


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two say the same numbers; 0 and -0.0 are one."""
    if a.dtype != b.dtype or (a.shape != b.shape and a.numel() != 1 and b.numel() != 1):
        return False
    x, y = (n.float() if n.is_floating_point() and n.itemsize == 1 else n for n in (a, b))
    return bool(((x == y) | ((x != x) & (y != y))).all())


def _spans(a: Any, b: Any) -> Any:
    if a is None or b is None:
        return None
    if ANY in (a, b):
        return a if a == b else None
    return a | b


def _same(a: Any, b: Any) -> bool:
    """Whether as much is known of both."""
    if isinstance(a, Mixed) or isinstance(b, Mixed):
        return isinstance(a, Mixed) and isinstance(b, Mixed)
    fills = a.fills.keys() == b.fills.keys() and all(
        isinstance(x, str) == isinstance(y := b.fills[d], str) and _common(x, y) is not None
        for d, x in a.fills.items()
    )
    value = (a.value is None) == (b.value is None) and (a.value is None or _equal(a.value, b.value))
    rest = (a.said, a.unsaid, a.low, a.span, a.window, a.held, a.dirty)
    return fills and value and rest == (b.said, b.unsaid, b.low, b.span, b.window, b.held, b.dirty)


def _shapes(node: fx.Node) -> list[Any]:
    return [x.meta["val"].shape if is_tensor(x) else () for x in node.args]  # type: ignore[union-attr]


def failures(facts: Facts) -> Iterator[tuple[fx.Node, Mixed]]:
    """Of loops: what may fail at padding in their functions, or never end, with its node."""
    for node, state in facts.items():
        if not isinstance(state, Several):
            continue
        if state.fails is not None:
            yield node, state.fails
        for inner in state.graphs:
            yield from ((x, s) for x, s in inner.items() if isinstance(s, Mixed) and s.fails)
            yield from failures(inner)
