"""Pieces with an op for few rows: it stays where a range has few, and is taken apart beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys
from test_compiled import captured, check
from test_graphify import Model, steps
from torch.nn.functional import silu

import fngraph as fg
from fngraph.compile import few_rows
from fngraph.core.compiling import Range, Span
from fngraph.models.families.layers import rms_norm
from fngraph.passes.pattern import sizes

pytestmark = pytest.mark.usefixtures("one_thread")
LINEAR, PAIR = few_rows.APART
ONE_PRODUCT = torch.ops.fngraph.linear_side_by_side.default


def layer(params: Any, state: Any, batch: toys.Batch) -> Any:
    """A gated mlp, a residual and what reads its norm, as a decoder has them."""
    p, x = params, params["w"][batch.token_ids]
    h = rms_norm(x, p["norm"], 1e-5)
    x = (silu(h @ p["w_gate"].t()) * (h @ p["w_up"].t())) @ p["w_down"].t() + x
    return (x + 1, rms_norm(x, p["norm"], 1e-5) @ p["w_last"].t()), state


def layer_model(laid: bool = True) -> Model:
    generator = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    params = {"w": draw(toys.V, 8), "norm": draw(8), "w_down": draw(8, 6),
              "w_last": draw(5, 8)}  # fmt: skip
    params |= {"w_gate": draw(6, 8), "w_up": draw(6, 8)}
    params = fg.ops.lay_side_by_side(params) if laid else params
    return Model(layer, params, {"calls": torch.zeros(1)})


@pytest.mark.sampled(0)
@pytest.mark.parametrize("kernels_on", [("cuda",), ("cuda", "cpu")])
def test_few_rows_have_code_of_their_own_where_there_is_a_kernel(
    kernels_on: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(few_rows, "DEVICES", kernels_on)
    toy = layer_model()
    limits = fg.Limits(max_tokens=128, max_reqs=4, B=toys.B)
    step = captured(toy, "tape", modes="FULL", sizes=(1, 4, 12, 128), limits=limits)
    for batch in steps("cpu"):
        check(toy, step, batch)
    spans = {tuple(made.range.tokens) for made in step.main.executable.compiled[0].artefacts}
    assert ((2, 64) in spans) == ("cpu" in kernels_on) and {(1, 1), (2, 128)} <= spans


@pytest.mark.parametrize("laid", [False, True])
@pytest.mark.parametrize("passes", [("linears",), ("linears", "paired_linears")], ids=len)
def test_what_is_taken_apart_computes_the_same(
    passes: tuple[str, ...], laid: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(few_rows, "DEVICES", ("cpu",))
    toy = layer_model(laid)
    split = toy.graphify(modes="FULL", passes=passes).trace(toy.params, toy.state).split()
    (piece,) = split.distinct
    ours = tuple(few_rows.APART)
    found = [n.target for n in piece.gm.graph.nodes if n.target in ours]
    assert found == [LINEAR, PAIR] if len(passes) == 2 else [LINEAR] * 3
    tokens, weights = toys.batch(2, 3).token_ids, list(toy.params.values())
    given = []
    for node in [n for n in piece.gm.graph.nodes if "val" in n.meta][: len(weights) + 1]:
        like = [i for i, w in enumerate(weights) if tuple(w.shape) == sizes(node)]
        given.append(weights.pop(like[0]) if like else tokens)  # of equal shapes the gate is first
    want = piece.gm(len(tokens), 1, *given)
    for most, left in ((64, len(found)), (65, 0)):
        gm = torch.fx.GraphModule({}, torch.fx.Graph())
        gm.graph.output(gm.graph.graph_copy(piece.gm.graph, {}))
        apart = few_rows.taken_apart(gm, Range(Span(2, most), Span(1, 8)))
        ops = [n.target for n in apart.graph.nodes]
        assert sum(map(ops.count, ours)) == left and (ONE_PRODUCT in ops) == (laid and not left)
        for a, b in zip(apart(len(tokens), 1, *given), want, strict=True):
            torch.testing.assert_close(a, b)
