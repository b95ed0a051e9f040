"""Arguments of `fused_linear` by what is around the product, and its result in float64."""

from __future__ import annotations

from typing import Any

import torch
from fused_cases import draw
from torch import Tensor

from fngraph.ops.fused_linear import plain

KINDS = {  # rows of each weight, what is around the product
    "alone": ((24,), ""), "q, k and v": ((24, 10, 10), "norm"), "centred": ((9,), "centred"),
    "gate and up": ((20, 20), "norm gate"), "gate without a norm": ((7, 7), "gate"),
    "a residual": ((24,), "sum"), "all of it": ((18, 18), "centred gate sum"),
    "two and a residual": ((9, 17), "sum"),
}  # fmt: skip


def arguments(kind: str, rows: int, K: int, dtype: torch.dtype, device: Any = "cpu") -> list[Any]:
    sizes, around = KINDS[kind]
    scale = 2 * K**0.5
    weights = [(draw(n, K, seed=i) / scale).to(dtype) for i, n in enumerate(sizes)]
    gated = "gate" in around
    width = sizes[0] if gated else sum(sizes)
    wanted = "norm" in around or "centred" in around
    norm = draw(K, dtype=dtype, seed=7) if wanted else None
    more = draw(rows, 2 * width, dtype=dtype, seed=8)[:, width:] if "sum" in around else None
    x = draw(rows, K + 8, dtype=dtype)[:, 8:]  # rows with a gap between them
    given = [x, weights, norm, more, 1e-5, "centred" in around, gated, True, False]
    move = lambda y: y.to(device) if isinstance(y, Tensor) else y  # noqa: E731
    return [[move(y) for y in x] if isinstance(x, list) else move(x) for x in given]


def widened(args: list[Any]) -> list[Any]:
    wide = lambda y: y.double() if isinstance(y, Tensor) else y  # noqa: E731
    return [[wide(y) for y in x] if isinstance(x, list) else wide(x) for x in args]


def exact(args: list[Any]) -> Tensor:
    """In float64, which the plain form's norm leaves for float32."""
    x, weights, norm, more, eps, centred, gated, *_ = widened(args)
    if norm is not None:
        by = 1 + norm if centred else norm
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * by
    return plain(x, weights, None, more, eps, centred, gated)
