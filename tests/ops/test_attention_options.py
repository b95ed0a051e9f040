"""Sinks, both directions and fp8 caches: `reference` against a loop in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fngraph as fg
from fngraph.ops import attention
from fngraph.testing.cases import BATCHES, Case, case
from fngraph.testing.differences import bits

FP8 = torch.float8_e4m3fn


def naive(
    c: Case,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """A loop over requests, tokens and heads, over what the cache holds after the step."""
    H, K, D = c.q.shape[1], c.k.shape[1], c.q.shape[2]
    one = torch.ones(K, 1)
    scales = [one if s is None else s.cpu().expand(K)[:, None] for s in (k_scale, v_scale)]
    k_cache, v_cache = (
        x.cpu().float().double() * s.double() for x, s in zip((c.k_cache, c.v_cache), scales)
    )
    q, S = c.q.double().cpu(), c.k_cache.shape[1]
    out, first = torch.zeros_like(q), 0
    for r, (n, past) in enumerate(c.rows):
        table = c.meta.block_tables[r].tolist()
        where = [(table[i // S], i % S) for i in range(n + past)]
        keys = torch.stack([k_cache[b, s] for b, s in where])
        values = torch.stack([v_cache[b, s] for b, s in where])
        for i in range(n):
            at = past + i
            seen = [
                j for j in range(n + past)
                if (j <= at or not causal) and (window is None or abs(j - at) < window)
            ]  # fmt: skip
            for h in range(H):
                scores = keys[seen, h // (H // K)] @ q[first + i, h] * D**-0.5
                exps = scores.exp()
                total = exps.sum() + (0 if sinks is None else sinks[h].double().cpu().exp())
                out[first + i, h] = (exps / total) @ values[seen, h // (H // K)]
        first += n
    return out


def check(c: Case, **options: Any) -> None:
    """The op against the loop; rows of nobody are zero."""
    got = attention(c.q, c.k, c.v, (c.k_cache, c.v_cache), c.meta, **options)[0]
    torch.testing.assert_close(got.double().cpu(), naive(c, **options), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("rows", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_attention_and_give_nothing(where, rows, window):
    sinks = torch.linspace(-2, 3, 4, device=where)
    check(case(*rows, pad_tokens=2, pad_reqs=1, device=where), sinks=sinks, window=window)


def test_a_sink_of_minus_infinity_is_none(where):
    a, b = case((3, 5), (1, 7), device=where), case((3, 5), (1, 7), device=where)
    sinks = torch.full((4,), -float("inf"), device=where)
    torch.testing.assert_close(a.run(sinks=sinks), b.run())


@pytest.mark.parametrize("window", [None, 1, 2, 4])
def test_both_directions(where, window):
    rows = [(7, 0), (1, 0), (5, 0), (3, 4)]
    check(case(*rows, pad_tokens=3, pad_reqs=2, device=where), causal=False, window=window)


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2, torch.float32])
def test_a_cache_with_scales(where, per_head, dtype):
    c = case((3, 5), (1, 7), (4, 0), pad_tokens=1, pad_reqs=1, device=where)
    c.k_cache, c.v_cache = (x.nan_to_num(1.0).to(dtype) for x in (c.k_cache, c.v_cache))
    k_scale = torch.tensor([0.5, 0.25] if per_head else 0.5, device=where)
    v_scale = torch.tensor([2.0, 0.1] if per_head else 0.1, device=where)
    check(c, k_scale=k_scale, v_scale=v_scale)


def test_what_is_written_is_the_rounded_quotient_and_nothing_else_changes(where):
    c = case((4, 0), device=where)
    c.k_cache, c.v_cache = (torch.zeros_like(x).to(FP8) for x in (c.k_cache, c.v_cache))
    before = bits(c.k_cache).clone()
    scale = torch.tensor(0.02, device=where)
    c.meta = c.meta._replace(slot_mapping=torch.tensor([5, -1, 0, -1], device=where))
    c.run(k_scale=scale)
    want = (c.k / 0.02).clamp(-448, 448).to(FP8)
    rows = c.k_cache.view(torch.uint8).view(-1, *c.k.shape[1:])
    assert rows[5].equal(bits(want)[0]) and rows[0].equal(bits(want)[2])
    rows[5], rows[0] = 0, 0
    assert bits(c.k_cache).equal(before)


@pytest.mark.parametrize(
    "scale, share", [(None, 30.0), (0.01, 30.0), (0.01, 0.02), (8.0, 30.0), (8.0, 2.0)]
)
@pytest.mark.parametrize("dtype", [FP8, torch.float8_e5m2])
def test_what_is_out_of_range_in_fp8_is_its_largest_number(where, dtype, scale, share):
    """Its quotient by the scale, that is. Torch's own rounding makes it infinite in e5m2, and in
    e4m3fn NaN or 448 by its release."""
    c = case((1, 0), device=where)
    c.k_cache, c.v_cache = (torch.zeros_like(x).to(dtype) for x in (c.k_cache, c.v_cache))
    largest = torch.finfo(dtype).max
    c.v.fill_(-share * largest)
    got = c.run(v_scale=None if scale is None else torch.tensor(scale, device=where))
    quotient = min(share / (scale or 1.0), 1.0)
    torch.testing.assert_close(got, torch.full_like(got, -quotient * largest * (scale or 1.0)))


def test_gradients_go_through_sinks():
    sinks = torch.zeros(4, requires_grad=True)
    c = case((3, 5), (1, 7))
    grad = torch.autograd.grad(c.run(sinks=sinks).sum(), sinks)[0]
    step = torch.zeros(4)
    step[1] = 1e-3
    a, b = (case((3, 5), (1, 7)).run(sinks=s) for s in (step, -step))
    torch.testing.assert_close(grad[1], (a - b).sum() / 2e-3, atol=1e-2, rtol=1e-2)


def test_no_gradient_goes_through_an_fp8_cache():
    c = case((3, 0))
    c.k_cache, c.v_cache = (torch.zeros_like(x).to(FP8) for x in (c.k_cache, c.v_cache))
    c.q.requires_grad_()
    with pytest.raises(fg.errors.TransformError, match="rounding has no gradient"):
        c.run()
