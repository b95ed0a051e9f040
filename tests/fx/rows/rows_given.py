"""What functions over rows are given: batches whose padding is seen, masks, owners, a step."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import toys
from torch import Tensor

import fngraph as fg

INF, NAN = float("inf"), float("nan")
MODES = ("FULL", "PIECEWISE", "FULL_AND_PIECEWISE", "NONE")


def params() -> dict[str, Tensor]:
    """The toys' weights, loud in row 0: the one that padding gathers, and no true token."""
    w_VE = toys.tally_params()["w"].clone()
    w_VE[0] = torch.linspace(40, -50, toys.E)
    return {"w": w_VE}


def batches() -> list[toys.Batch]:
    """With padding in tokens, requests or both, mixed and uniform; token 0 occurs in none."""
    found = [
        toys.batch(3, 2), toys.batch(1), toys.batch(4, 1, 4, seed=3), toys.decode(2, 0),
        toys.decode(4, 0), toys.batch(5, 6, 1, 1, seed=2),
    ]  # fmt: skip
    return [dataclasses.replace(b, token_ids=b.token_ids.clamp(min=1)) for b in found]


def graphified(fn: Any, **options: Any) -> Any:
    """`fn` over the toys, its state donated, in keys of 8 and 16 tokens."""
    return fg.graphify(
        fn, donate=1, stage=2, limits=toys.LIMITS, sizes=(8, 16), recorder="tape",
        allow_copies=True, **options,
    )  # fmt: skip


def trace(fn: Any) -> Any:
    """The trace of `fn`."""
    return graphified(fn).trace(params(), toys.tally_state(), batch=toys.batch(3, 2))


def check(fn: Any) -> None:
    """See that a function's outputs and state are the bare ones, in every mode."""
    traced, p = trace(fn), params()
    for mode in MODES:
        options = dataclasses.replace(traced.options, modes=fg.Mode.parse(mode))
        split = dataclasses.replace(traced, options=options).split()
        state = toys.tally_state()
        step = split.lower().compile().capture(p, state, recorder="tape", lazy=True)
        for b in batches():
            want, after = toys.bare(fn, p, state, b)
            got, _ = step(state, b)
            toys.assert_trees(got, want, atol=1e-5, rtol=1e-5)
            toys.assert_trees(state, after, atol=1e-5, rtol=1e-5)


def rows(p: Any, b: Any) -> Tensor:
    """(T, E), one row a token."""
    return p["w"][b.token_ids]


def real(b: Any) -> Tensor:
    """(T,) bool, false for padding."""
    return b.slot_mapping >= 0


def T_of(b: Any) -> Any:
    """The number of tokens, of a key in a trace."""
    return b.token_ids.shape[0]


def masked(p: Any, b: Any) -> Tensor:
    """(T, E), padding rows zero."""
    return torch.where(real(b)[:, None], rows(p, b), 0)


def owner(b: Any) -> Tensor:
    """(T,) the request of each token; of a padding token a padding request, or one too many."""
    at = torch.arange(T_of(b), device=b.token_ids.device)
    return torch.searchsorted(b.query_start_loc[1:].long(), at, right=True)


def heads(x: Tensor) -> Tensor:
    """(1, 2, T, E/2)"""
    return x.unflatten(-1, (2, -1)).transpose(0, 1)[None]


def output(value: Any) -> Any:
    """`forward` that returns `value(x, p, b)`, and the state as it is."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        return value(rows(p, b), p, b), s

    return forward


def update(value: Any) -> Any:
    """`forward` whose new state is `value(p, s, b)`."""

    def forward(p: Any, s: Any, b: Any) -> Any:
        return rows(p, b) * 1, value(p, s, b)

    return forward
