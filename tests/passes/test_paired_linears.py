"""A sum and the linear layers of its norm in one op: where, and where not; on each family, with the
same bits on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from places import changed, forward_of
from test_graphify import Model, steps
from torch import Tensor
from torch.nn.functional import linear, silu

import fngraph as fg
from fngraph.models import generate, loading, naming
from fngraph.models.families.layers import centred_norm, rms_norm
from tests.models import tiny
from tests.traced_once import Kept, graph_once

pytestmark = pytest.mark.usefixtures("one_thread")
PAIR, ONE = torch.ops.fngraph.paired_linears.default, torch.ops.fngraph.fused_linear.default
PASSES = ("linears", "paired_linears")
EPS = 1e-5


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    E = toys.E
    p = {"w": draw(toys.V, E), "g": draw(E), "square": draw(E, E), "again": draw(E, E)}
    p["down"] = draw(E, 6)
    return p | {name: draw(6, E) for name in ("w1", "w2", "w3")}


def norm(p: Any, x: Tensor) -> Tensor:
    return rms_norm(x, p["g"], EPS)


def total(p: Any, x: Tensor) -> Tensor:
    return linear(x.sin(), p["square"]) + x


def gate(p: Any, x: Tensor) -> Tensor:
    return silu(linear(x, p["w1"])) * linear(x, p["w2"])


def three(p: Any, x: Tensor) -> Any:
    return tuple(linear(x, p[name]) + 1 for name in ("w1", "w2", "w3"))


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], int, int]] = {  # pairs, other linear layers
    "a gate": (lambda p, x: gate(p, norm(p, total(p, x))), 1, 0),
    "three of one norm": (lambda p, x: three(p, norm(p, total(p, x))), 1, 0),
    "a centred norm": (lambda p, x: linear(centred_norm(total(p, x), p["g"], EPS), p["w1"]), 1, 0),
    "a sum that others read": (
        lambda p, x: (lambda y: (gate(p, norm(p, y)), y * 2))(total(p, x)), 1, 0,
    ),
    "one behind the other": (
        lambda p, x: (lambda y: linear(norm(p, linear(gate(p, norm(p, y)), p["down"]) + y),
                                       p["w3"]))(total(p, x)), 2, 0,
    ),
    "two norms of one sum": (
        lambda p, x: (lambda y: (linear(norm(p, y), p["w1"]),
                                 linear(rms_norm(y, p["g"], 0.1), p["w2"])))(total(p, x)), 1, 1,
    ),
    "a sum of three": (lambda p, x: gate(p, norm(p, total(p, x) + 1)), 0, 2),
    "no norm": (lambda p, x: gate(p, total(p, x)), 0, 2),
    "a norm that others read": (
        lambda p, x: (lambda h: (gate(p, h), h * 2))(norm(p, total(p, x))), 0, 2,
    ),
    "a layer that adds as well": (
        lambda p, x: (lambda y: linear(norm(p, y), p["again"]) + x)(total(p, x)), 0, 2,
    ),
    "a norm's weight that comes later": (
        lambda p, x: (lambda y: gate(p, rms_norm(y, p["g"].sin(), EPS)))(total(p, x)), 0, 2,
    ),
    "a sum that a view of it writes in between": (
        lambda p, x: (lambda y: gate(p, norm(p, changed(y, lambda z: z.view(-1)[:3].add_(1)))))(
            total(p, x)), 0, 2,
    ),
    "a norm's weight that is written in between": (
        lambda p, x: (lambda g: (lambda y: gate(p, rms_norm(
            y, changed(g, lambda z: z.view(-1)[:3].add_(1)), EPS)))(total(p, x)))(p["g"].sin()),
        0, 2,
    ),
}  # fmt: skip


def count(traced: Any) -> tuple[int, int]:
    ops = [n.target for n in traced.graph.gm.graph.nodes]
    return ops.count(PAIR), ops.count(ONE)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_there_and_only_there(case: str):
    body, *want = CASES[case]
    toy = Model(forward_of(body), params(), {"calls": torch.zeros(1)})
    fast = toy.graphify(modes="FULL", passes=PASSES)
    traced = fast.trace(toy.params, toy.state)
    assert list(count(traced)) == want, (count(traced), traced.as_text())
    assert {one.one.name: one.matches for one in traced.passes}["paired_linears"] == want[0]
    step = traced.split().lower().compile().capture(toy.params, toy.state, recorder="tape")
    for batch in steps():
        got, _ = step(toy.state, batch)
        bare, _ = toy.fn(toy.params, toy.state, batch)
        toys.assert_trees(got, bare, atol=1e-6, rtol=1e-6)


FAMILIES = {  # each has two layers, or one whose mlp is not of experts; a last sum's norm is of
    # chosen rows; Qwen2's q, k and v have biases, and Gemma's norms are before its sums
    "llama": 3, "mistral": 3, "qwen2": 2, "gemma3_text": 0, "qwen3": 3, "qwen3_moe": 2,
    "mamba2": 0, "deepseek_v2": 2, "deepseek_v3": 2, "qwen3_next": 2, "bert": 0,
}  # fmt: skip


@pytest.mark.sampled("llama")
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_so_many_and_computes_the_same(name: str, folder: Callable[[str], Path]):
    family = loading.family(folder(name))
    _, weights = family.load(folder(name), dtype=torch.float32)
    batch = generate.alone(tiny.PROMPT, 0, 8, torch.device("cpu"), family.Batch)
    graphs: Kept = {}

    def run(*passes: str) -> Any:
        cache = family.init_cache(weights.config, 8, block_size=generate.BLOCK_SIZE, num_slots=2)
        fast = fg.graphify(
            family.forward, passes=passes, modes="FULL", donate="cache", stage="batch", sizes=(16,)
        )
        with graph_once(graphs, "one"):
            results = fast(weights, cache, batch)
        return fast.steps[0].main.executable.maker.traced, naming.named(results)

    (traced, paired), (_, linears) = run(*PASSES), run("linears")
    assert count(traced)[0] == FAMILIES[name]
    for a, b in zip(paired.values(), linears.values(), strict=True):
        assert torch.equal(a, b) or (a != a).equal(b != b)
