"""Experts against one token at a time, in both ways of computing them, and padding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import fngraph as fg
from fngraph.models import generate, naming, qwen3_moe
from fngraph.models.families import experts

T, E, F, X, C = 9, 16, 24, 5, 2
REAL = torch.tensor([1, 1, 1, 0, 1, 1, 0, 1, 0], dtype=torch.bool)


def weights(dtype: torch.dtype) -> tuple[experts.Experts, Tensor, Tensor]:
    """Experts, a router and tokens."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype) / 4  # noqa: E731
    return experts.Experts(draw(X, F, E), draw(X, F, E), draw(X, E, F)), draw(X, E), draw(T, E) * 4


def alone(made: experts.Experts, router: Tensor, x_E: Tensor, normalized: bool) -> Tensor:
    """One token."""
    share = (router.double() @ x_E.double()).softmax(0)
    best = sorted(range(X), key=lambda i: -share[i])[:C]
    total = sum(share[i] for i in best) if normalized else 1
    out = torch.zeros(E, dtype=torch.float64)
    for i in best:
        gate, up, down = (w[i].double() for w in (made.w_gate, made.w_up, made.w_down))
        out += share[i] / total * (down @ (silu(gate @ x_E.double()) * (up @ x_E.double())))
    return out


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(
    "dtype, device",
    [
        pytest.param(torch.bfloat16, "cpu", id="grouped"),
        pytest.param(torch.float32, "cpu", id="dense"),
        pytest.param(torch.bfloat16, "cuda", id="grouped-cuda", marks=pytest.mark.gpu),
        pytest.param(torch.float32, "cuda", id="dense-cuda", marks=pytest.mark.gpu),
    ],
)
def test_each_token_gets_its_experts(dtype: torch.dtype, device: str, normalized: bool):
    made, router, x_TE = weights(dtype)
    want_TE = torch.stack([alone(made, router, x_E, normalized) for x_E in x_TE])
    on = experts.Experts(*(w.to(device) for w in vars(made).values()))
    x_TE, real_T = x_TE.to(device), REAL.to(device)
    chosen = experts.route(x_TE, router.to(device), C, normalized=normalized)
    got_TE = experts.mix(on, x_TE, *chosen, real_T).cpu().double()
    assert torch.equal(got_TE[~REAL], torch.zeros(3, E, dtype=torch.float64))
    close = {"atol": 0.02 if dtype == torch.bfloat16 else 1e-5, "rtol": 0}
    torch.testing.assert_close(got_TE[REAL], want_TE[REAL], **close)


def test_shares_are_of_float32_whatever_the_tokens_are():
    """In bfloat16 experts that are nearly alike would tie, and shares be 0.4 % off."""
    _, router, x_TE = weights(torch.bfloat16)
    expert_TC, share_TC = experts.route(x_TE, router, C, normalized=False)
    assert share_TC.dtype == torch.float32
    want_TX = (x_TE @ router.T).float().softmax(-1)
    torch.testing.assert_close(share_TC, want_TX.gather(1, expert_TC), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["grouped", "dense"])
@pytest.mark.parametrize("poison", [0.0, 1e30, float("inf"), float("nan")])
def test_padding_disturbs_no_row(dtype: torch.dtype, poison: float):
    made, router, x_TE = weights(dtype)

    def run(x_TE: Tensor) -> Tensor:
        return experts.mix(made, x_TE, *experts.route(x_TE, router, C, normalized=True), REAL)

    poisoned = run(torch.where(REAL[:, None], x_TE, poison))
    assert torch.equal(poisoned, run(x_TE)) and not poisoned[~REAL].any()


@pytest.mark.parametrize("broken", [torch.nan, torch.inf, 300.0], ids=str)
def test_an_expert_that_no_token_has_is_not_looked_at(broken: float):
    """It may hold anything; in float16 its numbers for a token may be beyond the dtype."""
    made, _, x_TE = weights(torch.float32)
    made = experts.Experts(*(w.half() for w in vars(made).values()))
    x_TE, expert_TC = x_TE.half(), torch.tensor([[0, 1]]).expand(T, C)
    share_TC, real_T = torch.full((T, C), 0.5), torch.ones(T, dtype=torch.bool)
    want_TE = experts.mix(made, x_TE, expert_TC, share_TC, real_T)
    for weight in vars(made).values():
        weight[3] = broken
    got_TE = experts.mix(made, x_TE, expert_TC, share_TC, real_T)
    assert torch.equal(got_TE, want_TE) and want_TE.isfinite().all() and want_TE.any()


def test_padding_is_in_no_group(monkeypatch: pytest.MonkeyPatch):
    made, router, x_TE = weights(torch.bfloat16)
    ends: list[int] = []
    honest = experts.grouped_mm
    monkeypatch.setattr(
        experts, "grouped_mm", lambda *a, offs: ends.append(int(offs[-1])) or honest(*a, offs=offs)
    )
    experts.mix(made, x_TE, *experts.route(x_TE, router, C, normalized=True), REAL)
    assert ends == [int(REAL.sum()) * C] * 3


@pytest.mark.parametrize(
    "device, recorder", [("cpu", "tape"), pytest.param("cuda", "cuda", marks=pytest.mark.gpu)]
)
def test_one_capture_serves_whatever_is_routed_where(device: str, recorder: str):
    config = qwen3_moe.Config(
        vocab_size=256, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=16, dim=32, mlp_dim=16,
        num_experts=4, num_chosen=2, expert_dim=16, normalized=True,
    )  # fmt: skip
    params = qwen3_moe.init_params(config, device=device, dtype=torch.bfloat16)
    params = naming.replaced(params, lambda _, w: w * 16 if w.ndim > 1 else w)
    turned = lambda name, w: w.flip(0) if "experts" in name else w  # noqa: E731
    others = naming.replaced(params, turned)
    options = {"block_size": 4, "device": device, "dtype": torch.bfloat16}
    cache, plain = (qwen3_moe.init_cache(config, 8, **options) for _ in range(2))
    limits = fg.Limits(16, 4, B=4)
    fast = fg.graphify(
        qwen3_moe.forward, modes="FULL", donate="cache", stage="batch", sizes=(1, 8),
        recorder=recorder,
    )  # fmt: skip
    step = fast.bind(params).capture(cache, limits, progress=False)
    for end, start in ((5, 0), (6, 5), (7, 6), (12, 7)):
        batch = generate.alone(range(end), start, 4, device)
        got_RV, cache = step(cache, batch)
        want_RV, plain = qwen3_moe.forward(params, plain, batch)
        near = 0.02 if device == "cpu" else 0.1  # half a step of bfloat16; CUDA's kernels go by T
        torch.testing.assert_close(got_RV, want_RV, atol=near, rtol=0)
        other_RV, _ = qwen3_moe.forward(others, copy.deepcopy(plain), batch)
        assert (other_RV - want_RV).abs().max() > 1  # what experts do is seen
    assert step.stats.share("FULL") == 1
    traced = fg.graphify(qwen3_moe.forward, donate="cache", stage="batch").trace(
        params, cache, limits=limits
    )
    assert traced.as_text().count("_grouped_mm.default(") == 6
