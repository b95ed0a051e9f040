"""Gradients through loops: those of Python's, of first and second order, in a trace and outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loop_programs import Python
from torch.func import grad, grad_and_value

import fngraph as fg

DOUBLE = torch.float64
DEVICES = {"tape": "cpu", "cuda": "cuda"}


@fg.struct
class Rows:
    """Tokens, and which of them are there."""

    x: torch.Tensor = fg.buffer("T 4", "float32")
    real: torch.Tensor = fg.buffer("T", "bool")
    spec: fg.BatchSpec = fg.host()


def losses(fg: Any) -> dict[str, Any]:
    """By name, each of (weights, (2, 4))."""

    def forwards(w: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            h = torch.tanh(h @ layer + w["b"])
            return h, (h * w["s"]).sum()

        h, ys = fg.scan(body, x, w["layers"])
        return (h**2).sum() + (ys * ys).sum()

    def backwards(w: Any, x: Any) -> Any:
        def body(c: Any, layer: Any) -> Any:
            i, h = c
            h = torch.tanh(h @ layer + w["b"] * i)
            return (i + 1, h), h * 2

        zero = torch.zeros((), dtype=torch.int64, device=x.device)
        (_, h), ys = fg.scan(body, (zero, x), w["layers"], reverse=True)
        return (ys**2).sum() + h.sum()

    def counted(w: Any, x: Any) -> Any:
        body = lambda i, h: [torch.tanh(h[0] @ w["layers"][0]) * (i + 1)]  # noqa: E731
        return fg.fori_loop(0, 4, body, [x])[0].sum()

    def no_turn(w: Any, x: Any) -> Any:
        return (fg.fori_loop(0, 0, lambda i, h: [h[0] * w["s"]], [x])[0] * w["b"]).sum()

    def chosen(w: Any, x: Any) -> Any:
        a = lambda: (x @ w["layers"][0]).sum()  # noqa: E731
        return fg.cond(x.sum() > 0, a, lambda: (w["b"] * x).sum() * 3)

    def as_it_is(w: Any, x: Any) -> Any:
        return fg.cond(x.sum() > 0, lambda: w["b"], lambda: w["b"] * 2).sum() * w["s"]

    def nested(w: Any, x: Any) -> Any:
        def body(h: Any, layer: Any) -> Any:
            turn = lambda i, h: [torch.tanh(h[0] @ layer + w["b"])]  # noqa: E731
            (h,) = fg.fori_loop(0, 2, turn, [h])
            h = fg.cond(h.sum() > 0, lambda h: h * w["s"], lambda h: h - w["s"], h)
            return h, h.sum()

        h, ys = fg.scan(body, x, w["layers"])
        return ys.sum() + h.sum()

    def untouched(w: Any, x: Any) -> Any:
        h, ys = fg.scan(lambda h, layer: (h @ layer, w["b"]), x, w["layers"])
        (b, h), _ = fg.scan(lambda c, layer: ((c[0], c[1] @ layer * c[0]), layer), (w["b"], h),
                            w["layers"])  # fmt: skip
        return (ys**3).sum() + h.sum() * w["s"] + (b * b).sum()

    return {f.__name__: f for f in
            (forwards, backwards, counted, no_turn, chosen, as_it_is, nested, untouched)
            }  # fmt: skip


def given(seed: int, device: str) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *s: torch.randn(s, generator=generator, dtype=DOUBLE).to(device)  # noqa: E731
    return {"layers": draw(3, 4, 4) / 2, "b": draw(4), "s": draw()}, draw(2, 4)


def squares(loss: Any) -> Any:
    """The sum of the squares of a loss's gradients, whose gradient is of second order."""
    return lambda w, x: sum(g.pow(2).sum() for g in grad(loss)(w, x).values())


@pytest.mark.sampled("backwards", "chosen", "untouched")
@pytest.mark.parametrize("name", losses(fg))
def test_a_gradient_is_pythons(name: str, recorder_name: str):
    python, ours = losses(Python)[name], losses(fg)[name]
    if name in ("chosen", "as_it_is", "nested"):  # by a predicate of values
        seeds = [0, 1, 2]
    else:
        seeds = [0]
    first = lambda w, x: grad(ours, argnums=(0, 1))(w, x[0])  # noqa: E731
    second = lambda w, x: grad(squares(ours))(w, x[0])  # noqa: E731
    fast, faster = (
        fg.graphify(f, stage="x", recorder=recorder_name, modes="FULL") for f in (first, second)
    )
    w, _ = given(0, DEVICES[recorder_name])
    for seed in seeds:
        x = given(seed, DEVICES[recorder_name])[1]
        want = grad(python, argnums=(0, 1))(w, x)
        torch.testing.assert_close(grad(ours, argnums=(0, 1))(w, x), want)
        torch.testing.assert_close(fast(w, (x,)), want)
        torch.testing.assert_close(faster(w, (x,)), grad(squares(python))(w, x))


def test_plain_autograd_goes_through_loops_in_a_trace_and_outside():
    loss = losses(fg)["nested"]
    w, x = given(0, "cpu")

    def gradients(w: Any, x: Any) -> Any:
        leaves = {key: value.clone().requires_grad_() for key, value in w.items()}
        return torch.autograd.grad(loss(leaves, x[0]), list(leaves.values()))

    want = tuple(grad(losses(Python)["nested"])(w, x).values())
    torch.testing.assert_close(gradients(w, (x,)), want)
    fast = fg.graphify(gradients, stage="x", recorder="tape", modes="FULL")
    torch.testing.assert_close(fast(w, (x,)), want)


def test_gradients_are_accumulated_by_a_scan(recorder_name: str):
    device = DEVICES[recorder_name]

    def step(params: Any, batch: Any) -> Any:
        def one(c: Any, x: Any) -> Any:
            total, loss = c
            more, value = grad_and_value(lambda p: ((x @ p["w"]) ** 2).mean())(params)
            return ({"w": total["w"] + more["w"]}, loss + value), None

        zeros = {"w": torch.zeros_like(params["w"])}, batch[0].new_zeros(())
        (total, loss), _ = fg.scan(one, zeros, batch[0])
        return {"w": params["w"] - 0.1 * total["w"]}, loss

    fast = fg.graphify(step, donate="params", stage="batch", recorder=recorder_name, modes="FULL")
    params = {"w": torch.eye(3, dtype=DOUBLE, device=device)}
    plain = {"w": params["w"].clone()}
    for seed in range(3):
        x = given(seed, device)[0]["layers"][:, :, :3].contiguous()
        _, loss = fast(params, (x,))
        want = sum(((y @ plain["w"]) ** 2).mean() for y in x)
        more = grad(lambda p, x=x: sum(((y @ p["w"]) ** 2).mean() for y in x))(plain)["w"]
        plain = {"w": plain["w"] - 0.1 * more}
        torch.testing.assert_close(loss, want)
        torch.testing.assert_close(params, plain)
    assert fast.steps[0].donation.rows[0].how == "in place"


def test_a_turn_asks_how_many_tokens_there_are():
    """The first to ask for T makes its node, and what a loop closes over is found by a run."""

    def forward(w: Any, batch: Rows) -> Any:
        def loss(w: Any) -> Any:
            turn = lambda h, w: (torch.nn.functional.normalize(h @ w), None)  # noqa: E731
            h, _ = fg.scan(turn, batch.x, w)
            return torch.where(batch.real[:, None], h, 0).square().sum()

        return grad(loss)(w)

    fast = fg.graphify(forward, stage=1, sizes=(8,), limits=fg.Limits(8, 2), recorder="tape")
    w = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    for tokens in (5, 8, 1):
        x = torch.randn(tokens, 4, generator=torch.Generator().manual_seed(tokens))
        batch = Rows(x, torch.ones(tokens, dtype=torch.bool), fg.BatchSpec(tokens, 1))
        torch.testing.assert_close(fast(w, batch), forward(w, batch))


def test_outside_of_a_trace_a_while_loop_has_no_gradient():
    w = torch.tensor(2.0, requires_grad=True)
    out = fg.while_loop(lambda c: c < 9, lambda c: c * w, torch.tensor(1.0))
    assert out == 16
    with pytest.raises(fg.errors.TransformError, match=r"fg.fori_loop\(0, n"):
        out.backward()
    with pytest.raises(fg.errors.TransformError, match="not counted"):
        grad(lambda w: fg.while_loop(lambda c: c < 9, lambda c: c * w, w))(torch.tensor(2.0))


@pytest.mark.parametrize("inner", ["cond", "scan's y", "scan's carry"])
def test_an_inner_function_may_return_what_it_is_given(inner: str):
    def yes(c: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        if inner == "cond":
            return fg.cond(c.sum() > 0, lambda u: u, lambda u: u * 2, c)
        if inner == "scan's y":
            return fg.scan(lambda h, x: (h + x, c), c * 1, rows)[1][0]
        return fg.scan(lambda h, x: (c, x), c * 1, rows)[0]

    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([x, x])
        return torch.func.grad(
            lambda a: fg.cond(x.sum() > 0, yes, lambda c, r: c * 3, a, rows).square().sum()
        )(w)

    w, x = torch.tensor([1.0, -2.0, 3.0, 0.5]), torch.ones(4)
    fast = fg.graphify(step, stage="x", modes="FULL", recorder="tape")
    for sign in (1, -1):
        torch.testing.assert_close(fast(w, x * sign), step(w, x * sign))
