"""Gradients, tangents and `torch.func` transforms through attention, against its definition."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import test_attention
import torch
import toys
from test_attention import naive
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jvp, vjp, vmap

from fngraph.core import trees
from fngraph.errors import FnGraphError, TransformError
from fngraph.ops import AttentionMeta, attention
from fngraph.testing.cases import Case, case

MIXED = ((1, 9), (6, 0), (1, 2), (3, 8))
ARGNUMS = (0, 1, 2)


def run(c: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The output over a cache of its own."""
    return attention(q, k, v, (c.k_cache.clone(), c.v_cache.clone()), c.meta, **options)[0]


def defined(c: Case, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    """The same by definition: float64, loops, plain autograd."""
    return naive(dataclasses.replace(c, q=q, k=k, v=v), **options)


def energy(out: Tensor) -> Tensor:
    """A loss in which every row counts otherwise."""
    weights = torch.linspace(0.5, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return (out.square() * weights).sum()


def gradients(fn: Any, *inputs: Tensor) -> tuple[Tensor, ...]:
    """By torch.autograd."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(energy(fn(*leaves)), leaves)


def close(got: Any, want: Any, dtype: torch.dtype = torch.float64) -> None:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-3
    torch.testing.assert_close(got, want, atol=tolerance, rtol=tolerance, check_dtype=False)


# --- reverse mode ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rows", test_attention.BATCHES.values(), ids=test_attention.BATCHES)
def test_gradients_are_those_of_the_definition(rows: Any, dtype: torch.dtype):
    """Rows and requests of padding have none, and repeat no other one's."""
    c = case(*rows, pad_tokens=3, pad_reqs=2, dtype=dtype)
    qkv = (c.q, c.k, c.v)
    want = gradients(lambda *x: defined(c, *x), *qkv)
    assert want[2].any()
    close(gradients(lambda *x: run(c, *x), *qkv), want, dtype)
    close(grad(lambda *x: energy(run(c, *x)), argnums=ARGNUMS)(*qkv), want, dtype)


@pytest.mark.parametrize("option", [{"window": 3}, {"softcap": 2.0}, {"scale": 0.3}], ids=repr)
def test_gradients_with_options(option: dict[str, Any]):
    c = case(*MIXED, heads=(6, 2, 8), dtype=torch.float64)
    qkv = (c.q, c.k, c.v)
    want = gradients(lambda *x: defined(c, *x, **option), *qkv)
    close(grad(lambda *x: energy(run(c, *x, **option)), argnums=ARGNUMS)(*qkv), want)


OPTIONS: dict[str, Any] = {
    "scale": 0.3, "window": 3, "softcap": 2.0, "causal": False,
    "sinks": torch.tensor([0.5, 2.0, -1.0, 3.0]), "k_scale": torch.tensor([0.5, 3.0]),
    "v_scale": torch.tensor(4.0),
}  # fmt: skip
ALL_OPTIONS = inspect.signature(attention).parameters.values()
WAYS: dict[str, Any] = {
    "autograd": lambda fn, q: fn(q.clone().requires_grad_()),
    "grad": lambda fn, q: grad(lambda q: _with_energy(fn(q)), has_aux=True)(q)[1],
    "jvp": lambda fn, q: jvp(fn, (q,), (q,))[0],
    "vmap": lambda fn, q: trees.map_leaves(lambda x: x[0], vmap(fn)(q[None])),
}


def _with_energy(made: tuple[Tensor, Any]) -> tuple[Tensor, Any]:
    return energy(made[0]), made


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("how", WAYS)
@pytest.mark.parametrize("option", [x.name for x in ALL_OPTIONS if x.kind is x.KEYWORD_ONLY])
def test_every_option_counts_as_without_a_transform(option: str, how: str, dtype: torch.dtype):
    """What comes out, and what the cache holds then: the one passed and the one that returns."""
    options = {option: OPTIONS[option]}
    plain, c, without = (case(*MIXED, pad_tokens=2, dtype=dtype) for _ in range(3))
    want, kv = plain.run(**options), (c.k_cache, c.v_cache)
    assert not want.allclose(without.run())
    got, new = WAYS[how](lambda q: attention(q, c.k, c.v, kv, c.meta, **options), c.q)
    loose = {"atol": 1e-2, "rtol": 1e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(got, want, **loose)
    for caches in (kv, new):
        torch.testing.assert_close(caches, (plain.k_cache, plain.v_cache), equal_nan=True)


def test_gradients_of_the_scales_of_a_cache():
    """Past keys and values are read times their scale; new ones are divided by it before."""
    c = case(*MIXED, dtype=torch.float64)
    scales = torch.tensor([0.5, 3.0], dtype=torch.float64), torch.tensor([4.0, 0.2]).double()

    def wide(k_scale: Tensor, v_scale: Tensor) -> Tensor:
        caches = zip((c.k_cache, c.v_cache), (k_scale, v_scale))
        k_cache, v_cache = (cache.nan_to_num() * scale[:, None] for cache, scale in caches)
        return naive(dataclasses.replace(c, k_cache=k_cache, v_cache=v_cache))

    def scaled(k_scale: Tensor, v_scale: Tensor) -> Tensor:
        return run(c, c.q, c.k, c.v, k_scale=k_scale, v_scale=v_scale)

    want = gradients(wide, *scales)
    assert all(x.abs().min() > 1e-3 for x in want)
    close(gradients(scaled, *scales), want, torch.float32)


@pytest.mark.parametrize("which", ARGNUMS)
def test_a_gradient_for_one_input_alone(which: int):
    c = case(*MIXED, dtype=torch.float64)
    qkv = (c.q, c.k, c.v)
    want = gradients(lambda *x: defined(c, *x), *qkv)[which]
    close(grad(lambda *x: energy(run(c, *x)), argnums=which)(*qkv), want)


def test_gradients_flow_through_the_cache_from_step_to_step():
    whole = case((7, 0), dtype=torch.float64)
    qkv = (whole.q, whole.k, whole.v)

    def in_two(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kv, parts = (whole.k_cache.clone(), whole.v_cache.clone()), []
        for a, b in ((0, 4), (4, 7)):
            meta = AttentionMeta(
                whole.meta.slot_mapping[a:b], torch.tensor([b], dtype=torch.int32),
                torch.tensor([0, b - a], dtype=torch.int32), whole.meta.block_tables,
            )  # fmt: skip
            out, kv = attention(q[a:b], k[a:b], v[a:b], kv, meta)
            parts.append(out)
        return torch.cat(parts)

    want = gradients(lambda *x: defined(whole, *x), *qkv)
    close(gradients(in_two, *qkv), want)
    close(grad(lambda *x: energy(in_two(*x)), argnums=ARGNUMS)(*qkv), want)


def test_the_cache_itself_has_gradients():
    c = case((2, 5), dtype=torch.float64)
    k_cache = c.k_cache.nan_to_num(0.5)

    def loss(k_cache: Tensor) -> Tensor:
        return energy(attention(c.q, c.k, c.v, (k_cache.clone(), c.v_cache), c.meta)[0])

    got = grad(loss)(k_cache)
    eps = torch.zeros_like(k_cache)
    where = tuple((got != 0).nonzero()[3])
    eps[where] = 1e-6
    slope = (loss(k_cache + eps) - loss(k_cache - eps)) / 2e-6
    torch.testing.assert_close(got[where], slope, atol=1e-7, rtol=1e-6)
    written = got.flatten(0, 1)[c.meta.slot_mapping]
    assert got.any() and not written.any()  # what is overwritten does not count


@pytest.mark.parametrize("how", ["closed over", "passed in", "autograd"])
def test_the_cache_is_written_all_the_same_and_carries_no_gradient(how: str):
    c, plain = case(*MIXED, pad_tokens=2), case(*MIXED, pad_tokens=2)
    plain.run()
    kv = [c.k_cache, c.v_cache]
    if how == "closed over":
        new = grad(lambda q: _with_cache(c, q, kv), has_aux=True)(c.q)[1]
    elif how == "passed in":
        new = grad(lambda q, kv: _with_cache(c, q, kv), has_aux=True)(c.q, kv)[1]
    else:
        new = _with_cache(c, c.q.clone().requires_grad_(), kv)[1]
    for got in (kv, new):
        assert isinstance(got, list)  # the container that was passed
        torch.testing.assert_close(got, [plain.k_cache, plain.v_cache], equal_nan=True)
    assert kv[0] is c.k_cache and not kv[0].requires_grad


def _with_cache(c: Case, q: Tensor, kv: Any) -> tuple[Tensor, Any]:
    out, new = attention(q, c.k, c.v, kv, c.meta)
    return energy(out), new


def test_without_gradients_the_primitive_runs():
    c = case((3, 2))
    c.q.requires_grad_()
    kv = (c.k_cache, c.v_cache)
    with torch.no_grad():
        assert attention(c.q, c.k, c.v, kv, c.meta)[1] is kv


# --- forward mode, and higher derivatives ---------------------------------------------------------


def test_tangents_are_those_of_the_definition():
    c = case(*MIXED, pad_tokens=2, dtype=torch.float64)
    qkv = (c.q, c.k, c.v)
    tangents = tuple(torch.randn_like(x) for x in qkv)
    _, want = jvp(lambda *x: defined(c, *x), qkv, tangents)
    _, got = jvp(lambda *x: run(c, *x), qkv, tangents)
    assert want.any()
    close(got, want)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(x, t) for x, t in zip(qkv, tangents)]
        close(forward_ad.unpack_dual(run(c, *duals)).tangent, want)


def test_derivatives_of_derivatives():
    c = case((2, 3), (1, 4), heads=(2, 1, 3), dtype=torch.float64)

    def along(fn: Any) -> Any:
        inner = grad(lambda k: energy(fn(c, c.q, k, c.v)))
        return grad(lambda k: inner(k).square().sum())(c.k)

    want = along(defined)
    assert want.any()
    close(along(run), want)
    hessian = torch.func.hessian(lambda k: energy(run(c, c.q, k, c.v)))(c.k)
    close(hessian, torch.func.hessian(lambda k: energy(defined(c, c.q, k, c.v)))(c.k))


def test_a_pullback():
    c = case(*MIXED, dtype=torch.float64)
    out, pull = vjp(lambda *x: run(c, *x), c.q, c.k, c.v)
    want, pull_too = vjp(lambda *x: defined(c, *x), c.q, c.k, c.v)
    cotangent = torch.randn_like(out)
    close((out, *pull(cotangent)), (want, *pull_too(cotangent)))


# --- vmap -----------------------------------------------------------------------------------------


def samples(n: int = 3) -> tuple[Case, tuple[Tensor, ...]]:
    """A batch, and q, k, v of several samples of it."""
    c = case(*MIXED, pad_tokens=2, dtype=torch.float64)
    return c, tuple(torch.randn(n, *x.shape, dtype=x.dtype) for x in (c.q, c.k, c.v))


def test_vmap_over_samples():
    c, qkv = samples()
    want = torch.stack([run(c, *x) for x in zip(*qkv)])
    close(vmap(lambda *x: run(c, *x))(*qkv), want)
    last = [x.movedim(0, -1) for x in qkv]
    close(vmap(lambda *x: run(c, *x), in_dims=-1, out_dims=2)(*last).movedim(2, 0), want)


def test_gradients_of_each_sample():
    c, qkv = samples()
    want = [torch.stack(x) for x in zip(*[gradients(lambda *x: defined(c, *x), *x)
                                          for x in zip(*qkv)])]  # fmt: skip
    per_sample = vmap(grad(lambda *x: energy(run(c, *x)), argnums=ARGNUMS))
    close(list(per_sample(*qkv)), want)
    whole = grad(lambda *x: energy_of_each(vmap(lambda *y: run(c, *y))(*x)), argnums=ARGNUMS)
    close(list(whole(*qkv)), want)


def energy_of_each(outs: Tensor) -> Tensor:
    return torch.stack([energy(out) for out in outs]).sum()


def test_samples_with_a_cache_each_write_it():
    c, (q, k, v) = samples()
    kv = tuple(x.expand(3, *x.shape).clone() for x in (c.k_cache, c.v_cache))
    want = [_stepped(c, *x) for x in zip(q, k, v)]
    out, new = vmap(lambda q, k, v, kv: attention(q, k, v, kv, c.meta))(q, k, v, kv)
    for i, (one, caches) in enumerate(want):
        close(out[i], one)
        for got in (kv, new):
            torch.testing.assert_close([x[i] for x in got], list(caches), equal_nan=True)


def _stepped(c: Case, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    return attention(q, k, v, (c.k_cache.clone(), c.v_cache.clone()), c.meta)


def test_samples_that_share_a_cache_leave_it_alone_and_get_one_each():
    c, (q, k, v) = samples()
    before = c.k_cache.clone()
    _, new = vmap(lambda q, k, v: attention(q, k, v, (c.k_cache, c.v_cache), c.meta))(q, k, v)
    assert torch.equal(test_attention.bits(c.k_cache), test_attention.bits(before))
    for i in range(3):
        _, want = _stepped(c, q[i], k[i], v[i])
        torch.testing.assert_close(new[0][i], want[0], equal_nan=True)


def test_samples_of_queries_alone_write_the_cache_once():
    c, (q, _, _) = samples()
    want, (k_cache, _) = _stepped(c, q[1], c.k, c.v)
    out, _ = vmap(lambda q: attention(q, c.k, c.v, (c.k_cache, c.v_cache), c.meta))(q)
    close(out[1], want)
    torch.testing.assert_close(c.k_cache, k_cache, equal_nan=True)


def test_samples_with_batches_of_their_own():
    a, b = (case((3, 5), (1, 7), dtype=torch.float64, seed=seed) for seed in (1, 2))
    want = [naive(a), naive(b)]
    both = [torch.stack(x) for x in zip(*[(c.q, c.k, c.v, c.k_cache, c.v_cache, *c.meta)
                                          for c in (a, b)])]  # fmt: skip
    out = vmap(lambda q, k, v, kc, vc, *meta: attention(q, k, v, (kc, vc), AttentionMeta(*meta))[0])
    close(out(*both), torch.stack(want))


def test_vmap_in_vmap():
    c, qkv = samples(4)
    want = torch.stack([run(c, *x) for x in zip(*qkv)])
    split = [x.unflatten(0, (2, 2)) for x in qkv]
    close(vmap(vmap(lambda *x: run(c, *x)))(*split).flatten(0, 1), want)


def test_vmap_over_another_dim_of_the_cache_is_refused():
    c, (q, k, v) = samples()
    kv = tuple(x[:, None].expand(-1, 3, -1, -1, -1).clone() for x in (c.k_cache, c.v_cache))
    over = vmap(lambda q, k, v, kv: attention(q, k, v, kv, c.meta)[0], in_dims=(0, 0, 0, 1))
    with pytest.raises(TransformError, match=r"test_transforms.py:\d+: .*dim 1.*in_dims=0"):
        over(q, k, v, kv)


# --- a module's parameters, and primitives without a rule -----------------------------------------


def test_parameters_upstream_by_functional_call():
    c = case(*MIXED, dtype=torch.float64)
    project = torch.nn.Linear(8, 8, dtype=torch.float64)
    params = {name: p.detach() for name, p in project.named_parameters()}

    def loss(fn: Any, params: Any) -> Tensor:
        q, k = (functional_call(project, params, (x,)) for x in (c.q, c.k))
        return energy(fn(c, q, k, c.v))

    want = grad(lambda p: loss(defined, p))(params)
    assert all(x.any() for x in want.values())
    close(grad(lambda p: loss(run, p))(params), want)


def _backward(x: Tensor) -> Any:
    return toys.double(x.clone().requires_grad_()).sum().backward()


def _dual(x: Tensor) -> Any:
    with forward_ad.dual_level():
        return toys.double(forward_ad.make_dual(x, x))


REFUSED = {
    "grad": lambda x: grad(lambda x: toys.double(x).sum())(x),
    "vjp": lambda x: vjp(toys.double, x),
    "jvp": lambda x: jvp(toys.double, (x,), (x,)),
    "vmap": lambda x: vmap(toys.double)(x),
    "vmap of grad": lambda x: vmap(grad(lambda x: toys.double(x).sum()))(x),
    "backward": _backward,
    "dual": _dual,
    "dual without gradients": torch.no_grad()(_dual),  # which are another thing
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_primitive_without_a_rule_refuses_and_is_never_silently_zero(what: str):
    x = torch.ones(3, 2)
    with pytest.raises(TransformError, match=r"toys.py:\d+: .*toy_double.*torch.no_grad") as caught:
        REFUSED[what](x)
    assert isinstance(caught.value, FnGraphError) and isinstance(caught.value, NotImplementedError)
    assert torch.equal(toys.double(x), x * 2)
