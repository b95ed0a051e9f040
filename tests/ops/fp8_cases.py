"""The quantised arithmetic stated again, exactly: what the tests of fp8 and its kernels share."""

from __future__ import annotations

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
    x = x.to(F64)
    high = torch.searchsorted(FINITE, x.clamp(-448, 448).contiguous()).clamp(max=len(FINITE) - 1)
    low = (high - 1).clamp(min=0)
    up, down = FINITE[high] - x, x - FINITE[low]
    even = FINITE[low].to(torch.float8_e4m3fn).view(torch.uint8) % 2 == 0
    found = torch.where((down < up) | ((down == up) & even), FINITE[low], FINITE[high])
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
