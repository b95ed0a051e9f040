"""Arguments of the fused ops, by row count and dtype: what their two tests share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fngraph.ops import fused, fused_fp8
from fngraph.ops.triton.launching import interpreted

GPU = not interpreted()
Args = tuple[Any, ...]
OPS = torch.ops.fngraph
PLAIN = fused.PLAIN | fused_fp8.PLAIN


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * 2).to(dtype)


def angles(rows: int, width: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (rows, 1, width)."""
    angle = draw(rows, 1, width) * 3
    return angle.cos().to(dtype), angle.sin().to(dtype)


def norm(rows: int, dtype: torch.dtype, width: int = 80, centred: bool = False) -> Args:
    return draw(rows, width, dtype=dtype), draw(width, dtype=dtype, seed=1), 1e-5, centred


def added(rows: int, dtype: torch.dtype, centred: bool = False) -> Args:
    x, weight, *rest = norm(rows, dtype, centred=centred)
    return x, draw(rows, 80, dtype=dtype, seed=2), weight, *rest


def strided(rows: int, dtype: torch.dtype) -> Args:
    """Both halves of one product, as `side_by_side` leaves them."""
    return tuple(draw(rows, 160, dtype=dtype).split(80, dim=1))


def turned(rows: int, dtype: torch.dtype, share: int = 2, whole: bool = False) -> Args:
    """3 heads of 24 columns, a slice of a product of more; 24 / share of them turn as pairs."""
    x = draw(rows, 96, dtype=dtype)[:, 12:84].unflatten(1, (3, 24))
    return x, *angles(rows, 24 if whole else 24 // share, dtype)


def normed(rows: int, dtype: torch.dtype, centred: bool = False) -> Args:
    x, cos, sin = turned(rows, dtype)
    return x, draw(24, dtype=dtype, seed=1), cos, sin, 1e-6, centred


CASES: dict[str, tuple[str, Callable[[int, torch.dtype], Args]]] = {
    "norm": ("rms_norm", norm),
    "norm of a wide row": ("rms_norm", lambda n, d: norm(n, d, 4096 if GPU else 300)),
    "centred norm": ("rms_norm", lambda n, d: norm(n, d, centred=True)),
    "norm of a sum": ("add_rms_norm", added),
    "centred norm of a sum": ("add_rms_norm", lambda n, d: added(n, d, centred=True)),
    "gate": ("silu_mul", lambda n, d: (draw(n, 80, dtype=d), draw(n, 80, dtype=d, seed=1))),
    "gate of more than a program": ("silu_mul", lambda n, d: tuple(draw(2, n, 1100, dtype=d))),
    "gate of slices": ("silu_mul", strided),
    "rope": ("rope", turned),
    "rope of a share": ("rope", lambda n, d: turned(n, d, share=6)),
    "rope by whole angles": ("rope", lambda n, d: turned(n, d, whole=True)),
    "rope in float32": (
        "rope",
        lambda n, d: (turned(n, d)[0], *angles(n, 12, torch.float32)),
    ),
    "norm and rope": ("norm_rope", normed),
    "centred norm and rope": ("norm_rope", lambda n, d: normed(n, d, centred=True)),
}


def wild(rows: int, dtype: torch.dtype) -> Args:
    """Rows far from each other in size; one of zeros, and one too small for a scale."""
    x, weight, *rest = norm(rows, dtype)
    return x * torch.logspace(-4, 3, rows)[:, None].to(dtype), weight, *rest


def quiet(rows: int, dtype: torch.dtype) -> Args:
    """A gate that is closed in the first row, and nearly so in the second."""
    gate, up = draw(rows, 80, dtype=dtype), draw(rows, 80, dtype=dtype, seed=1)
    gate[:1], up[1:2] = 0, 1e-7
    return gate, up


def known(make: Callable[[int, torch.dtype], Args]) -> Callable[[int, torch.dtype], Args]:
    """The same with a scale at which some of it is cut off."""
    return lambda n, d: (*make(n, d), [torch.tensor(0.01)])


FP8_CASES: dict[str, tuple[str, Callable[[int, torch.dtype], Args]]] = {
    f"{case}, {how}": (
        f"{name}_fp8{'_rows' if how == 'by rows' else ''}",
        make if how == "by rows" else known(make),
    )
    for case, (name, make) in {
        **{case: CASES[case] for case in CASES if "rope" not in case},
        "norm of rows of many sizes": ("rms_norm", wild),
        "gate that is shut": ("silu_mul", quiet),
    }.items()
    for how in ("by rows", "by a known scale")
}


def on(where: Any, args: Args) -> Args:
    """The same on a device."""
    return tuple(
        [y.to(where) for y in x] if isinstance(x, list) else x.to(where) if hasattr(x, "to") else x
        for x in args
    )


def tensors(x: Any) -> tuple[Tensor, ...]:
    return x if isinstance(x, tuple) else (x,)
