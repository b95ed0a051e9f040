"""Sorted rows of experts, their gates and products: where they are one op each, and where not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys
from places import changed, forward_of
from test_graphify import Model, steps
from torch import Tensor
from torch.nn.functional import grouped_mm, silu

import fngraph as fg
from fngraph.models.families.experts import Experts, mix

pytestmark = pytest.mark.usefixtures("one_thread")
BF16 = torch.bfloat16
X, C, F = 3, 2, 16
OPS = [getattr(torch.ops.fngraph, name).default
       for name in ("group_rows", "grouped_gate", "grouped_linear")]  # fmt: skip


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(BF16)  # noqa: E731
    E = toys.E
    p = {"w": draw(toys.V, E), "in": draw(E, 16), "router": draw(E, X), "down": draw(X, 16, F)}
    return p | {"gate": draw(X, F, 16), "up": draw(X, F, 16), "wide": draw(X, F, 16).float()}


def expert(p: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows (T, 16), and the experts of each (T, C)."""
    return x @ p["in"], (x @ p["router"]).topk(C, -1).indices


def sort(expert_N: Tensor, **how: Any) -> tuple[Tensor, Tensor, Tensor]:
    values, order = expert_N.sort(stable=True, **how)
    ends = torch.searchsorted(values, torch.arange(X), right=True).to(torch.int32)
    return order, ends, order.argsort()


def product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return grouped_mm(x, weight.mT, offs=ends)


def gate(p: Any, rows: Tensor, ends: Tensor) -> Tensor:
    return silu(product(rows, p["gate"], ends)) * product(rows, p["up"], ends)


def family(p: Any, x: Tensor) -> Tensor:
    """What the families call."""
    rows, chosen = expert(p, x)
    share = chosen.to(torch.float32) / 4
    real = torch.ones_like(chosen[:, 0], dtype=torch.bool)
    return mix(Experts(p["gate"], p["up"], p["down"]), rows, chosen, share, real)


def sorted_by(**how: Any) -> Callable[[Any, Tensor], Any]:
    def body(p: Any, x: Tensor) -> Any:
        expert_N = expert(p, x)[1].flatten()
        order, ends, back = sort(expert_N, **how)
        return fg.trust_rows((expert_N[order] * 2 + 0 * ends[:1])[back].view(-1, C))

    return body


def sorted_as(dtype: torch.dtype, kept: bool = False) -> Callable[[Any, Tensor], Any]:
    def body(p: Any, x: Tensor) -> Any:
        expert_N = expert(p, x)[1].flatten().to(dtype)
        values, order = expert_N.sort(stable=True)
        numbers = torch.arange(X, dtype=dtype)
        ends = torch.searchsorted(values, numbers, right=True).to(torch.int32)
        made = expert_N[order] * 2 + 0 * ends[:1] + (values if kept else 0)
        return fg.trust_rows(made[order.argsort()].view(-1, C))

    return body


def gated_by(form: Callable[[Any, Tensor, Tensor, Tensor], Tensor]) -> Callable[[Any, Tensor], Any]:
    def body(p: Any, x: Tensor) -> Any:
        rows, chosen = expert(p, x)
        order, ends, back = sort(chosen.flatten())
        return fg.trust_rows(form(p, rows, order, ends)[back].view(-1, C, F).sum(1))

    return body


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], list[int]]] = {  # how many of each op
    "a family's experts": (family, [1, 1, 1]),
    "sorts alone": (sorted_by(), [1, 0, 0]),
    "a sort downwards": (sorted_by(descending=True), [0, 0, 0]),
    "a sort of int32": (sorted_as(torch.int32), [0, 0, 0]),
    "sorted numbers that others read": (sorted_as(torch.int64, kept=True), [0, 0, 0]),
    "a gate": (gated_by(lambda p, x, order, ends: gate(p, x[order // C], ends)), [1, 1, 0]),
    "a gate of rows that are there": (
        gated_by(lambda p, x, order, ends: gate(p, x[order // C].sin(), ends)), [1, 0, 2],
    ),
    "no gate": (
        gated_by(lambda p, x, order, ends: product(x[order // C], p["gate"], ends)), [1, 0, 1],
    ),
    "a product that others read": (
        gated_by(lambda p, x, order, ends: (lambda a: silu(a) * product(
            x[order // C], p["up"], ends) + a)(product(x[order // C], p["gate"], ends))), [1, 0, 2],
    ),
    "a weight that lies the other way": (
        gated_by(lambda p, x, order, ends: grouped_mm(
            x[order // C], p["gate"].mT.contiguous(), offs=ends)), [1, 0, 0],
    ),
    "rows that are written in between": (
        gated_by(lambda p, x, order, ends: (lambda a: silu(a) * product(
            changed(x, lambda x: x.add_(1))[order // C], p["up"], ends))(
                product(x[order // C], p["gate"], ends))), [1, 0, 2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_it_matches_there_and_only_there(case: str):
    body, want = CASES[case]
    toy = Model(forward_of(body), params(), {"calls": torch.zeros(1)})
    traced = toy.graphify(modes="FULL", passes=("experts",)).trace(toy.params, toy.state)
    ops = [n.target for n in traced.graph.gm.graph.nodes]
    assert [ops.count(op) for op in OPS] == want, traced.as_text()
    assert {one.one.name: one.matches for one in traced.passes} == {"experts": sum(want)}
    step = traced.split().lower().compile().capture(toy.params, toy.state, recorder="tape")
    for batch in steps():
        got, _ = step(toy.state, batch)
        bare, _ = toy.fn(toy.params, toy.state, batch)
        toys.assert_trees(got, bare, atol=0, rtol=0)
