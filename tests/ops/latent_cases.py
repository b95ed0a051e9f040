"""What the tests of Triton's latent attention share: calls of a backend over a case's k_cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton_cases import WHERE, build

from fngraph.core import HostBounds
from fngraph.ops import MLA, MLAArgs, MLAConfig
from fngraph.testing.cases import NAN, Case

SIZES = tuple[int, int, int]  # heads, rank, rotated


def latent(*rows: tuple[int, int], sizes: SIZES, **options: Any) -> Case:
    """A case whose k and k_cache are the compressed rows; v is not looked at."""
    H, L, D = sizes
    return build(*rows, heads=(H, 1, L + D), **options)


def call(
    backend: str, c: Case, out_THL: Tensor, query_len: int | None = None, scale: float | None = None
) -> None:
    """One run into `out_THL`, as a graph's node or an eager step would call it."""
    (_, H, C), L = c.q.shape, out_THL.shape[2]
    scale = 2 * C**-0.5 if scale is None else scale
    config = MLAConfig(H, L, C - L, c.k_cache.shape[1], c.q.dtype, c.k_cache.dtype, WHERE, scale)
    chosen: Any = MLA.backend(backend)
    assert chosen.refusal(config) is None, chosen.refusal(config)
    args = MLAArgs(c.q, c.k[:, 0], c.k_cache[:, :, 0], c.meta, out_THL, config)
    chosen.run(args, HostBounds(max_query_len=query_len))


def run(backend: str, c: Case, rank: int, query_len: int | None = None, **options: Any) -> Tensor:
    """The backend's output, poisoned beforehand; the cache is written."""
    out = torch.full_like(c.q[..., :rank], NAN)
    call(backend, c, out, query_len, **options)
    return out


def reference(c: Case, rank: int, **options: Any) -> Tensor:
    """In float32, from the same numbers; a copy of the cache is written."""
    exact = Case(c.q.float(), c.k.float(), c.v, c.k_cache.clone(), c.v_cache, c.meta, c.rows)
    return run("reference", exact, rank, **options)
