"""Arguments of `paired_linears`, and its results in float64."""

from __future__ import annotations

from typing import Any

import torch
from fused_cases import draw
from torch import Tensor

from fngraph.ops import fused_linear
from fngraph.ops.paired_linears import plain

KINDS = {  # rows of the weights behind the norm; centred, gated
    "q, k and v": ((24, 10, 10), False, False), "gate and up": ((20, 20), False, True),
    "centred": ((9,), True, False), "a centred gate": ((18, 18), True, True),
}  # fmt: skip


def arguments(
    kind: str, rows: int, K: int, dtype: torch.dtype, device: Any = "cpu", E: int = 72
) -> list[Any]:
    sizes, centred, gated = KINDS[kind]
    drawn = lambda n, k, seed: (draw(n, k, seed=seed) / (2 * k**0.5)).to(dtype)  # noqa: E731
    weights = [drawn(n, E, i) for i, n in enumerate(sizes)]
    x = draw(rows, K + 8, dtype=dtype)[:, 8:]  # rows with a gap between them
    more = draw(rows, 2 * E, dtype=dtype, seed=8)[:, E:]
    given = [x, drawn(E, K, 5), more, draw(E, dtype=dtype, seed=7), weights, 1e-5, centred, gated,
             False]  # fmt: skip
    return moved(given, lambda y: y.to(device))


def moved(args: list[Any], change: Any) -> list[Any]:
    """With each tensor changed."""
    one = lambda y: change(y) if isinstance(y, Tensor) else y  # noqa: E731
    return [[one(y) for y in x] if isinstance(x, list) else one(x) for x in args]


def exact(args: list[Any]) -> tuple[Tensor, Tensor]:
    """In float64, which the plain form's norm leaves for float32."""
    x, weight, more, norm, weights, eps, centred, gated, _ = moved(args, Tensor.double)
    total = x @ weight.t() + more
    by = 1 + norm if centred else norm
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + eps) * by
    return total, fused_linear.plain(normed, weights, None, None, 0.0, False, gated)


def off(got: tuple[Tensor, ...], want: tuple[Tensor, ...]) -> list[float]:
    """Distances over norms."""
    return [float((y.double() - w).norm() / w.norm()) for y, w in zip(got, want, strict=True)]


__all__ = ["KINDS", "arguments", "exact", "moved", "off", "plain"]
