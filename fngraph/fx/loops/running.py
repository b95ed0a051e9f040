"""How a loop runs: in Python, or written into a graph by whoever records it.

In a graph a loop's state lies in buffers of its own, at fixed addresses: what it begins with is
copied in, a turn's new values are copied over the old ones once all are made, and the results are
what is there at the end. So any turn may swap or share values, and no turn is fine too. In Python
it is the same, with values where the others have buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from fngraph.errors import CaptureError
from fngraph.torch_facts.memory import other_kind

Run = Callable[..., tuple[torch.Tensor, ...]]


class Control(Protocol):
    """Who records: it takes functions that launch a body, and reads predicates at replay."""

    def while_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """Replay what `run_body` launches as long as `pred`, bool (), holds."""

    def if_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """Replay what `run_body` launches if `pred`, bool (), holds."""


def run(
    loop: Any, runs: Sequence[Run], control: Control | None, operands: Sequence[Any]
) -> tuple[torch.Tensor, ...]:
    """The results of a loop.

    Args:
        loop: a `Loop`, see `fngraph.fx.loops.node`.
        runs: its graphs as functions.
        control: who records; None: nobody does, and Python loops.
    """
    rest = operands[loop.own :]
    shapes = [[operands[n[0]] if isinstance(n, tuple) else n for n in x] for x in loop.shapes]
    made = [
        torch.empty(shape, dtype=x.dtype, device=x.device)
        for shape, x in zip(shapes, loop.results[len(loop.results) - len(shapes) :])
    ]
    if loop.kind == "cond":
        _cond(loop, runs, control, operands[0], rest, made)
        return tuple(made)
    carry = [x if i in loop.seats else _copy(x) for i, x in enumerate(operands[: loop.state])]
    if loop.kind == "while_loop":
        _while(loop, runs, control, carry, rest)
    else:
        _scan(loop, runs[0], control, carry, operands[loop.state : loop.own], rest, made)
    return (*carry, *made)


NOTED = 24  # calls of a loop's functions that are looked at one by one


class LoopCall(NamedTuple):
    """A call of a function of a loop: which one it is, and what it was given."""

    number: int
    given: list[Any]


def run_noted(
    loop: Any, operands: Sequence[Any], turns: list[LoopCall]
) -> tuple[torch.Tensor, ...]:
    """The results of a loop, in Python; the first calls of its functions go into `turns`."""

    def noting(number: int, gm: Any) -> Run:
        def call(*given: Any) -> tuple[torch.Tensor, ...]:
            if len(turns) < NOTED:
                kept = [x.clone() if isinstance(x, torch.Tensor) else x for x in given]
                turns.append(LoopCall(number, kept))
            return gm.forward(*given)  # type: ignore[no-any-return]

        return call

    return run(loop, [noting(i, gm) for i, gm in enumerate(loop.graphs)], None, operands)


def _while(
    loop: Any, runs: Sequence[Run], control: Control | None, carry: Sequence[torch.Tensor],
    rest: Sequence[Any],
) -> None:  # fmt: skip
    """The turns of a loop: `carry` is buffers that hold it."""
    cond, body = runs
    if control is None:
        while bool(cond(*carry, *rest)[0]):
            _store(loop, carry, body(*carry, *rest))
        return
    pred = _copy(cond(*carry, *rest)[0])  # in memory of its own, which each turn writes

    def turn() -> None:
        _store(loop, carry, body(*carry, *rest))
        _put(loop, "the predicate", pred, cond(*carry, *rest)[0])

    control.while_node(pred, turn)


def _scan(
    loop: Any, body: Run, control: Control | None, init: Sequence[torch.Tensor],
    xs: Sequence[torch.Tensor], rest: Sequence[Any], stacked: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    """The turns of a scan: `init` is buffers that hold the carry, `stacked` is filled."""
    carry, last = init, loop.turns - 1

    def turn(slices: Sequence[torch.Tensor], put: Callable[[torch.Tensor, Any], Any]) -> None:
        news = body(*carry, *slices, *rest)
        for i, (ys, y) in enumerate(zip(stacked, news[loop.state :])):
            _check(loop, f"row {i} of what a turn stacks", ys[0], y)
            put(ys, y)  # before the carry is stored, of which it may be a part
        _store(loop, carry, news[: loop.state])

    if control is None or loop.turns < 2:
        for i in range(last, -1, -1) if loop.reverse else range(loop.turns):
            turn([x[i].contiguous() for x in xs], lambda ys, y, i=i: ys[i].copy_(y))  # type: ignore[misc]
        return
    device = next(x.device for x in (*init, *xs, *stacked, *rest) if isinstance(x, torch.Tensor))
    at = torch.full((1,), last if loop.reverse else 0, dtype=torch.int64, device=device)
    pred = torch.ones((), dtype=torch.bool, device=device)

    def counted() -> None:
        slices = [x.index_select(0, at)[0] for x in xs]
        turn(slices, lambda ys, y: ys.index_copy_(0, at, y[None]))
        at.add_(-1 if loop.reverse else 1)
        pred.copy_((at >= 0 if loop.reverse else at <= last)[0])

    control.while_node(pred, counted)


def _cond(
    loop: Any, runs: Sequence[Run], control: Control | None, pred: torch.Tensor,
    rest: Sequence[Any], results: Sequence[torch.Tensor],
) -> None:  # fmt: skip
    def take(branch: Run) -> None:
        for i, (into, new) in enumerate(zip(results, branch(*rest), strict=True)):
            _put(loop, f"result {i}", into, new)

    if control is None:
        take(runs[0 if bool(pred) else 1])
        return
    yes = _copy(pred)
    no = yes.logical_not()  # both before a branch may write what the predicate is a view of
    control.if_node(yes, lambda: take(runs[0]))
    control.if_node(no, lambda: take(runs[1]))


def _copy(x: torch.Tensor) -> torch.Tensor:
    """In memory of its own, laid out alike where it has no gaps."""
    return x.clone(memory_format=torch.preserve_format)


def _check(loop: Any, what: str, into: torch.Tensor, made: torch.Tensor) -> None:
    """Raise where something is not of the kind that torch's rule said at the trace.

    Raises:
        CaptureError: so it is.
    """
    if wrong := other_kind(into, made):
        raise CaptureError(f"{loop.line}: {what} of {loop} {wrong}")


def _put(loop: Any, what: str, into: torch.Tensor, made: torch.Tensor) -> None:
    """Copy what was made to where it is read, as which it must be of one kind."""
    _check(loop, what, into, made)
    into.copy_(made)


def _store(loop: Any, carry: Sequence[torch.Tensor], news: Sequence[torch.Tensor]) -> None:
    """Copy new values into the carry's buffers. One that is (a part of) a buffer is moved out of
    the way first: the buffer of another may be written before it is read."""
    buffers = {x.untyped_storage().data_ptr() for x in carry}
    for i, (old, new) in enumerate(zip(carry, news, strict=True)):
        _check(loop, f"carry {i}", old, new)
    moves = [(old, new) for old, new in zip(carry, news) if not _is_there(old, new)]
    moves = [
        (old, new.clone() if new.untyped_storage().data_ptr() in buffers else new)
        for old, new in moves
    ]
    for old, new in moves:
        old.copy_(new)


def _is_there(old: torch.Tensor, new: torch.Tensor) -> bool:
    if new is old or not old.numel():
        return True
    bits = (old.is_conj(), old.is_neg()) == (new.is_conj(), new.is_neg())
    return bits and old.data_ptr() == new.data_ptr() and old.stride() == new.stride()
