"""An op that nobody reads and that raises does so in every mode, as in bare `forward`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import toys

import fngraph as fg

FAR = 10**6
Dead = Callable[[Any, Any, Any], Any]
"""Of weights (11, 8), an index (8,) that is 0 or, in a bad call, far out, and a number (8,) that is
1, then 0."""


@torch.library.custom_op("fngraph_tests::must_be_small", mutates_args=())
def must_be_small(x: torch.Tensor) -> torch.Tensor:
    if bool((x > 100).any()):
        raise ValueError("large")
    return x.clone()


@must_be_small.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def in_a_loop(w: Any, i: Any, n: Any) -> Any:
    return fg.fori_loop(0, 2, lambda _, c: c + w.index_select(0, i).sum(), torch.zeros(()))


DEAD: dict[str, Dead] = {
    "w[i]": lambda w, i, n: w[i],
    "w[i], and what is made of it": lambda w, i, n: torch.where(n > 0, w[i].sum(), 0.0),
    "index_select": lambda w, i, n: w.index_select(0, i),
    "embedding": lambda w, i, n: F.embedding(i, w),
    "gather": lambda w, i, n: w.gather(0, i[None]),
    "scatter": lambda w, i, n: w.scatter(0, i[None], 1.0),
    "take": lambda w, i, n: w.take(i),
    "index_put": lambda w, i, n: w.index_put((i,), w[0]),
    "one of several results": lambda w, i, n: F.cross_entropy(w.T @ w, i),
    "integers by zero": lambda w, i, n: i // n,
    "a remainder": lambda w, i, n: i % n,
    "rounded": lambda w, i, n: torch.div(i, n, rounding_mode="trunc"),
    "no chance": lambda w, i, n: F.binary_cross_entropy(i.float(), w[0] * 0),
    "svd": lambda w, i, n: torch.linalg.svdvals(w / n * n),
    "an op of one's own": lambda w, i, n: must_be_small(i),
    "in a loop": in_a_loop,
}


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("case", DEAD)
def test_what_nobody_reads_raises_all_the_same(case: str, modes: str):
    dead = DEAD[case]

    def forward(p: Any, s: Any, b: Any) -> Any:
        i = p["bad"] * FAR + torch.zeros(8, dtype=torch.int64)
        dead(p["w"], i, 1 - p["bad"].expand(8))
        return p["w"][b.token_ids] * 1, {"n": s["n"] + 1}

    params = {"w": torch.rand(toys.V, 8) + 1, "bad": torch.zeros((), dtype=torch.int64)}
    state, batch = {"n": torch.zeros(1)}, toys.batch(2, 1)
    fast = fg.graphify(
        forward, modes=modes, donate="s", stage="b", limits=toys.LIMITS, sizes=(8,), recorder="tape"
    )
    toys.assert_trees(fast(params, state, batch)[0], params["w"][batch.token_ids])
    params["bad"].fill_(1)
    with pytest.raises(Exception) as want:
        forward(params, {"n": torch.zeros(1)}, batch)
    with pytest.raises(type(want.value)):
        fast(params, state, batch)


def test_what_cannot_raise_is_left_out():
    def forward(p: Any, s: Any, b: Any) -> Any:
        x = p["w"][b.token_ids]
        (x * 2).softmax(-1) @ p["w"].T
        return x * 1, s

    fast = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS)
    traced = fast.trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
    assert "mm" not in traced.as_text() and "softmax" not in traced.as_text()


def test_a_pass_takes_out_what_it_replaces_and_no_more():
    def forward(p: Any, s: Any, b: Any) -> Any:
        p["w"].index_select(0, p["i"])
        return p["w"][b.token_ids] * torch.tensor([2.0]), s

    params = {**toys.tally_params(), "i": torch.tensor([FAR])}
    fast = fg.graphify(forward, donate="s", stage="b", limits=toys.LIMITS, passes="all")
    with pytest.raises(IndexError):
        fast(params, toys.tally_state(), toys.batch(2))
