"""Loops over flat tensors in a trace: a node, or a function with a rule where a gradient goes."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fngraph.fx.loops.bodies import node_of
from fngraph.fx.loops.closures import Flat, with_others
from fngraph.fx.loops.emission import Called, emit_cond, emit_scan, emit_while
from fngraph.fx.loops.gradients import (
    GradientRule,
    Tensors,
    apply,
    cond_rule,
    needs_rule,
    no_rule,
    scan_rule,
    used_by,
)
from fngraph.fx.tracing.purity import PurityMode
from fngraph.torch_facts.names import alive, unwrapped


def _given(mode: PurityMode, called: Called, values: Tensors) -> list[torch.Tensor]:
    """What a loop is given, which must be of this trace.

    Raises:
        ClosureError: a tensor that is not.
    """
    found = list(map(alive, values))
    for x in found:
        node_of(mode, unwrapped(x), called.line)
    return found


def flat_while(
    mode: PurityMode, called: Called, cond: Flat, body: Flat, carry: Tensors
) -> list[torch.Tensor]:
    """The last carry of a `while_loop`."""
    carry = _given(mode, called, carry)
    if not needs_rule(mode, called.name):
        return emit_while(mode, called, cond, body, carry)
    consts, now = used_by(mode, (cond, carry), (body, carry))

    def forth(operands: Tensors) -> list[torch.Tensor]:
        fixed, rest = operands[: len(consts)], operands[len(consts) :]
        test, turn = (with_others(fn, consts, fixed) for fn in (cond, body))
        return flat_while(mode, called.of(fixed), test, turn, rest)

    return apply(GradientRule(called.name, forth, no_rule(called.name)), [*now, *carry])


def flat_scan(
    mode: PurityMode, called: Called, turn: Flat, carry: Tensors, xs: Tensors, turns: int,
    reverse: bool,
) -> list[torch.Tensor]:  # fmt: skip
    """The last carry of a `scan`, and what it stacks."""
    carry, xs = _given(mode, called, carry), _given(mode, called, xs)
    if not needs_rule(mode, called.name):
        return emit_scan(mode, called, turn, carry, xs, turns, reverse)
    rows = [x.new_empty(x.shape[1:]) for x in xs]
    consts, now = used_by(mode, (turn, [*carry, *rows]))

    def of_all(given: Tensors) -> Sequence[torch.Tensor]:
        return with_others(turn, consts, given[: len(consts)])(given[len(consts) :])

    def scan(
        fn: Flat, init: Tensors, rows: Tensors, back: bool, given: Tensors | None = None
    ) -> list[torch.Tensor]:
        return flat_scan(mode, called.of(given), fn, init, rows, turns, back)

    many = len(consts), len(carry)
    rule = scan_rule(called.name, of_all, scan, *many, reverse)
    found = apply(rule, [*now, *carry, *xs])
    return found[: len(found) - len(carry)]


def flat_cond(
    mode: PurityMode, called: Called, pred: torch.Tensor, a: Flat, b: Flat
) -> list[torch.Tensor]:
    """What a `cond` gives."""
    (pred,) = _given(mode, called, [pred])
    if not needs_rule(mode, called.name):
        return emit_cond(mode, called, pred, a, b)
    consts, now = used_by(mode, (a, ()), (b, ()))

    def of_all(fn: Flat) -> Flat:
        return lambda given: with_others(fn, consts, given)(())

    def cond(
        pred: torch.Tensor, a: Flat, b: Flat, given: Tensors | None = None
    ) -> list[torch.Tensor]:
        return flat_cond(mode, called.of(given), pred, a, b)

    return apply(cond_rule(called.name, [of_all(a), of_all(b)], cond), [pred, *now])
