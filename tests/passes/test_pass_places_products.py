"""Which products become one, since their weights lie side by side, and which stay apart."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from places import BF16, Body, F, changed, model_of, params
from test_graphify import steps
from torch import Tensor
from torch.nn.functional import linear

import fngraph as fg
from fngraph.errors import AddressError, CaptureError
from fngraph.ops import lay_side_by_side

# --- products side by side ------------------------------------------------------------------------


def project(*names: str) -> Body:
    def body(p: Any, x: Tensor) -> Any:
        return sum(torch.tanh(linear(x, p[name])).sum(-1, keepdim=True) for name in names)

    return body


def pair(p: Any, weight: str, bias: str = "") -> tuple[Tensor, Tensor]:
    return p[f"{weight}_proj.weight"], p[f"{bias or weight}_proj.bias"]


def biased(*names: str) -> Body:
    """Products with a bias each; "q k" is q's weight with k's bias."""
    return lambda p, x: [linear(x, *pair(p, *name.split())).sin() for name in names]


def some_biased(p: Any, x: Tensor) -> Any:
    """As Whisper: keys have none."""
    return *biased("q", "v")(p, x), linear(x, p["k_proj.weight"]).sin()


def added(bias: Callable[[Any, Tensor, str], Tensor], **more: Any) -> Body:
    """Products to which something is added that is no bias."""
    return lambda p, x: [
        torch.addmm(bias(p, x, a), x, pair(p, a)[0].t(), **more).sin() for a in "qk"
    ]


def written(p: Any, x: Tensor) -> Any:
    y = x.sin()
    a = linear(y, p["w_gate"])
    y.view(-1)[:4].add_(1)
    return a.sin() + linear(y, p["w_up"])


def as_view(p: Any, x: Tensor) -> Any:
    return linear(x, p["w_gate"]).view(-1).sin().view(-1, F) + linear(x, p["w_up"])


@torch.library.custom_op("test_pass_places::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """A kernel that is handed an address, and knows from the trace how its rows lie."""
    return torch.as_strided(x, x.shape, (x.shape[1], 1)) * 2


doubled.register_fake(lambda x: x.new_empty(x.shape))


@torch.library.custom_op(
    "test_pass_places::tripled", mutates_args=(), tags=(torch.Tag.flexible_layout,)
)
def tripled(x: Tensor) -> Tensor:
    return x * 3


tripled.register_fake(lambda x: x.new_empty(x.shape))


def handed(op: Callable[[Tensor], Tensor]) -> Body:
    """Products, or views of what is written in them, to an op of one's own."""

    def body(p: Any, x: Tensor) -> Any:
        a, b = linear(x, p["w_gate"]), linear(x, p["w_up"]).add_(1)
        return fg.trust_rows(op(a)) + fg.trust_rows(op(b.view(-1, 2, F // 2).flatten(1)))

    return body


ALONE = "do not lie side by side in memory"
PRODUCTS: dict[str, tuple[Body, int, str]] = {
    "three of one input": (project("wq", "wk", "wv"), 1, ""),
    "in another order": (project("wv", "wq", "wk"), 1, ""),
    "two of three": (project("wk", "wv"), 1, ""),
    "and two others": (project("wq", "wk", "wv", "w_up", "w_gate"), 2, ""),
    "one alone": (project("wq"), 0, ""),
    "with a gap": (project("wq", "wv"), 0, ALONE),
    "the same weight twice": (project("wq", "wq"), 0, ALONE),
    "weights of two groups": (project("wv", "w_up"), 0, ALONE),
    "a weight that lies elsewhere": (project("w_gate", "other"), 0, ALONE),
    "with a bias": (
        lambda p, x: linear(x, p["wq"], p["b"]).sum(-1) + linear(x, p["wk"]).sum(-1), 0, "",
    ),
    "with biases": (biased("q", "k", "v"), 1, ""),
    "with biases, in another order": (biased("v", "q", "k"), 1, ""),
    "with biases in another order than weights": (biased("q k", "k q", "v"), 0, ALONE),
    "with one bias for all": (biased("q", "k q", "v q"), 0, ALONE),
    "with biases but one": (some_biased, 0, ALONE),
    "with a bias that is computed": (added(lambda p, x, a: pair(p, a)[1].sin()), 0, ""),
    "with a row for each token": (added(lambda p, x, a: x[:, :4]), 0, ""),
    "with multiples of biases": (added(lambda p, x, a: pair(p, a)[1], beta=2), 0, ""),
    "two inputs": (
        lambda p, x: linear(x, p["w_gate"]).sin() + linear(x.sin(), p["w_up"]), 0, "",
    ),
    "an input that is written in between": (written, 0, "is written between one product and"),
    "a result that is returned": (
        lambda p, x: (linear(x, p["w_gate"]), linear(x, p["w_up"])), 0, "forward returns one of",
    ),
    "a result that is viewed as a line": (as_view, 0, "viewed as only a product of its own"),
    "results that an op of one's own reads": (
        handed(doubled), 0, "doubled.default (",
    ),
    "results that one of any strides reads": (handed(tripled), 1, ""),
    "results that are written": (
        lambda p, x: changed(linear(x, p["w_gate"]), Tensor.sin_) + linear(x, p["w_up"]), 1, "",
    ),
}  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", PRODUCTS)
def test_products_become_one_where_their_weights_lie_so(name: str):
    body, matches, note = PRODUCTS[name]
    for laid in (True, False):
        toy = model_of(body, lay_side_by_side(params()) if laid else params())
        fast = toy.graphify(passes=("side_by_side",), modes="FULL", sizes=(16,), recorder="tape")
        (one,) = fast.trace(toy.params, toy.state).passes
        assert one.matches == (matches if laid else 0)
        if laid:
            assert len(one.notes) == bool(note) and note in "".join(one.notes)
        for batch in steps()[:2]:
            toy.check(fast, batch, atol=1e-5, rtol=1e-5)


def test_weights_that_were_traced_without_memory_stay_apart():
    toy = model_of(project("wq", "wk", "wv"), lay_side_by_side(params()))
    fast = toy.graphify(passes=("side_by_side",))
    traced = fast.trace(fg.like(toy.params), fg.like(toy.state))
    ((one,), (note,)) = traced.passes, traced.passes[0].notes
    assert f"side_by_side: {note}" in traced.split().lower().notes
    assert one.matches == 0 and "weights = fg.ops.lay_side_by_side(weights)" in note
    assert note.startswith("params['wq'], params['wk'], params['wv']: they do not lie")


@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
def test_merged_weights_are_the_caller_s_own(recorder_name, device, modes: str):
    """Written in place, they count; of another kind, they are traced anew, and stay apart."""
    given = {name: x.to(device) for name, x in params(BF16).items()}
    toy = model_of(project("wq", "wk", "wv"), lay_side_by_side(given))
    toy = toy._replace(state={"calls": torch.zeros(1, device=device)})
    step = (
        toy.graphify(passes=("side_by_side",), modes=modes)
        .trace(toy.params, toy.state).split().lower().compile()
        .capture(toy.params, toy.state, recorder=recorder_name)
    )  # fmt: skip
    run = lambda params, state, batch: step(state, batch)  # noqa: E731
    batch = steps(device)[0]
    close = {"atol": 0.05, "rtol": 0.05}
    toy.check(run, batch, **close)
    before = toy.params["wk"].data_ptr()
    step.rebind(params={**toy.params, "wk": toy.params["wk"] * 2})
    assert toy.params["wk"].data_ptr() == before
    toy.check(run, batch, **close)
    ran = lambda: step.main.executable.maker.traced.passes[0].matches  # noqa: E731
    assert ran() == 1
    halves = {name: x.half() for name, x in toy.params.items()}  # of as many bytes
    step.rebind(params=halves)
    assert ran() == 0
    got, want = step(toy.state, batch)[0], toy.fn(halves, toy.state, batch)[0]
    torch.testing.assert_close(got, want, **close)


@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_weights_bound_apart_after_all_are_an_error(kind: str):
    laid = lay_side_by_side(params())
    toy = model_of(biased("q", "k", "v"), laid)
    traced = toy.graphify(passes=("side_by_side",), modes="FULL", sizes=(4,)).trace(laid, toy.state)
    apart = {name: x.clone() if name.endswith(kind) else x for name, x in laid.items()}
    with pytest.raises((AddressError, CaptureError), match="does not lie right behind"):
        step = traced.split().lower().compile().capture(apart, toy.state, recorder="tape")
        step(toy.state, steps()[0])


def test_no_second_copy_of_a_weight_is_made():
    toy = model_of(project("wq", "wk", "wv"), lay_side_by_side(params()))
    fast = toy.graphify(passes=("side_by_side",), modes="FULL", sizes=(16,))
    lowered = fast.trace(toy.params, toy.state).split().lower()
    assert lowered.split.traced.constants == {}
    (op,) = [
        n for n in lowered.split.traced.graph.gm.graph.nodes if "side_by_side" in str(n.target)
    ]
    assert [x.op for x in op.args[1]] == ["placeholder"] * 3
    assert dataclasses.asdict(lowered.plan) == dataclasses.asdict(
        toy.graphify(passes=(), modes="FULL", sizes=(16,))
        .trace(toy.params, toy.state).split().lower().plan
    )  # fmt: skip
