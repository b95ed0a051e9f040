"""Run a function over donated state in every mode, and see values and addresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import toys

import fngraph as fg

MODES = ("NONE", "PIECEWISE", "FULL")
Forward = Callable[[Any, Any], tuple[Any, Any]]  # (state, batch) to (outputs, new state)


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
