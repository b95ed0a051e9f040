"""Linear layers in fp8 with what is around them: how often on each family, where, and where not. On
the CPU what comes out is the same bit for bit."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import toys
from places import changed, forward_of
from test_graphify import Model, steps
from torch import Tensor
from torch.nn.functional import silu

import fngraph as fg
from fngraph.models import generate, loading, naming
from fngraph.models.families.layers import centred_norm, rms_norm
from fngraph.models.weights.fp8 import LINEAR, quantize_fp8
from tests.models import tiny
from tests.traced_once import Kept, graph_once

pytestmark = pytest.mark.usefixtures("one_thread")
OP = torch.ops.fngraph.fused_linear_fp8.default
EPS = 1e-5
F = 6


class Layer(NamedTuple):
    """What a call of the op has."""

    weights: int
    scales: int | None  # of its input, that are known; None: that is in fp8 already
    norm: bool = False
    gated: bool = False
    adds: bool = False
    rounds: int = 0  # scales of its result


def found_in(traced: Any) -> list[Layer]:
    found = []
    for node in traced.graph.gm.graph.nodes:
        if node.target is OP:
            x, weights, by, norm, x_scales, more, out_scales, _, _, gated, _, held, _ = node.args
            assert held and len(by) == len(weights)
            rounded = x.meta["val"].dtype == torch.float8_e4m3fn
            found.append(Layer(len(weights), None if rounded else len(x_scales), norm is not None,
                               gated, more is not None, len(out_scales)))  # fmt: skip
    return found


def params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    E, one = toys.E, torch.tensor(0.01)
    p = {"w": draw(toys.V, E), "g": draw(E), "one": one, "same": one, "other": torch.tensor(0.02)}
    sizes = {
        "w1": (F, E),
        "w2": (F, E),
        "w3": (F, E),
        "w4": (F, E),
        "square": (E, E),
        "down": (E, F),
    }
    for name, size in sizes.items():
        p[name] = draw(*size).to(torch.float8_e4m3fn)
        p[f"{name} by"] = draw(size[0], 1).exp()
    return p


def lin(p: Any, x: Tensor, name: str, by: Tensor | None = None) -> Tensor:
    """A product by a weight, of x rounded by a known scale or by its own."""
    values, scale = fg.ops.quantize_fp8_rows(x) if by is None else (fg.ops.quantize_fp8(x, by), by)
    return fg.ops.scaled_linear(values, scale, p[name], p[f"{name} by"], x.dtype)


def norm(p: Any, x: Tensor) -> Tensor:
    return rms_norm(x, p["g"], EPS)


def three(p: Any, x: Tensor, *by: str) -> tuple[Tensor, ...]:
    """Their sums: what is returned must be memory of its own."""
    scales = [p[name] for name in by] or [None] * 3
    return tuple(lin(p, x, f"w{i + 1}", scale) + 1 for i, scale in enumerate(scales))


def four(p: Any, x: Tensor, *by: str) -> tuple[Tensor, ...]:
    scales = [p[name] for name in by] or [None]
    return tuple(lin(p, x, f"w{i + 1}", scales[i % len(scales)]) + 1 for i in range(4))


def gate(p: Any, x: Tensor, by: Tensor | None = None, other: Tensor | None = None) -> Tensor:
    return silu(lin(p, x, "w1", by)) * lin(p, x, "w2", by if other is None else other)


def mlp(p: Any, x: Tensor, by: Tensor | None = None) -> Tensor:
    return x + lin(p, gate(p, norm(p, x), by), "down", by)


def shared(p: Any, h: Tensor, name: str) -> Tensor:
    return fg.ops.scaled_linear(*h, p[name], p[f"{name} by"], torch.float32)


def written(p: Any, x: Tensor, before: bool) -> Any:
    """Of what is rounded twice, between the two, or behind both and before the products."""
    y = x.sin()
    a = fg.ops.quantize_fp8_rows(y)
    y = y if before else changed(y, lambda z: z.add_(1))
    b = fg.ops.quantize_fp8_rows(y)
    y.mul_(2)
    return shared(p, a, "w1") + 1, shared(p, b, "w2") + 1, y


def scaled_twice(p: Any, x: Tensor) -> Tensor:
    """Rounded by one scale, multiplied by another."""
    values = fg.ops.quantize_fp8(x, p["one"])
    return fg.ops.scaled_linear(values, p["other"], p["w1"], p["w1 by"], x.dtype).sin()


OWN, KNOWN, THREE = Layer(1, 0), Layer(1, 1), Layer(3, 0)
Case = tuple[Callable[[Any, Tensor], Any], list[Layer]]
CASES: dict[str, Case] = {
    "one": (lambda p, x: lin(p, x, "w1").sin(), [OWN]),
    "one by a known scale": (lambda p, x: lin(p, x, "w1", p["one"]).sin(), [KNOWN]),
    "three of one input": (three, [THREE]),
    "three by one scale": (lambda p, x: three(p, x, "one", "one", "one"), [Layer(3, 1)]),
    "three by one scale in two leaves": (
        lambda p, x: three(p, x, "one", "same", "one"), [Layer(3, 2)],
    ),
    "four of one input": (lambda p, x: four(p, x), [Layer(3, None)]),
    "four by one scale in two leaves": (lambda p, x: four(p, x, "one", "same"), []),
    "three by two scales": (
        lambda p, x: three(p, norm(p, x), "one", "other", "one"), [Layer(2, 1), KNOWN],
    ),
    "three of a norm": (lambda p, x: three(p, norm(p, x)), [Layer(3, 0, True)]),
    "three of a centred norm by one scale in two leaves": (
        lambda p, x: three(p, centred_norm(x, p["g"], EPS), "same", "same", "one"),
        [Layer(3, 2, True)],
    ),
    "three that are returned": (
        lambda p, x: tuple(lin(p, x, n) for n in ("w1", "w2", "w3")), [],
    ),
    "an mlp": (
        mlp, [Layer(2, 0, True, True), Layer(1, 0, adds=True)],
    ),
    "an mlp by one scale": (
        lambda p, x: mlp(p, x, p["one"]),
        [Layer(2, 1, True, True, rounds=1), Layer(1, None, adds=True)],
    ),
    "a gate by two scales": (
        lambda p, x: gate(p, norm(p, x), p["one"], p["other"]), [KNOWN, KNOWN],
    ),
    "a gate that somebody else reads": (
        lambda p, x: (lambda y: (lin(p, y, "down", p["one"]).sin(), y.sin()))(gate(p, x)),
        [Layer(2, 0, gated=True), KNOWN],
    ),
    "a gate that two scales round": (
        lambda p, x: (lambda y: [lin(p, y, "down", p[n]).sin() for n in ("one", "other")])(
            gate(p, x)),
        [Layer(2, 0, gated=True), KNOWN, KNOWN],
    ),
    "a gate that one scale in two leaves rounds": (
        lambda p, x: (lambda y: [lin(p, y, "down", p[n]).sin() for n in ("one", "same")])(
            gate(p, x)),
        [Layer(2, 0, gated=True, rounds=2)],
    ),
    "a gate that is written before it is rounded": (
        lambda p, x: lin(p, changed(gate(p, x), lambda y: y.mul_(2)), "down", p["one"]).sin(),
        [Layer(2, 0, gated=True), KNOWN],
    ),
    "a gate that a scale rounds which is written before": (
        lambda p, x: (lambda s, y: lin(
            p, y, "down", changed(s, lambda z: z.view(1).mul_(2))).sin())(p["one"] * 1, gate(p, x)),
        [Layer(2, 0, gated=True), KNOWN],
    ),
    "a gate whose one side is read elsewhere": (
        lambda p, x: (lambda a: (silu(a) * lin(p, x, "w2"), a.sum(1)))(lin(p, x, "w1")),
        [Layer(2, 0)],
    ),
    "a residual": (lambda p, x: x + lin(p, x.sin(), "square"), [Layer(1, 0, adds=True)]),
    "a residual behind, of a norm": (
        lambda p, x: lin(p, norm(p, x), "square", p["one"]) + x, [Layer(1, 1, True, adds=True)],
    ),
    "a sum of another shape": (lambda p, x: lin(p, x, "w1") + p["g"][:F], [OWN]),
    "a sum that is read before, too": (
        lambda p, x: (lambda y: (y + x, y * 2))(lin(p, x, "square")), [OWN],
    ),
    "a norm that somebody else reads": (
        lambda p, x: (lambda h: (three(p, h), h * 2))(norm(p, x)), [THREE],
    ),
    "a norm that a gate and a product read": (
        lambda p, x: (lambda h: (gate(p, h), lin(p, h, "w3") + 1))(norm(p, x)),
        [Layer(2, None, gated=True)],
    ),
    "a norm in another dtype": (
        lambda p, x: three(p, norm(p, x.double()).float()), [THREE],
    ),
    "an input in another dtype": (
        lambda p, x: shared(p, fg.ops.quantize_fp8_rows(x.double()), "w1").sin(), [],
    ),
    "rounded once, read twice": (
        lambda p, x: (lambda h: (shared(p, h, "w1") + 1, shared(p, h, "w2") + 1))(
            fg.ops.quantize_fp8_rows(norm(p, x))),
        [Layer(2, 0, True)],
    ),
    "rounded, and read otherwise": (
        lambda p, x: (lambda h: (shared(p, h, "w1") + 1, shared(p, h, "w2") + 1, h[1] * 2))(
            fg.ops.quantize_fp8_rows(norm(p, x))),
        [Layer(2, None)],
    ),
    "rounded by one scale, multiplied by another": (scaled_twice, []),
    "an input that is written between its roundings": (
        lambda p, x: written(p, x, before=False), [],
    ),
    "an input that is written after it is rounded": (
        lambda p, x: written(p, x, before=True), [Layer(2, None)],
    ),
    "a weight that is computed": (
        lambda p, x: lin(p | {"w1": p["w1"].flip(0)}, x, "w1").sin(), [],
    ),
    "a scale that is computed": (
        lambda p, x: lin(p | {"w1 by": p["w1 by"] * 2}, x, "w1").sin(), [],
    ),
    "a known scale that is computed": (
        lambda p, x: lin(p, x, "w1", p["one"] * 2).sin(), [KNOWN],
    ),
    "a norm's input that is written before the product": (
        lambda p, x: (lambda y, h: (changed(y, lambda z: z.add_(1)), lin(p, h, "w1").sin()))(
            *(lambda y: (y, norm(p, y)))(x.sin())),
        [OWN],
    ),
}  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES)
def test_it_matches_there_and_only_there(case: str):
    body, want = CASES[case]
    toy = Model(forward_of(body), params(), {"calls": torch.zeros(1)})
    fast = toy.graphify(modes="FULL", passes=("linears_fp8",))
    traced = fast.trace(toy.params, toy.state)
    assert found_in(traced) == want, traced.as_text()
    step = traced.split().lower().compile().capture(toy.params, toy.state, recorder="tape")
    for batch in steps():
        got, _ = step(toy.state, batch)
        bare, _ = toy.fn(toy.params, toy.state, batch)
        toys.assert_trees(got, bare, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("written", ["w1", "w1 by"])
def test_weights_that_a_step_writes_are_no_match(written: str):
    def forward(held: Any, state: Any, batch: toys.Batch) -> Any:
        made = lin(held | state, held["w"][batch.token_ids], "w1").sin()
        state[written].copy_(state[written].clone())
        return made, state

    own = params()
    state = {written: own[written].clone()}
    fast = fg.graphify(
        forward, donate=1, stage="batch", passes=("linears_fp8",), limits=toys.LIMITS
    )
    assert found_in(fast.trace(own, state)) == []


def test_scales_of_one_input_that_differ_are_named():
    toy = Model(forward_of(CASES["three by two scales"][0]), params(), {"calls": torch.zeros(1)})
    traced = toy.graphify(passes="all").trace(toy.params, toy.state)
    notes = [note for one in traced.passes for note in one.notes if "tensors of their own" in note]
    (note,) = notes
    assert "params['one'], params['other']" in note and "lay_side_by_side(weights)" in note


QKV, GATE, SUM = Layer(3, 0, True), Layer(2, 0, True, True), Layer(1, 0, adds=True)
BY_KNOWN = {  # q, k and v have one scale, and so have gate and up; what sums read is rounded before
    QKV: QKV._replace(scales=1), GATE: GATE._replace(scales=1, rounds=1),
    SUM: SUM._replace(scales=None),
}  # fmt: skip
FAMILIES: dict[str, tuple[dict[Layer, int], int]] = {  # by own scales; and how many are not in fp8
    "llama": ({QKV: 2, GATE: 2, SUM: 4}, 1),
    "qwen3": ({QKV: 2, GATE: 2, SUM: 4}, 1),
    "qwen3_moe": ({QKV: 3, GATE: 1, SUM: 4}, 3),  # two routers, and what experts are
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("level", ["none", "pieces"])
@pytest.mark.parametrize("known", [False, True], ids=["by rows", "by known scales"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_so_many_and_computes_the_same(
    name: str, known: bool, level: str, folder: Callable[[str], Path]
):
    family = loading.family(folder(name))
    config = dataclasses.replace(family.load(folder(name))[0], head_dim=16)
    plain = family.init_params(config, dtype=torch.bfloat16)
    named = naming.named(plain)
    names = [x for x in named if x.rsplit(".", 1)[-1] in LINEAR and named[x].dim() == 2]
    weights = quantize_fp8(plain, input_scales=dict.fromkeys(names, 0.05) if known else None)
    weights = fg.ops.lay_side_by_side(weights)
    batch = generate.alone(tiny.PROMPT, 0, 8, torch.device("cpu"), family.Batch)
    graphs: Kept = {}

    def run(passes: Any, level: str) -> Any:
        cache = family.init_cache(
            config, 8, block_size=generate.BLOCK_SIZE, num_slots=2, dtype=torch.bfloat16
        )
        fast = fg.graphify(
            family.forward, passes=passes, modes="FULL_AND_PIECEWISE", donate="cache",
            stage="batch", sizes=(16,), compile=level, recorder="tape",
        )  # fmt: skip
        with graph_once(graphs, "one"):
            results = fast(weights, cache, batch)
        return fast.steps[0].main.executable.maker.traced, naming.named(results)

    _, bare = run((), "none")
    traced, fused = run("all" if level == "none" else None, level)
    layers, others = FAMILIES[name]
    want = {BY_KNOWN[layer] if known else layer: n for layer, n in layers.items()}
    found = [x._replace(scales=min(x.scales, 1)) if x.scales else x for x in found_in(traced)]
    assert Counter(found) == want, traced.as_text()
    matches = {one.one.name: one.matches for one in traced.passes}
    assert matches["linears_fp8"] == 8 and matches["held_fp8"] == matches["quantize_once"] == 0
    assert matches["linears"] == others
    for a, b in zip(fused.values(), bare.values(), strict=True):
        if level == "none":
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, atol=0.2, rtol=0.1)
