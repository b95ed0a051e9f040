"""Calls of attention to test backends with: batches of any kind over a paged cache.

A cache is NaN wherever nothing was written, and an output is NaN before it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops import ATTENTION, AttentionMeta, Backend, attention

NAN = float("nan")
Rows = Sequence[tuple[int, int]]  # (new tokens, tokens in the cache already) of each request
BATCHES: dict[str, Rows] = {  # about blocks of 4
    "one token": [(1, 0)],
    "prefill": [(7, 0)],
    "prefill of whole blocks": [(8, 0)],
    "ragged prefill": [(5, 0), (1, 0), (9, 0), (4, 0)],
    "decode": [(1, 6), (1, 3), (1, 12)],
    "decode over a block's edge": [(1, 3), (1, 4), (1, 7), (1, 8)],
    "chunked prefill": [(3, 5), (4, 4), (2, 11)],
    "mixed": [(1, 9), (6, 0), (1, 2), (3, 8)],
    "verify, three tokens each": [(3, 6), (3, 1), (3, 13)],
}


@dataclasses.dataclass
class Case:
    """Arguments of one call."""

    q: Tensor
    k: Tensor
    v: Tensor
    k_cache: Tensor
    v_cache: Tensor
    meta: AttentionMeta
    rows: Rows

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """All of them, in the op's order."""
        return (self.q, self.k, self.v, self.k_cache, self.v_cache, *self.meta)

    @property
    def unpadded(self) -> tuple[Tensor, ...]:
        """The same without padding."""
        T, R = sum(n for n, _ in self.rows), len(self.rows)
        slots, lens, starts, tables = self.meta
        tokens = (x[:T] for x in (self.q, self.k, self.v))
        meta = (slots[:T], lens[:R], starts[: R + 1], tables[:R])
        return (*tokens, self.k_cache, self.v_cache, *meta)

    def run(self, **options: Any) -> Tensor:
        """The op's output; the caches are written."""
        return attention(
            self.q, self.k, self.v, (self.k_cache, self.v_cache), self.meta, **options
        )[0]

    def load(self, other: Case) -> None:
        """Copy another one of this shape in; its cache may have fewer blocks."""
        for into, x in zip(self.tensors, other.tensors):
            into[: len(x)].copy_(x)


def case(
    *rows: tuple[int, int],
    heads: tuple[int, int, int] = (4, 2, 8),
    block_size: int = 4,
    pad_tokens: int = 0,
    pad_reqs: int = 0,
    query_len: int = 0,
    B: int | None = None,
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    device: Any = "cpu",
    seed: int = 0,
) -> Case:
    """A batch over a cache that holds each request's past, its blocks in random order.

    Args:
        heads: (query heads, kv heads, head dim).
        pad_tokens: tokens past the real ones, all with slot -1.
        pad_reqs: requests past the real ones, with seq_lens 0.
        query_len: stride of their offsets, 0 for a mixed batch.
        B: columns of the block table; None: one more than are needed.
        cache_dtype: None: `dtype`.
    """
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
    (H, K, D), R = heads, len(rows)
    B = B or max(-(-(n + past) // block_size) for n, past in rows) + 1
    num_blocks = (R + pad_reqs) * B + 3
    blocks = torch.randperm(num_blocks, generator=generator)[: R * B].view(R, B)
    blocks_of = blocks.tolist()
    k_cache = torch.full((num_blocks, block_size, K, D), NAN, dtype=dtype)
    v_cache = k_cache.clone()
    slots: list[int] = []
    for r, (n, past) in enumerate(rows):
        where = [
            blocks_of[r][i // block_size] * block_size + i % block_size for i in range(n + past)
        ]
        k_cache.view(-1, K, D)[where[:past]] = draw(past, K, D)
        v_cache.view(-1, K, D)[where[:past]] = draw(past, K, D)
        slots += where[past:]
    T = len(slots)
    starts = [0]
    for n, _ in rows:
        starts.append(starts[-1] + n)
    starts += [starts[-1] + query_len * (i + 1) for i in range(pad_reqs)]
    meta = AttentionMeta(
        slot_mapping=torch.tensor(slots + [-1] * pad_tokens),
        seq_lens=torch.tensor([n + past for n, past in rows] + [0] * pad_reqs, dtype=torch.int32),
        query_start_loc=torch.tensor(starts, dtype=torch.int32),
        block_tables=torch.cat([blocks, torch.zeros(pad_reqs, B, dtype=torch.int64)]).int(),
    )
    q, k, v = (draw(T + pad_tokens, n, D) for n in (H, K, K))
    k_cache, v_cache = (x.to(cache_dtype or dtype) for x in (k_cache, v_cache))
    q, k, v, k_cache, v_cache = (x.to(device) for x in (q, k, v, k_cache, v_cache))
    return Case(q, k, v, k_cache, v_cache, AttentionMeta(*[x.to(device) for x in meta]), rows)


def cut_from_one(c: Case) -> Case:
    """The same with q, k and v cut out of one tensor, q NaN where a token is nobody's."""
    qkv = torch.cat([c.q, c.k, c.v], 1)
    qkv[sum(n for n, _ in c.rows) :, : c.q.shape[1]] = NAN
    q, k, v = qkv.split([x.shape[1] for x in (c.q, c.k, c.v)], 1)
    return dataclasses.replace(c, q=q, k=k, v=v)


def arguments(c: Case, out: Tensor, **options: Any) -> tuple[Any, ...]:
    """The op's arguments."""
    given = {
        "scale": c.q.shape[-1] ** -0.5, "window": None, "softcap": None, "causal": True,
        "sinks": None, "k_scale": None, "v_scale": None, "cos": None, "sin": None, "q_norm": None,
        "k_norm": None, "eps": 0.0, "centred": False, "out_scale": None,
    } | options  # fmt: skip
    return (*c.tensors, out, *given.values())


def call(
    backend: str | Backend, c: Case, host: HostBounds | None = None, out: Tensor | None = None,
    plan: Any = None, **options: Any,
) -> Tensor:  # fmt: skip
    """What a backend makes of `out`, which is NaN where none is passed; the caches are written."""
    backend = ATTENTION.backend(backend) if isinstance(backend, str) else backend
    out = torch.full_like(c.q, NAN) if out is None else out
    args = arguments(c, out, **options)
    ATTENTION.call(backend, args, ATTENTION.configure(*args), host, plan)
    return out
