"""Linear layers with what is around them: how often on each family, where, and where not. On the
CPU what comes out is the same bit for bit."""

from __future__ import annotations

from collections import Counter
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
OP = torch.ops.fngraph.fused_linear.default
EPS = 1e-5
Found = list[tuple[int, bool, bool, bool]]  # weights; with a norm, a gate, a sum


def found_in(traced: Any) -> Found:
    calls = [n.args for n in traced.graph.gm.graph.nodes if n.target is OP]
    return [(len(ws), norm is not None, gated, more is not None)
            for _, ws, norm, more, _, _, gated, *_ in calls]  # fmt: skip


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    E = toys.E
    p = {
        "w": draw(toys.V, E),
        "g": draw(E),
        "b": draw(6),
        "square": draw(E, E),
        "turned": draw(E, 6),
    }
    return p | {name: draw(6, E) for name in ("w1", "w2", "w3", "w4")}


def gate(p: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
    return silu(linear(x, p["w1"])) * linear(x if y is None else y, p["w2"])


def norm(p: Any, x: Tensor) -> Tensor:
    return rms_norm(x, p["g"], EPS)


def three(p: Any, x: Tensor) -> tuple[Tensor, ...]:
    """Their sums: what is returned must be memory of its own."""
    return tuple(linear(x, p[name]) + 1 for name in ("w1", "w2", "w3"))


ONE, HEAD = (1, False, False, False), (1, True, False, False)
CASES: dict[str, tuple[Callable[[Any, Tensor], Any], Found]] = {
    "one": (lambda p, x: linear(x, p["w1"]), [ONE]),
    "three of one input": (three, [(3, False, False, False)]),
    "three of a norm": (lambda p, x: three(p, norm(p, x)), [(3, True, False, False)]),
    "of a centred norm": (
        lambda p, x: linear(centred_norm(x, p["g"], EPS), p["w1"]), [(1, True, False, False)],
    ),
    "four of one input": (
        lambda p, x: (*three(p, x), linear(x, p["w4"]) + 1), [(3, False, False, False), ONE],
    ),
    "three that are returned": (
        lambda p, x: tuple(linear(x, p[n]) for n in ("w1", "w2", "w3")), [ONE] * 3,
    ),
    "a gate": (gate, [(2, False, True, False)]),
    "a gate of a norm": (lambda p, x: gate(p, norm(p, x)), [(2, True, True, False)]),
    "a gate of two inputs": (lambda p, x: gate(p, x, x.sin()), [ONE, ONE]),
    "a gate whose one side is read elsewhere": (
        lambda p, x: (lambda a: (silu(a) * linear(x, p["w2"]), a.sum(1)))(linear(x, p["w1"])),
        [(2, False, False, False)],
    ),
    "a gate of norms by two epsilons": (
        lambda p, x: gate(p, norm(p, x), rms_norm(x, p["g"], 0.1)), [HEAD, HEAD],
    ),
    "a norm by an epsilon that is a tensor": (
        lambda p, x: linear(
            x * torch.rsqrt(x.square().mean(-1, keepdim=True) + p["g"][0].abs()) * p["g"], p["w1"]
        ),
        [ONE],
    ),
    "products of another dtype": (
        lambda p, x: linear(x.double(), p["w1"].double()).float(), [],
    ),
    "one weight twice": (
        lambda p, x: (linear(x, p["w1"]) + 1, linear(x, p["w1"]) + 2), [(2, False, False, False)],
    ),
    "an input that a view of it writes in between": (
        lambda p, x: (lambda y: linear(y, p["w1"]).sin()
                      + linear(changed(y, lambda z: z.view(-1)[:3].add_(1)), p["w2"]).sin())(
                          x.sin()),
        [ONE, ONE],
    ),
    "a norm of one of two products, before another": (
        lambda p, x: (lambda y: linear(norm(p, linear(y, p["square"])), p["w1"]).sin()
                      + linear(y, p["w1"]).sin())(x.sin()),
        [(2, False, False, False), HEAD],
    ),
    "a residual": (lambda p, x: linear(x.sin(), p["square"]) + x, [(1, False, False, True)]),
    "a residual in front": (
        lambda p, x: x + linear(x.sin(), p["square"]), [(1, False, False, True)],
    ),
    "a residual of a norm": (
        lambda p, x: x + linear(norm(p, x), p["square"]), [(1, True, False, True)],
    ),
    "a multiple of a residual": (
        lambda p, x: torch.add(linear(x, p["square"]), x, alpha=2), [ONE],
    ),
    "a sum of another shape": (lambda p, x: linear(x, p["w1"]) + p["b"], [ONE]),
    "a sum and a number": (lambda p, x: linear(x, p["w1"]) + 1, [ONE]),
    "a sum that is read before, too": (
        lambda p, x: (lambda y: (y + x, y * 2))(linear(x, p["square"])), [ONE],
    ),
    "a bias": (lambda p, x: linear(x, p["w1"], p["b"]), []),
    "a weight that is computed": (lambda p, x: linear(x, p["w1"] * 2), []),
    "a weight the other way around": (lambda p, x: x @ p["turned"], []),
    "a norm that is read elsewhere": (
        lambda p, x: (lambda h: (linear(h, p["w1"]), h * 2))(norm(p, x)), [ONE],
    ),
    "a norm that a gate and a product read": (
        lambda p, x: (lambda h: (gate(p, h), linear(h, p["w3"])))(norm(p, x)),
        [(2, False, True, False), ONE],
    ),
    "an input that is written in between": (
        lambda p, x: (lambda y: linear(y, p["w1"])
                      + linear(changed(y, lambda z: z.add_(1)), p["w2"]))(x.sin()),
        [(1, False, False, False), (1, False, False, True)],
    ),
    "a norm's input that is written before the product": (
        lambda p, x: (lambda y, h: (changed(y, lambda z: z.add_(1)), linear(h, p["w1"])))(
            *(lambda y: (y, norm(p, y)))(x.sin())),
        [ONE],
    ),
    "a residual that is written after the product": (
        lambda p, x: (lambda y, z: changed(y, lambda a: a.mul_(2)) + z)(
            *(lambda y: (y, linear(y, p["square"])))(x.sin())),
        [ONE],
    ),
}  # fmt: skip


@pytest.mark.sampled(12)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_there_and_only_there(case: str):
    body, want = CASES[case]
    toy = Model(forward_of(body), params(), {"calls": torch.zeros(1)})
    fast = toy.graphify(modes="FULL", passes=("linears",))
    traced = fast.trace(toy.params, toy.state)
    assert found_in(traced) == want, traced.as_text()
    step = traced.split().lower().compile().capture(toy.params, toy.state, recorder="tape")
    for batch in steps():
        got, _ = step(toy.state, batch)
        bare, _ = toy.fn(toy.params, toy.state, batch)
        toys.assert_trees(got, bare, atol=1e-6, rtol=1e-6)


ALONE, SUM = (1, False, False, False), (1, False, False, True)
QKV, GATE = (3, True, False, False), (2, True, True, False)
PAIR, PLAIN_GATE = (2, True, False, False), (2, False, True, False)
FAMILIES: dict[str, dict[tuple[int, bool, bool, bool], int]] = {
    "llama": {QKV: 2, GATE: 2, SUM: 4, HEAD: 1},
    "mistral": {QKV: 2, GATE: 2, SUM: 4, HEAD: 1},
    "qwen2": {GATE: 2, SUM: 4, HEAD: 1},  # q, k and v have biases
    "gemma3_text": {QKV: 3, PAIR: 3, HEAD: 1, ALONE: 6},  # its gate is gelu, norms before sums
    "qwen3": {QKV: 2, GATE: 2, SUM: 4, HEAD: 1},
    "qwen3_moe": {QKV: 3, GATE: 1, SUM: 4, HEAD: 1, ALONE: 2},  # two routers
    "mamba2": {HEAD: 3, (1, True, False, True): 2},  # a norm before the last product of a layer
    "deepseek_v2": {PAIR: 3, GATE: 1, PLAIN_GATE: 2, SUM: 6, HEAD: 1, ALONE: 2},
    "deepseek_v3": {PAIR: 3, GATE: 1, PLAIN_GATE: 2, SUM: 6, HEAD: 4, ALONE: 2},
    "qwen3_next": {
        QKV: 1, PAIR: 3, GATE: 1, PLAIN_GATE: 3, SUM: 5, HEAD: 1, ALONE: 3,
        (2, False, False, False): 3,
    },
    "bert": {},  # its products have biases
}  # fmt: skip
OTHER_BITS = ("gemma3_text",)  # torch's gelu of a part of rows is another one than of whole rows
IN_BFLOAT16 = {  # what is added is in float32 there; so is what a router multiplies
    "mamba2": {HEAD: 3, (1, True, False, False): 3, ALONE: 2},
    "deepseek_v2": {PAIR: 3, GATE: 1, PLAIN_GATE: 2, SUM: 6, HEAD: 1},
    "deepseek_v3": {PAIR: 3, GATE: 1, PLAIN_GATE: 2, SUM: 6, HEAD: 4},
}


@pytest.mark.sampled("llama")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_so_many_and_computes_the_same(
    name: str, dtype: torch.dtype, folder: Callable[[str], Path]
):
    family = loading.family(folder(name))
    _, weights = family.load(folder(name), dtype=dtype)
    batch = generate.alone(tiny.PROMPT, 0, 8, torch.device("cpu"), family.Batch)
    graphs: Kept = {}

    def run(*passes: str) -> Any:
        cache = family.init_cache(
            weights.config, 8, block_size=generate.BLOCK_SIZE, num_slots=2, dtype=dtype
        )
        fast = fg.graphify(
            family.forward, passes=passes, modes="FULL", donate="cache", stage="batch", sizes=(16,)
        )
        with graph_once(graphs, "one"):
            results = fast(weights, cache, batch)
        return fast.steps[0].main.executable.maker.traced, naming.named(results)

    (traced, fused), (_, plain) = run("linears"), run()
    want = FAMILIES | (IN_BFLOAT16 if dtype == torch.bfloat16 else {})
    assert Counter(found_in(traced)) == want[name]
    exact = name not in OTHER_BITS
    close = {"atol": 0, "rtol": 0} if exact else {"atol": 1e-5, "rtol": 1e-5}
    for a, b in zip(fused.values(), plain.values(), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, **close)
