"""A write that is planted anywhere in what a pass replaces: the pass must leave it alone there, or
its op must read what was read before.

A pass of our own comes first, and lets node b be preceded by a write into what node a gives. What
follows it must make the same numbers as it does alone. Every pair of nodes is tried in turn.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_experts_pass import X as EXPERTS, gate, product, sort
from torch import Tensor, fx
from torch.nn.functional import silu

import fngraph as fg
from fngraph.errors import FnGraphError
from fngraph.models.families.layers import rms_norm
from fngraph.models.families.rope import rotate, turn_by
from fngraph.torch_facts.memory import storage_key

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.filterwarnings("ignore")]
aten = torch.ops.aten
T, H, D, E, C = 3, 2, 4, 8, 2
PARTS = 10


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


PARAMS = {
    "g": drawn(E), "h": drawn(D), "angle": drawn(D // 2), "w": drawn(E, E), "v": drawn(4, E),
    "gate": drawn(EXPERTS, 16, 16).bfloat16(), "up": drawn(EXPERTS, 16, 16, seed=1).bfloat16(),
}  # fmt: skip


def turning(p: Any, x: Tensor) -> Any:
    angle = x[:, None, :1] * p["angle"]
    return turn_by(angle.cos(), angle.sin())


def roped(p: Any, x: Tensor) -> Any:
    by = turning(p, x)
    return rotate(x.unflatten(1, (H, D)), by)


def roped_norm(p: Any, x: Tensor) -> Any:
    return rotate(rms_norm(x.unflatten(1, (H, D)), p["h"], 1e-5), turning(p, x))


def pairs(p: Any, x: Tensor) -> Any:
    angle = x[:, None, :1] * p["angle"]
    cos, sin, q = angle.cos(), angle.sin(), x.unflatten(1, (H, D)) * 1
    a, b, rest = q.split([2, 2, 0], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


def halves(p: Any, x: Tensor) -> Any:
    angle = x[:, None, :1] * torch.cat([p["angle"], p["angle"]])
    cos, sin, q = angle.cos(), angle.sin(), x.unflatten(1, (H, D)) * 1
    turned = torch.cat([-q[..., D // 2 :], q[..., : D // 2]], dim=-1)
    return q * cos + turned * sin


def normed(p: Any, x: Tensor) -> Any:
    total = x + x.sin()
    return rms_norm(total, p["g"], 1e-5), total


def gated(p: Any, x: Tensor) -> Any:
    return silu(x @ p["w"].t()) * (x @ p["w"])


def layer(p: Any, x: Tensor) -> Any:
    """A norm, products side by side, a gate, and a sum."""
    y = rms_norm(x * 1, p["g"], 1e-5)
    q, k, v = y @ p["w"].t(), y @ p["v"].t(), y @ (p["v"] * 1).t()
    return x + silu(q) * q, k, v


def experts(p: Any, x: Tensor) -> Any:
    chosen = (x[:, :C] * 10).long().abs() % EXPERTS
    rows = x[:, :1].bfloat16() * p["gate"][0, :1]
    order, ends, back = sort(chosen.flatten() * 1)
    made = gate(p, rows[order // C], ends)
    return product(made, p["up"], ends)[back].view(-1, C, 16).sum(1)


def doubled(p: Any, x: Tensor) -> Any:
    """Views that are their base, copies, and what is made of literals."""
    y = (x * 2).view(T, E).clone()
    return y + torch.arange(E, device=x.device).to(y.dtype) * torch.full((), 2.0)


PROGRAMS: list[Callable[..., Any]] = [
    roped, roped_norm, pairs, halves, normed, gated, layer, experts, doubled
]  # fmt: skip


ENDS = (aten.arange.default, aten.searchsorted.Tensor)


def written(node: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """A write into a value. Where experts' rows end each must have an end, or numbers are nobody's;
    other whole numbers are places, of which there is a first."""
    value = node.meta["val"]
    if value.is_floating_point():
        return aten.mul_.Tensor, (node, 3.0)
    is_end = node.target in ENDS or value.dtype is torch.int32
    return aten.fill_.Scalar, (node, T * C if is_end else 0)


def planted(a: int, b: int) -> fg.passes.Pass:
    """A write into what the a-th node gives, before the b-th."""

    def plant(graph: fx.Graph) -> fx.Graph:
        nodes = list(graph.nodes)
        with graph.inserting_before(nodes[b]):
            graph.call_function(*written(nodes[a]))
        return graph

    return fg.passes.Pass("planted", plant, "1")


def places(forward: Callable[..., Any], x: Tensor) -> list[tuple[int, int]]:
    """Pairs of nodes between which a write may stand: of what is made in the graph."""
    nodes = list(traced(forward, x, ()).graph.gm.graph.nodes)
    inputs = {storage_key(node.meta["val"]) for node in nodes if node.op == "placeholder"}
    made = [
        i for i, node in enumerate(nodes)
        if node.op == "call_function" and isinstance(node.meta.get("val"), Tensor)
        and 0 not in node.meta["val"].stride() and storage_key(node.meta["val"]) not in inputs
    ]  # fmt: skip
    return [(a, b) for a in made for b in range(a + 1, len(nodes))]


def graphified(forward: Callable[..., Any], passes: Any) -> Any:
    return fg.graphify(forward, stage="x", modes="FULL", recorder="tape", passes=passes)


def traced(forward: Callable[..., Any], x: Tensor, passes: Any) -> Any:
    return graphified(forward, passes).trace(PARAMS, batch=x)


@pytest.mark.sampled("d-0", "norm-0", "pairs-0", "halves-0", "layer-0")
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("forward", PROGRAMS, ids=lambda f: f.__name__)
def test_a_write_anywhere_is_seen(forward: Callable[..., Any], part: int) -> None:
    x = drawn(T, E, seed=5)
    matched = sum(one.matches for one in traced(forward, x, "all").passes)
    assert matched, "no pass has anything to do here"
    wrong, tried = [], 0
    for a, b in places(forward, x)[part::PARTS]:
        first = planted(a, b)
        try:
            want = graphified(forward, (first,))(PARAMS, x)
        except FnGraphError:  # what nobody may write
            continue
        tried += 1
        got = graphified(forward, (first, "all"))(PARAMS, x)
        for one, two in zip(fg.core.trees.flatten(got)[0], fg.core.trees.flatten(want)[0]):
            if not torch.allclose(one.float(), two.float(), 1e-2, 1e-2, equal_nan=True):
                wrong.append((a, b))
    assert tried and wrong == [], f"{len(wrong)} of {tried}"
