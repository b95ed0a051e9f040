"""What a loop may not do is an error at trace, with the line, what was there, and the fix."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.errors import (
    AliasError,
    ClosureError,
    HostSyncError,
    MutationError,
    RandomError,
    TransformError,
    TreeError,
)

G = torch.Generator()
W = torch.ones(4)


def zero() -> Any:
    return torch.zeros(())


# each: of (w, state, x) with w, state["s"] and x of 4 floats; what it is refused for
def carry_of_another_dtype(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: {"h": [c["h"][0].half()]}, {"h": [x]})


def carry_of_another_shape(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: c[1].sum() > 0, lambda c: (c[0], c[1][:2]), (w, x))


def carry_of_another_structure(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, w: ([c[0]], None), [x, x], w)


def carry_of_a_number(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c, (x, 0.0))


def not_a_pair(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, w: c + w, zero(), x)


def a_predicate_of_rows(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: c > 0, lambda c: c - 1, x)


def a_predicate_of_a_number(w: Any, state: Any, x: Any) -> Any:
    return fg.cond(x.sum(), lambda: w, lambda: x)


def meta() -> Any:
    """A number on another device than x; to x of a GPU, one of the host is as strange."""
    return torch.zeros((), device="meta")


def a_count_elsewhere(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: c[1].sum() < 9, lambda c: (c[0] + 1, c[1] + 1), (meta(), x))


def a_predicate_elsewhere(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: meta() > 0, lambda c: c + 1, x)


def rows_elsewhere(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, n: (c + 1, None), x, meta().expand(3) + 1)


def stacked_elsewhere(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, n: (c + 1, {"y": meta() + 1}), x, w)


def chosen_elsewhere(w: Any, state: Any, x: Any) -> Any:
    return fg.cond(meta() > 0, lambda: [x + 1], lambda: [x * 2])


def branches_that_differ(w: Any, state: Any, x: Any) -> Any:
    return fg.cond(x.sum() > 0, lambda: {"y": x}, lambda: {"y": x.double()})


def lengths_that_differ(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, p: (c, None), zero(), (x, w[:3]))


def no_length(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, p: (c, None), zero(), None)


def writes_a_weight(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + w.add_(1), x * 1)


def writes_a_held_carry(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c.add_(1), w).sum()


def writes_a_carry_that_moves(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: (c[1], c[0].add_(1)), (x * 1, x * 2))[0]


def writes_a_carry_that_lies_apart(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c.add_(1), state["s"][::2])


def writes_a_row_of_xs(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, row: (c + row.mul_(2), None), zero(), x * 1)[0]


def cond_writes(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: state["s"].add_(1).sum() < 9, lambda c: c + 1, x * 1)


def carry_of_what_is_written(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + state["s"].add_(1), state["s"])


def carry_of_a_part_of_what_is_written(w: Any, state: Any, x: Any) -> Any:
    turn = lambda i, c: (c[0].add_(1), c[1] * 2)  # noqa: E731
    return fg.fori_loop(0, 3, turn, (state["s"], state["s"][:2]))[1]


def draws(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + torch.rand(4, generator=G), x)


def draws_from_nowhere(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + torch.rand(4), x)


def waits(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c * c.sum().item(), x)


def closes_over_a_global(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + W, x)


def carries_a_global(w: Any, state: Any, x: Any) -> Any:
    return fg.fori_loop(0, 3, lambda i, c: c + 1, W)


def a_value_of_a_turn(w: Any, state: Any, x: Any) -> Any:
    kept = []
    fg.fori_loop(0, 3, lambda i, c: (kept.append(c + 1), c)[1], x)
    return kept[0] + 1


def a_gradient_of_while(w: Any, state: Any, x: Any) -> Any:
    loss = lambda w: fg.while_loop(lambda c: c.sum() < 9, lambda c: c + w**2 + 1, x).sum()  # noqa: E731
    return torch.func.grad(loss)(w)


def a_tangent(w: Any, state: Any, x: Any) -> Any:
    return torch.func.jvp(lambda x: fg.fori_loop(0, 3, lambda i, c: c * w, x), (x,), (w,))


def mapped(w: Any, state: Any, x: Any) -> Any:
    return torch.func.vmap(lambda x: fg.fori_loop(0, 3, lambda i, c: c * 2, x))(x)


def a_gradient_of_what_is_written(w: Any, state: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    y = fg.fori_loop(0, 3, lambda i, c: c + state["s"].add_(1), x)
    return torch.autograd.grad(y.sum(), x)


def a_gradient_within_and_around(w: Any, state: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        inner = lambda c, x: (c + torch.func.grad(lambda w: (w * x).sum())(w), None)  # noqa: E731
        return fg.scan(inner, w * 0, x)[0].sum()

    return torch.func.grad(loss)(w)


class Times(torch.autograd.Function):
    """x by what a function gives, which nobody sees."""

    @staticmethod
    def forward(x: Any, of: Any) -> Any:
        return x * of()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.of = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad * ctx.of(), None


def a_gradient_of_what_is_hidden(w: Any, state: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        twice = w * 2
        turn = lambda c, x: (Times.apply(c, lambda: twice) + x, None)  # noqa: E731
        return fg.scan(turn, w * 0, x)[0].sum()

    return torch.func.grad(loss)(w)


def writes_what_a_choice_gives(w: Any, state: Any, x: Any) -> Any:
    return fg.cond(x.sum() > 0, lambda: state["s"], lambda: x * 2).add_(1) * 1


def writes_a_weight_by_another_name(w: Any, state: Any, x: Any) -> Any:
    return fg.cond(x.sum() > 0, lambda: w, lambda: x * 2).add_(1)


def writes_what_a_loop_begins_with(w: Any, state: Any, x: Any) -> Any:
    return fg.while_loop(lambda c: c.sum() > 99, lambda c: c * 2, state["s"]).add_(1) * 1


def writes_what_was_swapped(w: Any, state: Any, x: Any) -> Any:
    y, z = x * 1, state["s"]
    (a, _), _ = fg.scan(lambda c, _: ((c[1], c[0]), None), (y, z), None, length=3)
    a.mul_(2)
    return y * 1


def writes_one_of_two_that_are_one(w: Any, state: Any, x: Any) -> Any:
    a, b = fg.fori_loop(0, 3, lambda i, c: (c[0] * w,) * 2, (x, x))
    a[:2].zero_()
    return b * 1


def writes_what_it_chose_from(w: Any, state: Any, x: Any) -> Any:
    y = fg.cond(x.sum() > 0, lambda: state["s"][:2], lambda: w[:2])
    state["s"].add_(1)
    return y * 1


def writes_in_a_later_loop(w: Any, state: Any, x: Any) -> Any:
    y = fg.cond(x.sum() > 0, lambda: state["s"], lambda: x * 2)
    return fg.fori_loop(0, 2, lambda i, c: c + y.add_(1), x)


def writes_its_carry_by_another_name(w: Any, state: Any, x: Any) -> Any:
    turn = lambda i, c: c + fg.cond(x.sum() > 0, lambda: c, lambda: c * 2).add_(1)  # noqa: E731
    return fg.fori_loop(0, 2, turn, x)


def writes_a_carry_that_is_a_row_too(w: Any, state: Any, x: Any) -> Any:
    return fg.scan(lambda c, w: (c.add_(w), c[:2]), state["s"], w)[1]


def writes_a_tensor_that_is_a_row_too(w: Any, state: Any, x: Any) -> Any:
    def turn(c: Any, row: Any) -> Any:
        fg.cond(row > 0, lambda: state["s"].add_(row), lambda: w * 2)
        return c, state["s"]

    return fg.scan(turn, zero(), w)[1]


def writes_a_carry_that_another_is_a_part_of(w: Any, state: Any, x: Any) -> Any:
    def turn(i: Any, carry: Any) -> Any:
        kept, before, total = carry
        kept.add_(1)
        return kept, kept[:2], total + before

    return fg.fori_loop(0, 3, turn, (state["s"], x[:2], x[:2] * 0))[2]


def writes_a_carry_that_was_chosen(w: Any, state: Any, x: Any) -> Any:
    def turn(c: Any, row: Any) -> Any:
        chosen = fg.cond(row > 0, lambda: c, lambda: c * 2)
        c.add_(1)
        return c, chosen.sum()

    return fg.scan(turn, state["s"], w)[1]


MISTAKES = [
    (carry_of_another_dtype, TreeError,
     r"fg.fori_loop: body gives .*\n  carry\['h'\]\[0\]: got float16 \(4,\) .*expected float32"),
    (carry_of_another_shape, TreeError,
     r"fg.while_loop: body gives .*\n  carry\[1\]: got float32 \(2,\) .*, expected float32 \(4,\)"),
    (carry_of_another_structure, TreeError,
     r"fg.scan: body gives another structure:\n  carry\[1\]: missing"),
    (carry_of_a_number, TreeError, r"carry\[1\] of fg.fori_loop is 0.0 \(float\).*torch.tensor"),
    (not_a_pair, TreeError, r"fg.scan: body gives .*Tensor, expected \(carry, y\)"),
    (a_predicate_of_rows, TreeError,
     r"fg.while_loop: cond gives bool \(4,\) on cpu, expected bool \(\).*torch.where"),
    (a_predicate_of_a_number, TreeError, r"fg.cond: pred is float32 \(\) on cpu, expected bool"),
    (a_count_elsewhere, TreeError,
     r"fg.while_loop: carry\[1\] is .* on cpu, and carry\[0\] .*: make carry\[1\] there"),
    (a_predicate_elsewhere, TreeError, r"carry is float32 \(4,\) on cpu, and what cond gives bool"),
    (rows_elsewhere, TreeError, r"fg.scan: carry is .* on cpu, and xs float32 \(3,\) on meta"),
    (stacked_elsewhere, TreeError, r"fg.scan: carry is .* on cpu, and y\['y'\] float32 \(\) on m"),
    (chosen_elsewhere, TreeError, r"fg.cond: result\[0\] is .* on cpu, and pred bool \(\) on meta"),
    (branches_that_differ, TreeError, r"b gives .*\n  result\['y'\]: got float64 \(4,\)"),
    (lengths_that_differ, TreeError, r"fg.scan: how many turns\? xs\[0\]: 4, xs\[1\]: 3"),
    (no_length, TreeError, r"fg.scan: how many turns\? neither xs nor length"),
    (writes_a_weight, MutationError, r"forward writes into w .*held, not donated"),
    (writes_a_held_carry, MutationError, r"forward writes into w \(aten.add_.*held, not donated"),
    (writes_a_carry_that_lies_apart, MutationError,
     r"writes into carry \(aten.add_.Tensor\), which is another turn's too"),
    (writes_a_carry_that_moves, MutationError,
     r"a function of fg.fori_loop writes into carry\[0\] .*Return a new value"),
    (writes_a_row_of_xs, MutationError, r"a function of fg.scan writes into xs .*Return a new"),
    (cond_writes, MutationError, r"cond of fg.while_loop writes .*write in the body"),
    (carry_of_what_is_written, AliasError, r"carry of fg.fori_loop shares memory .*clone\(\)"),
    (carry_of_a_part_of_what_is_written, AliasError,
     r"carry\[1\] of fg.fori_loop shares memory .*: carry\[1\].clone\(\)"),
    (writes_what_a_choice_gives, AliasError, r"forward writes .*may be one with another"),
    (writes_a_weight_by_another_name, AliasError, r"forward writes .*later: the caller's own"),
    (writes_what_a_loop_begins_with, AliasError, r"forward writes .*may be one with another"),
    (writes_what_was_swapped, AliasError, r"forward writes .*may be one with another"),
    (writes_one_of_two_that_are_one, AliasError, r"forward writes .*may be one with another"),
    (writes_what_it_chose_from, AliasError, r"forward writes .*may be one with another"),
    (writes_in_a_later_loop, AliasError, r"forward writes .*may be one with another"),
    (writes_its_carry_by_another_name, AliasError, r"forward writes .*may be one with another"),
    (writes_a_carry_that_is_a_row_too, AliasError, r"a turn of fg.scan .* as its row too.*clone"),
    (writes_a_tensor_that_is_a_row_too, AliasError, r"a turn of fg.scan .* as its row too.*clone"),
    (writes_a_carry_that_another_is_a_part_of, AliasError,
     r"forward writes .*what fg.fori_loop .*may be one with another"),
    (writes_a_carry_that_was_chosen, AliasError,
     r"forward writes .*what fg.cond .*may be one with another"),
    (draws, RandomError, r"a function of fg.fori_loop draws random numbers .*scan over them"),
    (draws_from_nowhere, RandomError, r"not registered"),
    (waits, HostSyncError, r"needs a tensor's value on the host.* fg.cond and fg.while_loop"),
    (closes_over_a_global, ClosureError, r"forward reads the global 'W'"),
    (carries_a_global, ClosureError, r"forward reads .*\(4,\) torch.float32"),
    (a_value_of_a_turn, fg.errors.PurityError, r"a function of a loop has made"),
    (a_gradient_of_while, TransformError,
     r"a gradient goes through fg.while_loop, whose turns are not counted.*fg.fori_loop\(0, n"),
    (a_tangent, TransformError, r"forward-mode derivative \(jvp\) is taken around fg.fori_loop"),
    (mapped, TransformError, r"torch.vmap goes through fg.fori_loop"),
    (a_gradient_of_what_is_written, MutationError, r"writes in place .*a gradient goes through"),
    (a_gradient_of_what_is_hidden, TransformError, r"closes over a tensor .*part of the carry"),
    (a_gradient_within_and_around, TransformError, r"takes a gradient of a tensor that it closes"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("forward", "kind", "text"), MISTAKES, ids=[f.__name__ for f, *_ in MISTAKES]
)
def test_a_mistake_is_refused_with_its_line(forward: Any, kind: Any, text: str):
    def whole(w: Any, state: Any, x: Any) -> Any:
        return forward(w, state, x[0]), state

    fast = fg.graphify(whole, donate="state", stage="x", recorder="tape", generators=(G,))
    with pytest.raises(kind) as raised:
        fast(torch.ones(4), {"s": torch.ones(4)}, (torch.ones(4),))
    assert re.search(text, str(raised.value), re.DOTALL), raised.value
    first = forward.__code__.co_firstlineno
    line = re.search(r"test_loop_mistakes.py:(\d+)", str(raised.value))
    assert line and first <= int(line[1]) <= first + 7, raised.value
