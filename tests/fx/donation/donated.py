"""Run a function over donated state in every mode, and see values and addresses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import toys

import fngraph as fg

MODES = ("NONE", "PIECEWISE", "FULL")
Forward = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) to (outputs, new state)


def total(b: Any) -> torch.Tensor:
    """A number that depends on the batch's real tokens alone."""
    return torch.where(b.slot_mapping >= 0, b.token_ids, 0).sum()


def case(
    fn: Any, state: dict[str, Any], in_place: str, copied: str
) -> tuple[Forward, dict[str, str]]:
    """`fn(s, t)` over state and batch, and how each leaf is updated; those not named: unchanged.

    `s` has the leaves and the batch as attributes, `t` is the batch's total. What comes back is
    new values of leaves, or (outputs, new values); where there are no outputs, `t` is one.
    """

    def forward(s: Any, b: Any) -> tuple[Any, Any]:
        t = total(b)
        got = fn(SimpleNamespace(**s, batch=b), t)
        out, new = got if isinstance(got, tuple) else (t, got)
        return out, {**s, **new}

    named = {"in place": in_place.split(), "copied": copied.split()}
    of = {leaf: how for how, leaves in named.items() for leaf in leaves}
    return forward, {leaf: of.get(leaf, "unchanged") for leaf in state}


def graphified(fn: Forward, modes: str = "NONE", **options: Any) -> Any:
    """`fn` as `forward(p, s, b)`, over the toys' limits, with `s` donated."""
    options = {"donate": "s", **options}
    return fg.graphify(
        lambda p, s, b: fn(s, b), modes=modes, stage="b", limits=toys.LIMITS, sizes=toys.SIZES,
        **options,
    )  # fmt: skip


def traced(fn: Forward, state: Any, **options: Any) -> Any:
    """The trace of `fn`."""
    return graphified(fn, **options).trace({}, state, batch=toys.batch(2))


def how(fn: Forward, state: Any, **options: Any) -> dict[str, str]:
    """Path below the state to how each leaf is updated."""
    rows = traced(fn, state, **options).donation.rows
    return {row.path.removeprefix("s").strip("[]'\""): row.how for row in rows}


def check(fn: Forward, state: Any, modes: str, batches: Any = None, **options: Any) -> None:
    """See that outputs and state are those of the bare function, and that no buffer moves."""
    fast, state = graphified(fn, modes, **options), toys.clone(state)
    addresses = [x.data_ptr() for x in toys.leaves(state)]
    buffers = {x.untyped_storage().data_ptr() for x in toys.leaves(state) if x.numel()}
    for batch in batches or (toys.batch(3, 2), toys.decode(2, 0), toys.batch(7, seed=1)):
        want, after = toys.bare(lambda p, s, b: fn(s, b), {}, state, batch)
        got, back = fast({}, state, batch)
        assert back is state
        toys.assert_trees(got, want)
        toys.assert_trees(state, after)
        assert [x.data_ptr() for x in toys.leaves(state)] == addresses
        spans = {x.untyped_storage().data_ptr() for x in toys.leaves(got) if x.numel()}
        assert not spans & buffers, "an output is a donated buffer itself"
