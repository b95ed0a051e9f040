"""The quantised arithmetic stated again, exactly: what the tests of fp8 and its kernels share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

F64 = torch.float64
FINITE = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(F64)
FINITE = FINITE[~FINITE.isnan()].unique()
"""Every number that float8_e4m3fn has, in order."""


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def nearest(x: Tensor) -> Tensor:
    """The nearest number of float8_e4m3fn in float64; of two, the one whose last bit is 0."""
    x, finite = x.to(F64), FINITE.to(x.device)
    high = torch.searchsorted(finite, x.clamp(-448, 448).contiguous()).clamp(max=len(finite) - 1)
    low = (high - 1).clamp(min=0)
    up, down = finite[high] - x, x - finite[low]
    even = finite[low].to(torch.float8_e4m3fn).view(torch.uint8) % 2 == 0
    found = torch.where((down < up) | ((down == up) & even), finite[low], finite[high])
    return torch.where(x.isnan(), x, found)


def stated(x: Tensor, x_scale: Tensor, weight: Tensor, weight_scale: Tensor) -> Tensor:
    """The product of what values and scales stand for, in float64."""
    left, right = x.to(F64) * x_scale.to(F64), weight.to(F64) * weight_scale.to(F64)
    return left @ right.t()


def product(T: int, N: int, K: int, by_row: bool = True, by_column: bool = True):
    """Arguments of `scaled_linear` but the dtype: rows and columns of very unequal sizes."""
    x, weight = draw(T, K) * draw(T, 1, seed=1).exp(), draw(N, K, seed=2)
    weight_scale = draw(N, 1, seed=3).exp() / 64 if by_column else torch.tensor(0.03)
    x_scale = torch.tensor(0.02)
    if by_row:
        values, x_scale = torch.ops.fngraph.quantize_fp8_rows(x)
    else:
        values = torch.ops.fngraph.quantize_fp8(x, x_scale)
    return values, x_scale, (weight / 0.03).to(torch.float8_e4m3fn), weight_scale


LAYERS = {  # columns of each weight, what is behind the product
    "alone": ((24,), ""), "two": ((9, 17), ""), "q, k and v": ((24, 10, 10), ""),
    "gate and up": ((20, 20), "gate"), "gate, rounded": ((12, 12), "gate rounded"),
    "a residual": ((24,), "sum"), "two, a residual, rounded": ((8, 10), "sum rounded"),
    "all of it": ((18, 18), "gate sum rounded"),
}  # fmt: skip
INPUTS = ("rounded", "known", "own", "norm known", "norm own", "centred known", "centred own")


def layer(
    kind: str,
    given: str,
    T: int,
    K: int,
    dtype: torch.dtype,
    by_column: bool = True,
    times: int = 1,
) -> list[Any]:
    """Arguments of `fused_linear_fp8`, rows with a gap between them; `times` as many columns."""
    sizes, behind = [n * times for n in LAYERS[kind][0]], LAYERS[kind][1]
    by = lambda n, i: draw(n, 1, seed=i).exp() / 64 if by_column else torch.tensor(0.03)  # noqa: E731
    weights = [(draw(n, K, seed=i) / 0.03).to(torch.float8_e4m3fn) for i, n in enumerate(sizes)]
    scales = [by(n, i) / K**0.5 for i, n in enumerate(sizes)]
    x = (draw(T, K + 8) * draw(T, 1, seed=1).exp()).to(dtype)[:, 8:]
    x_scales = [] if given.split()[-1] == "own" else [torch.tensor(0.02)] * len(sizes)
    if given == "rounded":
        x, one = torch.ops.fngraph.quantize_fp8_rows(x)
        x_scales = [one] * len(sizes)
    norm = draw(K, seed=7).to(dtype) if "norm" in given or "centred" in given else None
    width = sizes[0] if "gate" in behind else sum(sizes)
    more = draw(T, 2 * width, seed=8).to(dtype)[:, width:] if "sum" in behind else None
    out_scales = [torch.tensor(0.05)] if "rounded" in behind else []
    return [x, weights, scales, norm, x_scales, more, out_scales, 1e-5, "centred" in given,
            "gate" in behind, dtype, True, False]  # fmt: skip


def moved(args: list[Any], device: Any) -> list[Any]:
    """What is one memory stays so."""
    there: dict[int, Tensor] = {}
    move = lambda y: there.setdefault(id(y), y.to(device)) if isinstance(y, Tensor) else y  # noqa: E731
    return [[move(y) for y in x] if isinstance(x, list) else move(x) for x in args]


def exact(args: list[Any], added: float = 0.0) -> tuple[Tensor, Tensor]:
    """A layer in float64 but for what is rounded to fp8, without the last of it; and how much more
    of its products is off, at most, where a number of the input is almost as near to another, and
    where sums are off by `added` of their terms."""
    x, weights, scales, norm, x_scales, more, _, eps, centred, gated, *_ = args
    wide, by = x.to(F64), x_scales[0].to(F64) if x_scales else None
    if norm is not None:
        weight = norm.to(F64) + 1 if centred else norm.to(F64)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight
    if x.dtype != torch.float8_e4m3fn:
        by = wide.abs().amax(-1, keepdim=True) / 448 if by is None else by
        wide = wide / by
        off = nearest(wide * (1 + 2e-6)) - nearest(wide * (1 - 2e-6))
    else:
        off = wide * 0
    assert by is not None
    turned = [(w.to(F64) * scale.to(F64)).t() for w, scale in zip(weights, scales)]
    made = [nearest(wide) * by @ w for w in turned]
    off = off.abs() + added * nearest(wide).abs()
    slack = torch.cat([off * by @ w.abs() for w in turned], 1)
    y = torch.cat(made, 1)
    if gated:
        y = torch.nn.functional.silu(made[0]) * made[1]
        one, two = slack.chunk(2, 1)
        slack = 1.1 * one * (made[1].abs() + two) + two * made[0].abs()  # silu's slope is below 1.1
    return (y if more is None else y + more.to(F64)), slack
