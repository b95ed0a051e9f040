"""Gradients of loops, in a trace: each loop is a function with a rule, made of loops again.

A scan goes back over its turns, the last one first. What it needs of a turn is the carry that it
began with, which the way there stacks; the turn itself is run again (as activation checkpointing
does), and `torch.func.vjp` says what becomes of gradients. A choice takes the gradient of the
function that it chose. A `while_loop` takes nobody knows how many turns: it has no gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch.func import vjp

from fngraph.core.where import user_line
from fngraph.errors import TransformError
from fngraph.fx.loops.bodies import left_by, own_of
from fngraph.fx.loops.closures import Flat, closed_over
from fngraph.fx.tracing.purity import PurityMode
from fngraph.torch_facts.names import alive, are_transforms_active, unwrapped
from fngraph.torch_facts.tracing import in_forward_mode, tracked

Tensors = Sequence[torch.Tensor]
Emit = Callable[..., list[torch.Tensor]]


def needs_rule(mode: PurityMode, called: str) -> bool:
    """Whether a gradient or a transform may go through what is called now.

    Raises:
        TransformError: a forward-mode derivative may.
    """
    if in_forward_mode():
        raise TransformError(
            f"{user_line()}: a forward-mode derivative (jvp) is taken around {called}, which in a "
            "trace has a rule for gradients alone: torch.func.grad, vjp. Write the loop in Python"
        )
    if are_transforms_active():
        return True
    return torch.is_grad_enabled() and any(x.requires_grad for x in tracked(mode.tracer))


def used_by(
    mode: PurityMode, *calls: tuple[Flat, Tensors]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What functions close over, and what stands for it now. Each is run for that, and leaves
    nothing in the graph.

    Args:
        calls: functions, with tensors like those that they take.
    """
    found = [pair for fn, given in calls for pair in _used_by(mode, fn, given)]
    pairs = list({id(old): (old, now) for old, now in found}.values())
    return [old for old, _ in pairs], [now for _, now in pairs]


def _used_by(mode: PurityMode, fn: Flat, given: Tensors) -> list[tuple[torch.Tensor, torch.Tensor]]:
    known = {id(x) for x in tracked(mode.tracer)}
    with left_by(mode) as left:
        found = closed_over(fn, [torch.empty_like(x) for x in given], known)
    for node in reversed(own_of(left)):
        mode.tracer.graph.erase_node(node)
    return found


def _is_smooth(x: torch.Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


@dataclasses.dataclass(frozen=True, eq=False)
class GradientRule:
    """A loop as a function of all that it reads.

    Attributes:
        called: "fg.scan".
        run: the loop, of what its functions close over and then of its own operands.
        back: gradients of these, of (operands, results, gradients of the results).
    """

    called: str
    run: Callable[[Tensors], list[torch.Tensor]]
    back: Callable[[Tensors, Tensors, Sequence[Any]], Sequence[Any]]


class _Loop(torch.autograd.Function):
    """A loop, with its rule as an argument."""

    @staticmethod
    def forward(rule: GradientRule, *operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = {id(unwrapped(x)) for x in operands}
        results = rule.run(operands)
        return tuple(x.view_as(x) if id(unwrapped(x)) in given else x for x in results)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        rule, *operands = inputs
        ctx.rule, ctx.many = rule, len(operands)
        ctx.save_for_backward(*operands, *output)
        ctx.mark_non_differentiable(*[x for x in output if not _is_smooth(x)])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        saved = ctx.saved_tensors
        operands, results = saved[: ctx.many], saved[ctx.many :]
        found = ctx.rule.back(operands, results, grads)
        return None, *[g if _is_smooth(x) else None for x, g in zip(operands, found, strict=True)]

    @staticmethod
    def vmap(info: Any, in_dims: Any, rule: GradientRule, *operands: Any) -> NoReturn:
        raise TransformError(
            f"{user_line()}: torch.vmap goes through {rule.called}, which has no rule for it in a "
            "trace. Give the loop the whole batch: a dim of the carry"
        )


def apply(rule: GradientRule, operands: Tensors) -> list[torch.Tensor]:
    """The loop's results, of which gradients can be taken."""
    return list(_Loop.apply(rule, *map(alive, operands)))


def no_rule(called: str) -> Callable[..., NoReturn]:
    """The rule of a loop without a gradient."""

    def back(*_: Any) -> NoReturn:
        raise TransformError(
            f"{user_line()}: a gradient goes through {called}, whose turns are not counted, so "
            "that they cannot be gone back over. Say how many there are at most: "
            "fg.fori_loop(0, n, ...) of ints, or fg.scan, with torch.where for those that are not "
            "wanted"
        )

    return back


class _NoGradient(torch.autograd.Function):
    """Values as they are, through which no gradient goes."""

    generate_vmap_rule = True

    @staticmethod
    def forward(called: str, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(x.view_as(x) for x in values)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.called = inputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> NoReturn:
        no_rule(ctx.called)()


def without_gradient(called: str, values: Tensors) -> Tensors:
    """What a loop outside of a trace gives; a gradient that reaches it is an error."""
    if are_transforms_active() or (
        torch.is_grad_enabled() and any(x.requires_grad for x in values)
    ):
        return _NoGradient.apply(called, *values)
    return values


def zeros_for(x: torch.Tensor, g: Any) -> torch.Tensor:
    """A gradient of `x` as a tensor."""
    return torch.zeros_like(x) if g is None else g


def pulled_back(
    fn: Flat, at: Tensors, grads: Tensors, results: Sequence[int]
) -> list[torch.Tensor]:
    """Gradients of the smooth ones of `at`, of gradients of some of the results of `fn`.

    Args:
        results: which results the gradients are of.
    """
    smooth = [i for i, x in enumerate(at) if _is_smooth(x)]

    def of_smooth(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(at)
        for i, value in zip(smooth, values):
            given[i] = value
        found = fn(given)
        return tuple(found[i] for i in results)

    # views: what a loop's function closes over must not be what it differentiates by
    _, pull, *_ = vjp(of_smooth, *[at[i].view_as(at[i]) for i in smooth])
    return list(pull(tuple(grads)))


def scan_rule(
    called: str, turn: Flat, scan: Emit, consts: int, carry: int, reverse: bool
) -> GradientRule:
    """The rule of a scan, whose results are the carry, what it stacks, and each turn's first carry.

    Args:
        turn: one, of what it closes over, the carry, and rows of xs.
        scan: `scan(turn, carry, xs, reverse, given)`: another scan, of functions that close over
            `given` alone.
        consts: how many tensors it closes over; carry: how many it carries.
    """

    def noting(fixed: Tensors) -> Flat:
        def run(given: Tensors) -> list[torch.Tensor]:
            return [*turn([*fixed, *given]), *(x.clone() for x in given[:carry])]

        return run

    def forth(operands: Tensors) -> list[torch.Tensor]:
        fixed, rest = operands[:consts], operands[consts:]
        return scan(noting(fixed), rest[:carry], rest[carry:], reverse, fixed)

    def back(operands: Tensors, results: Tensors, grads: Sequence[Any]) -> list[Any]:
        fixed, init, xs = operands[:consts], operands[consts:][:carry], operands[consts + carry :]
        firsts, stacked = results[len(results) - carry :], results[carry : len(results) - carry]
        smooth_y = [i for i, y in enumerate(stacked) if _is_smooth(y)]
        smooth_c = [i for i, c in enumerate(init) if _is_smooth(c)]
        smooth_k = [i for i, k in enumerate(fixed) if _is_smooth(k)]
        smooth_x = [i for i, x in enumerate(xs) if _is_smooth(x)]
        g_carry = [zeros_for(init[i], grads[i]) for i in smooth_c]
        g_ys = [zeros_for(stacked[i], grads[carry + i]) for i in smooth_y]
        g_first = [zeros_for(firsts[i], grads[len(results) - carry + i]) for i in smooth_c]
        asked = [*smooth_c, *(carry + i for i in smooth_y)]

        def one(given: Tensors) -> list[torch.Tensor]:
            g_now, g_fixed = given[: len(smooth_c)], given[len(smooth_c) :][: len(smooth_k)]
            rest = given[len(smooth_c) + len(smooth_k) :]
            now, x, g_y = rest[:carry], rest[carry:][: len(xs)], rest[carry + len(xs) :]
            g_y, g_f = g_y[: len(smooth_y)], g_y[len(smooth_y) :]
            found = pulled_back(turn, [*fixed, *now, *x], [*g_now, *g_y], asked)
            more, of_carry = found[: len(smooth_k)], found[len(smooth_k) :][: len(smooth_c)]
            of_x = found[len(smooth_k) + len(smooth_c) :]
            return [
                *(a + b for a, b in zip(of_carry, g_f)),
                *(a + b for a, b in zip(g_fixed, more)),
                *of_x,
            ]

        zeros = [torch.zeros_like(fixed[i]) for i in smooth_k]
        rows = [*firsts, *xs, *g_ys, *g_first]
        found = scan(one, [*g_carry, *zeros], rows, not reverse)
        all_of: list[Any] = [None] * len(operands)
        places = [
            *(consts + i for i in smooth_c), *smooth_k, *(consts + carry + i for i in smooth_x)
        ]  # fmt: skip
        for place, g in zip(places, found):
            all_of[place] = g
        return all_of

    return GradientRule(called, forth, back)


def cond_rule(called: str, branches: Sequence[Flat], cond: Emit) -> GradientRule:
    """The rule of a choice.

    Args:
        branches: each of what both close over.
        cond: `cond(pred, a, b, given)`: another choice, of functions of nothing, that close over
            `given` alone.
    """

    def forth(operands: Tensors) -> list[torch.Tensor]:
        pred, *rest = operands
        a, b = (lambda _, run=run: run(rest) for run in branches)
        return cond(pred, a, b, rest)

    def back(operands: Tensors, results: Tensors, grads: Sequence[Any]) -> list[Any]:
        pred, *rest = operands
        asked = [i for i, y in enumerate(results) if _is_smooth(y)]
        given = [zeros_for(results[i], grads[i]) for i in asked]
        a, b = (lambda _, run=run: pulled_back(run, rest, given, asked) for run in branches)
        found = iter(cond(pred, a, b))
        return [None, *(next(found) if _is_smooth(x) else None for x in rest)]

    return GradientRule(called, forth, back)
