"""A scatter whose memory is overwritten later, while what it made is kept, is as in bare `forward`.

Inductor reads the result after the memory that it put it into has been overwritten; so does
`torch.compile` alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg

T, E = 3, 4
Scatter = Callable[[Tensor, Tensor, Tensor], Tensor]
SCATTERS: dict[str, Scatter] = {
    "index_add": lambda a, i, v: a.index_add(0, i, v),
    "index_put": lambda a, i, v: a.index_put((i,), v),
    "index_copy": lambda a, i, v: a.index_copy(0, i, v),
    "index_fill": lambda a, i, v: a.index_fill(0, i, 3.0),
    "a copy's": lambda a, i, v: a.clone().index_put_((i,), v),
    "diagonal": lambda a, i, v: torch.diagonal_scatter(a, v[0]),
    "a row": lambda a, i, v: torch.select_scatter(a, v[0], 0, 1),
    "rows": lambda a, i, v: torch.slice_scatter(a, v[:2], 0, 1, 3),
    "scatter": lambda a, i, v: a.scatter(0, i[:, None].expand(-1, E), v),
}


@fg.struct
class Batch:
    x: Tensor = fg.buffer("T 4", "float32")
    ids: Tensor = fg.buffer("3", "int64")
    v: Tensor = fg.buffer("3 4", "float32")
    spec: fg.BatchSpec = fg.host()


def swapped(scatter: Scatter) -> Callable[..., Any]:
    """The result becomes the other's."""

    def forward(state: Any, batch: Batch) -> Any:
        made = scatter(state["a"], batch.ids, batch.v)
        state["a"].copy_(state["b"] * 2)
        state["b"].copy_(made)
        return batch.x + 1, state

    return forward


def returned(scatter: Scatter) -> Callable[..., Any]:
    def forward(state: Any, batch: Batch) -> Any:
        made = scatter(state["a"], batch.ids, batch.v)
        state["a"].copy_(state["b"] * 2)
        return made.t(), state

    return forward


def in_place(scatter: Scatter) -> Callable[..., Any]:
    """Written where it lies, kept elsewhere, and overwritten."""

    def forward(state: Any, batch: Batch) -> Any:
        state["a"].index_put_((batch.ids,), batch.v)
        state["b"].copy_(state["a"])
        state["a"].fill_(2.0)
        return batch.x + 1, state

    return forward


def kept(scatter: Scatter) -> Callable[..., Any]:
    """Nothing overwrites it: a cache."""

    def forward(state: Any, batch: Batch) -> Any:
        state["a"].index_put_((batch.ids,), batch.v)
        return state["a"].sum(1) + state["b"].sum(), state

    return forward


def run(forward: Callable[..., Any], modes: str, level: str) -> tuple[Any, Any, str]:
    """What three steps give, and the state behind them; and what is said of its pieces."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    state = {"a": draw(8, E), "b": draw(8, E)}
    batches = [
        Batch(
            draw(T, E), torch.randperm(8, generator=generator)[:3], draw(3, E), fg.BatchSpec(T, T)
        )
        for _ in range(3)
    ]
    if modes == "bare":
        outs = []
        for batch in batches:
            out, state = forward(state, batch)
            outs.append(out.clone())
        return outs, state, ""
    fast = fg.graphify(
        forward, modes=modes, compile=level, donate="state", stage="batch", sizes=(T,),
        limits=fg.Limits(T, T),
    )  # fmt: skip
    lowered = fast.trace(state, batch=batches[0]).split().lower()
    step = lowered.compile().capture(state)
    outs = []
    for batch in batches:
        out, state = step(state, batch)
        outs.append(out.clone())
    return outs, state, "\n".join(lowered.notes)


@pytest.mark.sampled("index_add-swapped", "index_put-returned", "in_place", "kept")
@pytest.mark.parametrize("modes", ["FULL", "NONE"])
@pytest.mark.parametrize(
    ("name", "program"),
    [(name, program) for name in SCATTERS for program in (swapped, returned)]
    + [("index_put", in_place), ("index_put", kept)],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_what_a_scatter_made_is_kept(name, program, modes):
    forward = program(SCATTERS[name])
    want, want_state, _ = run(forward, "bare", "none")
    got, state, told = run(forward, modes, "pieces")
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(state, want_state)
    assert ("overwritten later" not in told) == (program is kept), told
