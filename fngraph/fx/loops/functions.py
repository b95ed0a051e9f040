"""`while_loop`, `fori_loop`, `scan`, `cond`: loops and choices whose predicates stay on the device.

Called as it is, each is the Python that its docstring shows. In a trace it is one node, whose
functions are traced once each: a graph takes its turns on the device, and Python never waits for a
predicate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch

from fngraph.core import trees
from fngraph.core.where import user_line
from fngraph.errors import FnGraphError, RowsError, TreeError
from fngraph.fx.loops.closures import here
from fngraph.fx.loops.emission import Called
from fngraph.fx.loops.flat import flat_cond, flat_scan, flat_while
from fngraph.fx.loops.gradients import without_gradient
from fngraph.fx.loops.trees import (
    brief,
    check_alike,
    check_functions,
    check_one_device,
    check_pred,
    flatten,
    leading,
    moving_first,
)
from fngraph.fx.loops.trial import Trial
from fngraph.fx.tracing.purity import PurityMode, tracing_mode

C = TypeVar("C")


def while_loop(cond: Callable[[C], torch.Tensor], body: Callable[[C], C], carry: C) -> C:
    """Take turns as long as `cond` holds.

        while cond(carry):
            carry = body(carry)
        return carry

    In a graph it is a WHILE node, whose predicate stays on the device. Both functions may close
    over tensors: parameters, what forward has computed.

    Args:
        cond: of the carry; bool (), a tensor.
        body: the carry to the next one, of equal structure, shapes and dtypes.
        carry: a tree of tensors.

    Returns:
        the last carry; the first one, where no turn is taken.

    Raises:
        TreeError: a carry that comes back otherwise, with its path, or on several devices; a
            predicate that is not bool (); what is no function.
        MutationError, RandomError, OperatorError, AliasError: in a trace, what a turn may not do.
        TransformError: a gradient is taken through it. `fori_loop` and `scan` have one.
    """
    fn = "fg.while_loop"
    check_functions("fg.while_loop(cond, body, carry)", "carry", cond=cond, body=body)
    leaves, tree = flatten(carry, fn, "carry")
    named = list(zip(trees.paths(tree, "carry"), leaves))
    check_one_device(fn, named)
    mode = _trace()

    def test(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pred = check_pred(fn, "cond gives", cond(trees.unflatten(tree, list(flat))))
        check_one_device(fn, [*named[:1], ("what cond gives", pred)])
        return [pred]

    def turn(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        new = body(trees.unflatten(tree, list(flat)))
        return check_alike(fn, "body gives", (leaves, tree), new, "carry")

    if mode is None:
        now = leaves
        while bool(test(now)[0]):
            now = turn(now)
        return trees.unflatten(tree, without_gradient(fn, now))  # type: ignore[no-any-return]
    with _refusing(mode):
        called = Called(fn, user_line(), tuple(path for path, _ in named))
        found = flat_while(mode, called, test, turn, here(leaves))
    return trees.unflatten(tree, found)  # type: ignore[no-any-return]


def fori_loop(
    lower: int | torch.Tensor, upper: int | torch.Tensor, body: Callable[[torch.Tensor, C], C],
    carry: C,
) -> C:  # fmt: skip
    """Take a turn for each number from `lower` to `upper`, the latter not included.

        for i in range(lower, upper):
            carry = body(torch.tensor(i), carry)
        return carry

    Of two ints the number of turns is known: it is a `scan` over them, and has a gradient. Of
    tensors it is a `while_loop` on the device.

    Args:
        lower, upper: ints, or tensors int64 ().
        body: (i, carry) to the next carry. i: int64 (), a tensor on the carry's device.
        carry: see `while_loop`.

    Raises: as `while_loop` and `scan` do.
    """
    fn = "fg.fori_loop"
    check_functions("fg.fori_loop(lower, upper, body, carry)", "i, carry", body=body)
    leaves, _ = flatten(carry, fn, "carry")
    device = leaves[0].device if leaves else torch.get_default_device()
    for name, bound in (("lower", lower), ("upper", upper)):
        if isinstance(bound, torch.SymInt):
            _refuse_rows(f"fg.fori_loop: {name}= is {bound}")
        whole = isinstance(bound, int) and not isinstance(bound, bool)
        if not whole and (
            not isinstance(bound, torch.Tensor) or bound.dtype is not torch.int64 or bound.dim()
        ):
            given = brief(bound) if isinstance(bound, torch.Tensor) else repr(bound)
            raise TreeError(
                f"{user_line()}: fg.fori_loop: {name}={given}, expected an int or int64 ()"
            )
    if isinstance(lower, int) and isinstance(upper, int):
        numbers = torch.arange(lower, max(lower, upper), device=device)
        return _scan(fn, lambda now, i: (body(i, now), None), carry, numbers, None, False)[0]
    ends = [  # copies: a turn may write what they came from, and takes no more turns by that
        x.clone() if isinstance(x, torch.Tensor) else torch.full((), x, device=device)
        for x in (lower, upper)
    ]
    _, carry = while_loop(
        lambda now: now[0] < ends[1], lambda now: (now[0] + 1, body(*now)), (ends[0], carry)
    )
    return carry


def scan(
    body: Callable[[C, Any], tuple[C, Any]], carry: C, xs: Any, length: int | None = None,
    reverse: bool = False,
) -> tuple[C, Any]:  # fmt: skip
    """Take a turn for each row of `xs`, and stack what the turns give.

        ys = []
        for x in xs:                  # rows of each tensor of a tree; reversed(xs) if `reverse`
            carry, y = body(carry, x)
            ys.append(y)              # ys[i] is of xs[i], `reverse` or not
        return carry, torch.stack(ys)

    Args:
        body: (carry, x) to the next carry, of equal structure, shapes and dtypes, and y, a tree of
            tensors.
        carry: a tree of tensors, or None.
        xs: a tree of tensors with one first dim, or None.
        length: the number of turns, where xs is None.
        reverse: begin with the last row.

    Returns:
        the last carry, and the tree of y with a first dim of `length` before each of its shapes.

    Raises:
        TreeError: a carry or a y that comes back otherwise, with its path, or on several devices;
            xs of several lengths.
        RowsError: in a trace, xs of T or R rows: a key has more of them than its batch.
        MutationError, RandomError, OperatorError, AliasError: in a trace, what a turn may not do.
    """
    check_functions("fg.scan(body, carry, xs)", "carry, x", body=body)
    if not isinstance(reverse, bool):
        raise TreeError(f"{user_line()}: fg.scan: reverse={reverse!r}, expected True or False")
    return _scan("fg.scan", body, carry, xs, length, reverse)


def _scan(
    fn: str, body: Callable[[C, Any], tuple[C, Any]], carry: C, xs: Any, length: int | None,
    reverse: bool,
) -> tuple[C, Any]:  # fmt: skip
    leaves, tree = flatten(carry, fn, "carry")
    rows, rows_tree = flatten(xs, fn, "xs")
    paths = (*trees.paths(tree, "carry"), *trees.paths(rows_tree, "xs"))
    named = list(zip(paths, (*leaves, *rows)))
    check_one_device(fn, named)
    for path, n in moving_first(rows, rows_tree):
        _refuse_rows(f"fg.scan: {path} has {n} rows")
    turns = leading(rows, rows_tree, length)
    mode = _trace()
    ys: list[Any] = []  # what the first turn gave: its tensors and their structure

    def turn(flat: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        now, x = flat[: len(leaves)], flat[len(leaves) :]
        pair = body(trees.unflatten(tree, list(now)), trees.unflatten(rows_tree, list(x)))
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise TreeError(
                f"{user_line()}: {fn}: body gives {type(pair).__name__}, expected (carry, y)"
            )
        new = check_alike(fn, "body gives", (leaves, tree), pair[0], "carry")
        if not ys:
            ys.append(flatten(pair[1], fn, "y"))
            found = zip(trees.paths(ys[0][1], "y"), ys[0][0])
            check_one_device(fn, [*named[:1], *found])
            return new + list(ys[0][0])
        return new + check_alike(fn, "body gives", ys[0], pair[1], "y")

    if mode is None:
        return _in_python(turn, leaves, tree, rows, turns, reverse, ys)
    with _refusing(mode):
        given = here([*leaves, *rows])
        found = flat_scan(
            mode, Called(fn, user_line(), paths), turn, given[: len(leaves)], given[len(leaves) :],
            turns, reverse,
        )  # fmt: skip
    last, stacked = found[: len(leaves)], found[len(leaves) :]
    return trees.unflatten(tree, last), trees.unflatten(ys[0][1], stacked)


def _in_python(
    turn: Any, leaves: Sequence[torch.Tensor], tree: Any, rows: Sequence[torch.Tensor],
    turns: int, reverse: bool, ys: list[Any],
) -> Any:  # fmt: skip
    now: Sequence[torch.Tensor] = leaves
    given: list[Sequence[torch.Tensor]] = []
    for i in range(turns - 1, -1, -1) if reverse else range(turns):
        news = turn([*now, *[x[i].contiguous() for x in rows]])  # as in a graph
        now = news[: len(leaves)]
        given.append(news[len(leaves) :])
    if turns == 0:  # of no row there is nothing to stack, but in which shapes?
        with Trial():
            shown = turn([*leaves, *[x.new_zeros(x.shape[1:]) for x in rows]])[len(leaves) :]
        stacked = [y.new_empty((0, *y.shape)) for y in shown]
    else:
        stacked = [torch.stack(list(y)) for y in zip(*(given[::-1] if reverse else given))]
    return trees.unflatten(tree, list(now)), trees.unflatten(ys[0][1], stacked)


def cond(pred: bool | torch.Tensor, a: Callable[..., C], b: Callable[..., C], *args: Any) -> C:
    """What one of two functions gives.

        return a(*args) if pred else b(*args)

    In a graph it is two IF nodes: one of the functions runs. To pick row by row, `torch.where`.

    Args:
        pred: bool (), a tensor; a bool of Python chooses now, and forever where it is traced.
        a, b: give trees of tensors of equal structure, shapes and dtypes. Both may close over
            tensors.
        args: what both are given.

    Raises:
        TreeError: functions that give different things, with the path, or a predicate that is not
            bool (), or on another device than what they give.
        MutationError, RandomError, OperatorError, AliasError: in a trace, what they may not do.
    """
    fn = "fg.cond"
    takes = ", ".join(f"args[{i}]" for i in range(len(args)))
    check_functions("fg.cond(pred, a, b, *args)", takes, a=a, b=b)
    if isinstance(pred, torch.SymBool):
        _refuse_rows(f"fg.cond: pred is {pred}")
    if isinstance(pred, bool):
        return a(*args) if pred else b(*args)
    check_pred(fn, "pred is", pred)
    mode = _trace()
    if mode is None:
        return trees.map_leaves(_dense, a(*args) if bool(pred) else b(*args))
    first: list[Any] = []  # what `a` gave: its tensors and their structure

    def of_a(_: Any) -> Sequence[torch.Tensor]:
        first[:] = flatten(a(*args), fn, "result")
        paths = trees.paths(first[1], "result")
        check_one_device(fn, [("pred", pred), *zip(paths, first[0])])
        return first[0]  # type: ignore[no-any-return]

    def of_b(_: Any) -> Sequence[torch.Tensor]:
        return check_alike(fn, "b gives", (first[0], first[1]), b(*args), "result")

    with _refusing(mode):
        called = Called(fn, user_line(), ("pred",))
        results = flat_cond(mode, called, here([pred])[0], of_a, of_b)
    return trees.unflatten(first[1], results)  # type: ignore[no-any-return]


def _dense(x: Any) -> Any:
    """A result as a graph has it, whichever function it came from."""
    return x.contiguous() if isinstance(x, torch.Tensor) else x


def _trace() -> PurityMode | None:
    return None if torch.compiler.is_compiling() else tracing_mode()


def _refuse_rows(what: str) -> None:
    """Raise for turns that are as many as a key's rows."""
    error = RowsError(
        f"{user_line()}: {what}, which in a key is the padded number: padding would take turns "
        "too. Take as many turns as a number of the model says; or compute all rows at once"
    )
    mode = _trace()
    if mode is not None:
        mode.refuse(error)
    raise error


@contextlib.contextmanager
def _refusing(mode: PurityMode) -> Iterator[None]:
    """Meanwhile what is raised of ours is a refusal of the trace, whatever becomes of it."""
    try:
        yield
    except FnGraphError as error:
        if not any(error is known for known in mode.refuse.errors):
            mode.refuse(error)
        raise
