"""`fg.checkpoint`: the gradients of the body without the mark, from arguments alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, jvp, vmap

import fngraph as fg
from fngraph.errors import ClosureError, MutationError, RandomError


def layer(w: Tensor, x: Tensor, *, power: int = 1) -> Tensor:
    return x + torch.tanh(x @ w) ** power


def loss_of(body: Callable[..., Any]) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda w, x: body(w, body(w, x, power=2)).square().sum()


PLAIN, MARKED = loss_of(layer), loss_of(fg.checkpoint(layer))


@pytest.fixture
def wx() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(6, 6, generator=generator), torch.randn(5, 6, generator=generator)


def by_autograd(loss: Any, w: Tensor, x: Tensor) -> Tensor:
    leaf = w.clone().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(loss(leaf, x), leaf)[0]


WAYS: dict[str, Callable[..., Any]] = {
    "grad": lambda loss, w, x: grad(loss)(w, x),
    "of both": lambda loss, w, x: grad(loss, (0, 1))(w, x),
    "of the second": lambda loss, w, x: grad(lambda w: grad(loss)(w, x).square().sum())(w),
    "for each row": lambda loss, w, x: vmap(grad(loss), (None, 0))(w, x),
    "tangents": lambda loss, w, x: jvp(loss, (w, x), (w, x)),
    "autograd": by_autograd,
    "none": lambda loss, w, x: loss(w, x),
}


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_those_without_the_mark(way: str, wx: Any):
    exactly = {"rtol": 0.0, "atol": 0.0} if way == "grad" else {}
    torch.testing.assert_close(WAYS[way](MARKED, *wx), WAYS[way](PLAIN, *wx), **exactly)


@pytest.mark.parametrize("way", ["grad", "of the second", "autograd"])
def test_a_captured_step_has_the_same_gradients(way: str, wx: Any):
    def step_of(loss: Any) -> Any:
        return lambda w, x: (w - 0.1 * WAYS[way](loss, w, x), loss(w, x))

    w, x = wx
    fast = fg.graphify(step_of(MARKED), donate="w", stage="x", modes="FULL", recorder="tape")
    got, loss = fast(w.clone(), x)
    want, want_loss = step_of(PLAIN)(w.clone(), x)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(loss, want_loss)


def nested(mark: Any) -> Any:
    """A marked body within a marked one."""
    layers = mark(lambda w, x: mark(layer)(w, mark(layer)(w, x)))
    return lambda w, x: layers(w / 4, layers(w / 4, x)).square().sum()


def in_a_loop(mark: Any) -> Any:
    """A marked body, of which a loop takes the gradient turn by turn."""
    turn = mark(layer)

    def loss(w: Tensor, x: Tensor) -> Tensor:
        weights = torch.stack([w, w.t()])
        return fg.scan(lambda h, w: (turn(w, h), None), x, weights)[0].square().sum()

    return loss


@pytest.mark.parametrize("where", [nested, in_a_loop])
@pytest.mark.parametrize("way", ["grad", "of the second", "autograd"])
def test_a_body_is_marked_within_others(where: Any, way: str, wx: Any):
    want = WAYS[way](where(lambda body: body), *wx)
    marked = where(fg.checkpoint)
    torch.testing.assert_close(WAYS[way](marked, *wx), want, rtol=1e-5, atol=1e-5)
    fast = fg.graphify(
        lambda w, x: WAYS[way](marked, w, x), stage="x", modes="FULL", recorder="tape"
    )
    torch.testing.assert_close(fast(*wx), want, rtol=1e-5, atol=1e-5)


def test_what_is_no_gradient_goes_through(wx: Any):
    def body(w: Tensor, tree: dict[str, Any]) -> Any:
        x = tree["x"]
        return {"y": torch.tanh(x @ w) * tree["mask"], "same": x, "count": (x > 0).long()}, 5, None

    def loss(w: Tensor, x: Tensor, mark: Any = fg.checkpoint) -> Tensor:
        out, five, nothing = mark(body)(w, {"x": x, "mask": (x > 0).long()})
        assert five == 5 and nothing is None and out["count"].dtype is torch.int64
        return (out["y"] * out["count"]).sum() + out["same"].sum()

    want = grad(lambda w, x: loss(w, x, lambda body: body), (0, 1))(*wx)
    torch.testing.assert_close(grad(loss, (0, 1))(*wx), want)


def test_the_backward_makes_activations_again():
    """Of each marked layer the graph has the ops twice, and no activation lives through both."""

    def step_of(body: Any) -> Any:
        def step(w: Tensor, x: Tensor) -> Any:
            def loss(w: Tensor) -> Tensor:
                y = x
                for _ in range(8):
                    y = body(w, y)
                return y.sum()

            return w - 0.1 * grad(loss)(w), x.sum()

        return step

    def wide(w: Tensor, x: Tensor) -> Tensor:  # eight times as wide within as what it is given
        return (
            x + torch.tanh(torch.tanh(torch.tanh(x.repeat(1, 8)))).unflatten(1, (8, 6)).sum(1) @ w
        )

    counts, peaks = [], []
    for body in (wide, fg.checkpoint(wide)):
        fast = fg.graphify(step_of(body), donate="w", stage="x", modes="FULL", recorder="tape")
        w, x = torch.eye(6), torch.randn(64, 6)
        code = fast.trace(w, batch=x).graph.gm.code
        counts.append(code.count("aten.tanh.default"))
        fast(w, x)
        peaks.append(fast.steps[0].memory.rows[0].estimated.pool)
    assert counts == [24, 48]
    assert peaks[1] < 0.4 * peaks[0]


BAD: dict[str, tuple[Callable[..., Any], type[Exception], str]] = {
    "reads what it was not given": (
        lambda w, x: fg.checkpoint(lambda y: torch.tanh(y @ w))(x), ClosureError,
        r"test_checkpointing\.py:\d+: .* reads a tensor \[6, 6\] that is no argument",
    ),
    "draws": (
        lambda w, x: fg.checkpoint(lambda w, y: (y @ w) * torch.rand(6, generator=GENERATOR))(w, x),
        RandomError, r"draws random numbers, and its second run",
    ),
    "writes": (
        lambda w, x: fg.checkpoint(lambda w, y: y.add_(1) @ w)(w, x * 1), MutationError,
        r"writes into an argument, which its second run",
    ),
}  # fmt: skip
GENERATOR = torch.Generator()


@pytest.mark.parametrize("where", ["bare", "in a trace"])
@pytest.mark.parametrize("name", BAD)
def test_what_would_be_a_wrong_gradient_is_refused(name: str, where: str, wx: Any):
    fn, error, told = BAD[name]
    w, x = wx

    def step(w: Tensor, x: Tensor) -> Any:
        return w - grad(lambda w: fn(w, x).sum())(w), x.sum()

    with pytest.raises(error, match=told):
        if where == "bare":
            step(w, x)
        else:
            fg.graphify(step, donate="w", stage="x", generators=(GENERATOR,))(w, x)


def test_a_closed_over_weight_has_its_gradient_by_autograd(wx: Any):
    """torch's own checkpoint, which autograd goes through, sees what the body reads."""
    closed = lambda w, x: fg.checkpoint(lambda y: layer(w, y))(x).sum()  # noqa: E731
    want = by_autograd(lambda w, x: layer(w, x).sum(), *wx)
    torch.testing.assert_close(by_autograd(closed, *[x.requires_grad_() for x in wx]), want)
    with pytest.raises(RandomError):
        by_autograd(lambda w, x: BAD["draws"][0](w, x).sum(), *wx)
