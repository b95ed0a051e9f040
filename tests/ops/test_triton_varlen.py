"""Triton's attention without a cache, against `reference`; interpreted on a CPU, else on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from triton_cases import DTYPES, GPU, WHERE

import fngraph as fg
from fngraph.ops import VARLEN
from fngraph.ops.varlen import VarlenArgs, VarlenConfig
from fngraph.testing.differences import bits

pytestmark = [pytest.mark.gpu] if GPU else []
PACKS = [[5], [3, 40, 1, 17], [0, 33, 0, 2, 0], [0], [64, 64]]
PACKS += [[4096], [1, 700, 65, 128, 3000], [64] * 60] if GPU else []
ERROR = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}
BACKENDS = ["triton", "varlen"] if GPU else ["triton"]


def drawn(T: int, H: int, K: int, D: int, dtype: torch.dtype, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(T, n, D, generator=generator).to(WHERE, dtype) for n in (H, K, K)]


def starts_of(lengths: list[int], more: int = 0) -> Tensor:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    return torch.cat([ends, ends[-1:].expand(more)]).to(WHERE, torch.int32)


def run(
    backend: str, q: Tensor, k: Tensor, v: Tensor, starts: Tensor, causal: bool = False,
    scale: float | None = None,
) -> Any:  # fmt: skip
    """Into an output that holds NaN; None where the backend refuses it."""
    scale = q.shape[2] ** -0.5 if scale is None else scale
    config = VarlenConfig(*q.shape[1:2], k.shape[1], q.shape[2], q.dtype, WHERE, scale, causal)
    if VARLEN.backend(backend).refusal(config) is not None:
        return None
    args = VarlenArgs(q, k, v, starts, torch.full_like(q, float("nan")), config)
    VARLEN.backend(backend).run(args, host=None)
    return args.out


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lengths", PACKS, ids=str)
@pytest.mark.parametrize("heads", [(2, 2, 16), (4, 2, 24)] + [(16, 16, 72), (8, 2, 128)] * GPU)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_as_reference(backend, lengths, heads, causal, dtype):
    T = sum(lengths) + 3
    q, k, v = drawn(T, *heads, dtype)
    for x in (q, k, v):
        x[T - 3 :] = float("nan")
    starts = starts_of(lengths, 2)
    got = run(backend, q, k, v, starts, causal)
    if got is None:
        pytest.skip("refused")
    want = run("reference", *(x.float() for x in (q, k, v)), starts, causal)
    assert (got - want).abs().max() <= ERROR[dtype] and not got[T - 3 :].any()


@pytest.mark.parametrize("scale", [-8.0, -0.25, 0.0, 0.25, 8.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_scale(dtype: torch.dtype, scale: float):
    """Over whole tiles of keys and a last one; largest scores that rise, and that fall."""
    lengths = [300, 129]
    q, k, v = drawn(429, 2, 2, 16, dtype)
    k[:300] *= torch.linspace(0.1, 2, 300, device=WHERE).to(dtype)[:, None, None]
    k[300:] *= torch.linspace(2, 0.1, 129, device=WHERE).to(dtype)[:, None, None]
    starts = starts_of(lengths)
    got = run("triton", q, k, v, starts, scale=scale)
    want = run("reference", *(x.float() for x in (q, k, v)), starts, scale=scale)
    assert (got - want).abs().max() <= ERROR[dtype] * max(1, abs(scale))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_has_the_same_bits_wherever_it_lies_and_whatever_is_beside_it(dtype):
    lengths = [7, 45, 20]
    q, k, v = drawn(72, 4, 2, 24, dtype)
    alone = run("triton", *(x[7:52].contiguous() for x in (q, k, v)), starts_of([45]))
    for x in (q, k, v):
        x[:7], x[52:] = float("nan"), float("inf")
    packed = run("triton", q, k, v, starts_of(lengths, 5))
    assert torch.equal(bits(packed[7:52]), bits(alone))


def test_strided_inputs():
    q, k, v = drawn(30, 4, 2, 16, torch.float32)
    whole = torch.cat([q, k, v], 1)
    got = run("triton", *whole.split([4, 2, 2], 1), starts_of([11, 19]))
    assert torch.equal(bits(got), bits(run("triton", q, k, v, starts_of([11, 19]))))


@pytest.mark.skipif(not GPU, reason="the CPU's is reference")
def test_on_cuda_it_is_what_runs():
    q, k, v = drawn(9, 2, 2, 16, torch.bfloat16)
    got = fg.ops.varlen_attention(q, k, v, starts_of([4, 5]))
    assert torch.equal(bits(got), bits(run("triton", q, k, v, starts_of([4, 5]))))
