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
LINEAR, PAIR, *EXPERTS = few_rows.APART
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


def one_linear() -> torch.fx.GraphModule:
    """A piece of one op that has a kernel for few rows."""
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    x.meta["val"], w.meta["val"] = torch.empty(3, 4), torch.empty(5, 4)
    made = graph.call_function(LINEAR, (x, [w], None, None, 1e-5, False, False, False, False))
    made.meta = {"val": torch.empty(3, 5), "stack_trace": "model.py:7"}
    graph.output((made,))
    return torch.fx.GraphModule({}, graph)


@pytest.mark.parametrize(
    ("tokens", "sizes", "apart"),
    [((1, 128), [(1, 1), (2, 1)], (1, 64)), ((1, 128), [(1, 1), (128, 2)], None),
     ((2, 64), [(4, 1)], None), ((2, 128), [(65, 1)], None), ((2, 128), [(64, 9)], None)],
    ids=["few", "one and many", "no more than few", "many", "other requests"],
)  # fmt: skip
def test_few_rows_are_compiled_apart_where_such_sizes_come(
    tokens: Any, sizes: Any, apart: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(few_rows, "DEVICES", ("cpu",))
    found = few_rows.few(one_linear(), Range(Span(*tokens), Span(1, 8)), sizes)
    assert [tuple(part.tokens) for part in found] == ([] if apart is None else [apart])


def test_without_a_kernel_few_rows_are_taken_apart_too_and_each_op_keeps_the_line():
    gm = few_rows.taken_apart(one_linear(), Range(Span(2, 64), Span(1, 8)))
    made = [node for node in gm.graph.nodes if node.op == "call_function"]
    assert made and LINEAR not in [node.target for node in made]
    assert {node.meta["stack_trace"] for node in made} == {"model.py:7"}
