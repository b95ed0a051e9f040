"""`torch.func` inside a graphified function: the same as bare, in every mode; nothing is frozen."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import toys
from torch import Tensor
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp, vmap

import fngraph as fg
from fngraph.core import trees
from fngraph.errors import BranchError, TransformError
from tests.traced_once import Kept, traced_once

CLOSE = {"atol": 1e-5, "rtol": 1e-4}
DOUBLE = {"dtype": torch.float64}
OVER: dict[str, Any] = {"donate": "c", "stage": "b", "limits": toys.LIMITS, "sizes": toys.SIZES}


def steps(device: Any) -> list[toys.Batch]:
    """Prefill, mixed and decode; T = R, T > R, one of each, on and between the rungs."""
    batches = [
        toys.batch(3, 5), toys.batch((2, 3), (1, 5), seed=1), toys.decode(2, past=6, seed=2),
        toys.batch(1), toys.batch(2, seed=3), toys.decode(3, past=8, seed=4),
    ]  # fmt: skip
    return [toys.on(batch, device) for batch in batches]


@pytest.fixture(scope="module")
def traces() -> Kept:
    """Of each function, for all modes."""
    return {}


def check(
    fn: Any, params: Any, cache: Any, modes: str, recorder: str, device: Any, *traced: Any
) -> Any:
    """`fn` graphified equals `fn`, and each step ran as what the modes say. The captured step.

    Args:
        traced: what `traced_once` takes, for a function that is tried in several modes.
    """
    params, cache = toys.moved((params, cache), device)
    fast = fg.graphify(fn, modes=modes, recorder=recorder, **OVER)
    with traced_once(*traced) if traced else contextlib.nullcontext():
        for batch in steps(device):
            want, after = fn(params, toys.clone(cache), batch)
            got, back = fast(params, cache, batch)
            assert back is cache or not toys.leaves(cache)
            toys.assert_trees(got, want, **CLOSE)
            toys.assert_trees(cache, after, **CLOSE)
    resolved = fg.Mode.parse(modes)
    assert {mode for _, _, mode in fast.stats.counts} == {resolved.decode, resolved.mixed}
    assert fast.stats.steps == len(steps(device))
    return fast.steps[0]


# --- without a primitive --------------------------------------------------------------------------


def mlp_loss(p: Any, x: Tensor) -> Tensor:
    """A loss of one row (E,)."""
    return ((torch.tanh(x @ p["w1"]) @ p["w2"]) ** 2).sum()


def mlp_params() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    return {"embed": draw(toys.V, toys.E), "w1": draw(toys.E, 5), "w2": draw(5, 3)}


def per_token(fn: Any) -> Any:
    """A forward that maps `fn(params, row)` over the tokens."""
    return lambda p, c, b: (vmap(fn, in_dims=(None, 0))(p, p["embed"][b.token_ids]), c)


def double_vjp(p: Any, x: Tensor) -> Tensor:
    _, pull = vjp(lambda x: mlp_loss(p, x), x)
    return vjp(lambda u: pull(u)[0], torch.zeros_like(x[0]))[1](torch.ones_like(x))[0]


PER_TOKEN = {
    "vmap": lambda p, x: torch.tanh(x @ p["w1"]),
    "vmap(grad)": lambda p, x: grad(mlp_loss)(p, x)["w1"],
    "vmap(grad) of the row": lambda p, x: grad(mlp_loss, argnums=1)(p, x),
    "vmap(grad_and_value)": lambda p, x: grad_and_value(mlp_loss, argnums=1)(p, x),
    "vmap(jvp)": lambda p, x: jvp(lambda x: mlp_loss(p, x), (x,), (torch.ones_like(x),)),
    "vmap(jvp by two vjps)": double_vjp,
    "vmap(vjp)": lambda p, x: vjp(torch.tanh, x)[1](x)[0],
    "vmap(jacrev)": lambda p, x: jacrev(lambda x: torch.tanh(x @ p["w1"]))(x),
    "vmap(jacfwd)": lambda p, x: jacfwd(lambda x: torch.tanh(x @ p["w1"]))(x),
    "vmap(hessian)": lambda p, x: torch.func.hessian(lambda x: mlp_loss(p, x))(x),
    "vmap(vmap)": lambda p, x: vmap(lambda w: x * w)(p["w1"].T),
    "vmap(per-sample clipping)": lambda p, x: clipped(grad(mlp_loss)(p, x)),
}


def clipped(grads: Any) -> Any:
    norm = sum(g.square().sum() for g in grads.values()).sqrt()
    return {name: g / norm.clamp(min=1) for name, g in grads.items()}


@pytest.mark.sampled(12)
@pytest.mark.parametrize("modes", ["NONE", "PIECEWISE", "FULL"])
@pytest.mark.parametrize("what", PER_TOKEN)
def test_transforms_over_tokens(recorder_name, device, what: str, modes: str, traces: Kept):
    fn, kept = per_token(PER_TOKEN[what]), (traces, (what, device))
    check(fn, mlp_params(), {}, modes, recorder_name, device, *kept)


def masked_mean(p: Any, b: Any) -> Tensor:
    """Padding rows count for nothing."""
    real_T = b.slot_mapping >= 0
    loss_T = vmap(mlp_loss, in_dims=(None, 0))(p, p["embed"][b.token_ids])
    return torch.where(real_T, loss_T, 0).sum() / real_T.sum()


def trained(p: Any, c: Any, b: Any) -> Any:
    """Parameters are the state: SGD."""
    grads, loss = grad_and_value(masked_mean)(c, b)
    return loss, {name: w - 0.1 * grads[name] for name, w in c.items()}


def tangent(p: Any, c: Any, b: Any) -> Any:
    """A jvp in which some inputs have no tangent."""
    bend = lambda w1: torch.tanh(p["embed"][b.token_ids] @ w1 + 1) @ p["w2"] * 0.5 - 1  # noqa: E731
    return jvp(bend, (p["w1"],), (torch.ones_like(p["w1"]),)), c


def reversed_by_hand(p: Any, c: Any, b: Any) -> Any:
    """torch.autograd inside."""
    leaves = {name: w.detach().clone().requires_grad_() for name, w in p.items()}
    with torch.enable_grad():
        loss = masked_mean(leaves, b)
        grads = torch.autograd.grad(loss, list(leaves.values()))
    return (loss.detach(), grads), c


@pytest.mark.parametrize("modes", toys.MODES)
@pytest.mark.parametrize("fn", [trained, tangent, reversed_by_hand])
def test_transforms_of_the_whole_batch(recorder_name, device, fn: Any, modes: str, traces: Kept):
    held, donated = ({}, mlp_params()) if fn is trained else (mlp_params(), {})
    check(fn, held, donated, modes, recorder_name, device, traces, (fn, device))


def test_a_tangent_of_zero_stays_so_next_to_infinity(recorder_name, device):
    """0 * inf would be NaN: masked scores over a temperature, say."""

    def forward(p: Any, c: Any, b: Any) -> Any:
        first_5 = torch.arange(5, device=p["w1"].device) == 0

        def masked(w1: Tensor) -> Tensor:
            scores = (p["embed"][b.token_ids] @ w1).masked_fill(first_5, float("-inf"))
            return (scores * p["w2"][0, 0].abs() / 0.7).softmax(-1)

        return jvp(masked, (p["w1"],), (torch.ones_like(p["w1"]),)), c

    (want, slope), _ = forward(mlp_params(), {}, steps("cpu")[0])
    assert slope.isfinite().all() and want.isfinite().all() and slope.any()
    check(forward, mlp_params(), {}, "FULL", recorder_name, device)


def test_a_module_by_functional_call(recorder_name, device):
    net = torch.nn.Sequential(torch.nn.Linear(toys.E, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
    weights = {name: w.detach() for name, w in net.named_parameters()}
    params = {"embed": mlp_params()["embed"], "net": weights}

    def forward(p: Any, c: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        loss = lambda w, x: functional_call(net, w, (x,)).square().sum()  # noqa: E731
        return (functional_call(net, p["net"], (x,)), vmap(grad(loss), (None, 0))(p["net"], x)), c

    for modes in ("NONE", "PIECEWISE", "FULL"):
        check(forward, params, {}, modes, recorder_name, device)


# --- through attention ----------------------------------------------------------------------------


def loss_of(p: Any, c: Any, b: Any) -> tuple[Tensor, Any]:
    """A loss over the true rows, and the cache."""
    logits_TV, c = toys.attend(p, c, b)
    real_T1 = (b.slot_mapping >= 0)[:, None]
    return torch.where(real_T1, logits_TV.tanh(), 0).square().sum(), c


def closed_over(p: Any, c: Any, b: Any) -> Any:
    return grad(lambda p: loss_of(p, c, b)[0])(p), c


def as_aux(p: Any, c: Any, b: Any) -> Any:
    return grad(lambda p: loss_of(p, c, b), has_aux=True)(p)


def passed_in(p: Any, c: Any, b: Any) -> Any:
    return grad(loss_of, has_aux=True)(p, c, b)


def by_autograd(p: Any, c: Any, b: Any) -> Any:
    leaves, tree = trees.flatten(p)
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    with torch.enable_grad():
        loss, _ = loss_of(trees.unflatten(tree, leaves), c, b)
        return torch.autograd.grad(loss, leaves), c


def in_forward_mode(p: Any, c: Any, b: Any) -> Any:
    ones = trees.map_leaves(torch.ones_like, p)
    logits, slopes, c = jvp(lambda p: toys.attend(p, c, b), (p,), (ones,), has_aux=True)
    return (logits, slopes), c


def over_heads(p: Any, c: Any, b: Any) -> Any:
    """vmap over several heads of the model; all write the same to the cache they share."""
    heads = torch.stack([p["head"], -p["head"]])
    return vmap(lambda head: grad(lambda h: loss_of({**p, "head": h}, c, b)[0])(head))(heads), c


def over_samples(p: Any, c: Any, b: Any) -> Any:
    """Per-sample gradients of projections; each sample has a cache of its own for a call."""
    scales = torch.tensor([0.5, 1.0, 2.0], device=p["embed"].device)
    weights = p["layers"][0]["qkv"].split([toys.H * toys.D, toys.K * toys.D, toys.K * toys.D], 1)

    def loss(weights: Any, scale: Tensor) -> Tensor:
        x_TE = p["embed"][b.token_ids]
        qkv = [(x_TE @ (w * scale)).unflatten(-1, (-1, toys.D)) for w in weights]
        return torch.where((b.slot_mapping >= 0)[:, None, None],
                           fg.ops.attention(*qkv, c[0], b)[0], 0).square().sum()  # fmt: skip

    return vmap(grad(loss), in_dims=(None, 0))(weights, scales), c


def of_scales(p: Any, c: Any, b: Any) -> Any:
    """Of the scales of a cache, which are made within forward, a head each."""
    qkv = (p["embed"][b.token_ids] @ p["layers"][0]["qkv"]).unflatten(-1, (-1, toys.D))
    q, k, v = qkv.split([toys.H, toys.K, toys.K], 1)

    def loss(scales: Tensor) -> Any:
        out, new = fg.ops.attention(q, k, v, c[0], b, k_scale=scales[0], v_scale=scales[1])
        return torch.where((b.slot_mapping >= 0)[:, None, None], out, 0).square().sum(), new

    slopes, new = grad(loss, has_aux=True)(p["embed"][:2, : toys.K].abs() + 0.5)
    return slopes, type(c)([new, *c[1:]])


THROUGH_ATTENTION = [closed_over, as_aux, passed_in, by_autograd, in_forward_mode, over_heads,
                     over_samples, of_scales]  # fmt: skip


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("fn", "modes"),
    [(as_aux, modes) for modes in toys.MODES]
    + [(fn, modes) for fn in THROUGH_ATTENTION if fn is not as_aux for modes in toys.MODES[1:3]],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_transforms_through_attention(recorder_name, device, fn: Any, modes: str, traces: Kept):
    params, cache = toys.attention_params(1, **DOUBLE), toys.attention_cache(1, **DOUBLE)
    kept = traces, (fn, device)
    step = check(fn, params, cache, modes, recorder_name, device, *kept)
    assert any("attention is inlined" in note for note in step.notes)
    assert "copied" not in {row.how for row in step.donation.rows}


def dense_loss(p: Any, b: toys.Batch) -> Tensor:
    """`loss_of` a prefill of whole requests, with attention by hand and no cache."""
    x_TE = p["embed"][b.token_ids]
    owner_T = torch.arange(b.spec.num_reqs).repeat_interleave(b.query_start_loc.diff())
    order_T = torch.arange(len(owner_T))
    seen_TT = (owner_T[:, None] == owner_T) & (order_T[:, None] >= order_T)
    for layer in p["layers"]:
        qkv = (x_TE @ layer["qkv"]).unflatten(-1, (toys.H + 2 * toys.K, toys.D))
        q_THD, k_TKD, v_TKD = qkv.split([toys.H, toys.K, toys.K], dim=1)
        k_THD, v_THD = (x.repeat_interleave(toys.H // toys.K, 1) for x in (k_TKD, v_TKD))
        scores_HTT = torch.einsum("thd,shd->hts", q_THD, k_THD) * toys.D**-0.5
        weights_HTT = scores_HTT.masked_fill(~seen_TT, float("-inf")).softmax(-1)
        mixed_THD = torch.einsum("hts,shd->thd", weights_HTT, v_THD)
        x_TE = x_TE + torch.tanh(mixed_THD.flatten(1) @ layer["out"])
    return (x_TE @ p["head"]).tanh().square().sum()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("fn", "modes", "dtype"),
    [(closed_over, None, torch.float64), (closed_over, None, torch.float32),
     (as_aux, "FULL", torch.float64), (by_autograd, "PIECEWISE", torch.float32)],
    ids=["bare", "bare, float32", "FULL", "PIECEWISE, float32"],
)  # fmt: skip
def test_gradients_are_those_of_dense_attention_by_hand(fn: Any, modes: str | None, dtype: Any):
    params, cache = toys.attention_params(dtype=dtype), toys.attention_cache(dtype=dtype)
    exact = {"atol": 1e-10, "rtol": 1e-10} if dtype is torch.float64 else CLOSE
    run = fn if modes is None else fg.graphify(fn, modes=modes, **OVER)
    for batch in (toys.batch(3, 5), toys.batch(4, 2, 1, seed=1), toys.batch(7, seed=2)):
        leaves, tree = trees.flatten(params)
        leaves = [x.clone().requires_grad_() for x in leaves]
        loss = dense_loss(trees.unflatten(tree, leaves), batch)
        want = torch.autograd.grad(loss, leaves)
        assert all(g.any() for g in want)
        got, _ = run(params, cache, batch)
        toys.assert_trees(tuple(toys.leaves(got)), tuple(want), **exact)
    if modes is not None:
        assert run.stats.share(modes) == 1


def test_without_a_transform_attention_is_a_cut_and_nothing_is_inlined():
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", limits=toys.LIMITS)
    traced = fast.trace(toys.attention_params(), toys.attention_cache(), batch=toys.batch(1))
    assert traced.notes == () and "inlined" not in repr(traced)
    assert len(traced.split().cuts) == 2


def test_a_transform_beside_attention_leaves_it_a_cut(recorder_name, device):
    def forward(p: Any, c: Any, b: Any) -> Any:
        logits, c = toys.attend(p, c, b)
        return vmap(grad(lambda row: row.logsumexp(-1)))(logits), c

    params, cache = toys.attention_params(), toys.attention_cache()
    step = check(forward, params, cache, "FULL_AND_PIECEWISE", recorder_name, device)
    assert len(step[step.dispatch(toys.batch(3).spec).descriptor].calls) > 1 and step.notes == ()


def test_an_inlined_attention_does_not_excuse_padding_elsewhere():
    """What goes into attention and comes out keeps rows; a loss over all rows does not."""

    loss = lambda p, c, b: toys.attend(p, c, b)[0].square().sum()  # noqa: E731
    fast = fg.graphify(lambda p, c, b: (grad(loss)(p, c, b), c), **OVER)
    with pytest.raises(fg.errors.RowsError, match=r"output\[0\]"):
        fast(toys.attention_params(1), toys.attention_cache(1), toys.batch(2))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["before", "after"])
def test_padding_that_goes_through_an_inlined_attention_is_seen(where: str):
    """In forward from before it, and in its gradient from behind it."""

    def forward(p: Any, c: Any, b: Any) -> Any:
        embed = p["embed"][b.token_ids]
        x = embed.flip(0) if where == "before" else embed
        real = (b.slot_mapping >= 0)[:, None, None]

        def loss(x: Tensor) -> Tensor:
            qkv = (x @ p["layers"][0]["qkv"]).unflatten(-1, (-1, toys.D))
            q, k, v = qkv.split([toys.H, toys.K, toys.K], 1)
            out = fg.ops.attention(q, k, v, c[0], b)[0]
            weights = embed.flip(0)[:, :1, None] if where == "after" else 1
            return torch.where(real, out * weights, 0).sum()

        return grad(loss)(x), c

    fast = fg.graphify(forward, **OVER)
    with pytest.raises(fg.errors.RowsError, match="flip"):
        fast(toys.attention_params(1), toys.attention_cache(1), toys.batch(2))


def test_a_held_cache_is_not_written_by_an_inlined_attention_either():
    fast = fg.graphify(lambda p, c, b: closed_over(p, c, b)[0], **OVER | {"donate": None})
    with pytest.raises(fg.errors.MutationError, match=r"c\[0\]\[0\].*donate=\"c\""):
        fast(toys.attention_params(), toys.attention_cache(), toys.batch(2))


# --- what cannot be -------------------------------------------------------------------------------

NO_RULE = {
    "grad": lambda x: grad(lambda x: toys.double(x).sum())(x),
    "vmap": lambda x: vmap(toys.double)(x),
    "jvp": lambda x: jvp(toys.double, (x,), (x,))[1],
    "vmap(grad)": lambda x: vmap(grad(lambda x: toys.double(x).sum()))(x),
}


@pytest.mark.parametrize("what", NO_RULE)
def test_a_primitive_without_a_rule_is_an_error_in_a_trace_too(what: str):
    forward = lambda p, c, b: (NO_RULE[what](p["embed"][b.token_ids]), c)  # noqa: E731
    with pytest.raises(TransformError, match=r"toys.py:\d+: .*toy_double.*no gradient rule"):
        fg.graphify(forward, **OVER)(mlp_params(), {}, toys.batch(3))


FIXES_T = {
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, (toys.E,)),
    "cat": lambda x: torch.cat([x, torch.ones_like(x)], 1),
}


@pytest.mark.parametrize("op", FIXES_T)
def test_a_forward_mode_derivative_that_fixes_the_tokens_names_the_way_round(op: str):
    """And the way round, as it says it, gives the tangent."""

    def forward(p: Any, c: Any, b: Any) -> Any:
        x = p["embed"][b.token_ids]
        return jvp(FIXES_T[op], (x,), (x,))[1], c

    def way_round(p: Any, c: Any, b: Any) -> Any:
        f, x = FIXES_T[op], p["embed"][b.token_ids]
        pull = vjp(f, x)[1]
        return vjp(lambda u: pull(u)[0], torch.zeros_like(f(x)))[1](x)[0], c

    with pytest.raises(
        BranchError, match=r"test_functorch.py:\d+: .*jvp(.|\n)*torch.func.vjp\(lambda"
    ):
        check(forward, mlp_params(), {}, "FULL", "tape", "cpu")
    check(way_round, mlp_params(), {}, "FULL", "tape", "cpu")
    batch = toys.batch(3)
    toys.assert_trees(way_round(mlp_params(), {}, batch), forward(mlp_params(), {}, batch), **CLOSE)


def test_a_batching_rule_that_fixes_the_tokens_names_the_way_round():
    """And both ways round give what bare vmap gives."""

    def each(p: Any, token_ids: Tensor, over: Any) -> Any:
        x = p["embed"][token_ids]
        return over(lambda scale: torch.cat([x * scale, x], 1))(p["w1"][0])

    loop = lambda f: lambda scales: torch.stack([f(scale) for scale in scales])  # noqa: E731
    forward = lambda p, c, b: (each(p, b.token_ids, vmap), c)  # noqa: E731
    with pytest.raises(BranchError, match=r"test_functorch.py:\d+: .*vmap.*torch.stack\(\["):
        check(forward, mlp_params(), {}, "FULL", "tape", "cpu")
    looped = lambda p, c, b: (each(p, b.token_ids, loop).movedim(0, 1), c)  # noqa: E731
    check(looped, mlp_params(), {}, "FULL", "tape", "cpu")
    exact = fg.graphify(lambda p, b: each(p, b["token_ids"], vmap), stage="b")
    for batch in (toys.batch(3), toys.batch(4, 2)):
        got = exact(mlp_params(), {"token_ids": batch.token_ids})
        torch.testing.assert_close(got, each(mlp_params(), batch.token_ids, vmap))
    assert exact.stats.share("FULL") == 1


def test_vmap_over_a_literal() -> None:
    """What is made within forward has no argument's memory."""
    fast = fg.graphify(lambda w, x: (vmap(lambda v: v * 2)(torch.ones(3)) + x) * w, stage="x")
    assert fast(torch.ones(1), torch.ones(3)).tolist() == [3, 3, 3]
