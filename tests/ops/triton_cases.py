"""What the tests of Triton's kernels share: calls of a backend, and batches as a key has them."""

from __future__ import annotations

from typing import Any

import torch
from fast_interpreter import speed_up
from torch import Tensor

from fngraph.core import HostBounds
from fngraph.ops import ATTENTION, AttentionMeta
from fngraph.ops.triton.launching import interpreted
from fngraph.testing.cases import BATCHES, NAN, Case, arguments, call, case

WHERE = "cpu" if interpreted() else "cuda"
GPU = WHERE == "cuda"
RECORDER = "cuda" if GPU else "tape"
DEVICE = torch.device(WHERE, 0) if GPU else torch.device("cpu")
ALL = [torch.float32, torch.bfloat16, torch.float16]
DTYPES = ALL if GPU else ALL[:1]  # interpreted, tiles are multiplied in float32 anyhow
UNIFORM = {  # query length: requests
    1: [(1, 6), (1, 0), (1, 127), (1, 260), (1, 128)],
    3: [(3, 6), (3, 0), (3, 125)],
}
if GPU:
    UNIFORM[1] += [(1, 8191), (1, 4000), (1, 1), (1, 511), (1, 512)]
    UNIFORM[5] = [(5, 0), (5, 3000), (5, 7)]
    BATCHES = BATCHES | {
        "long mix": [(1, 8191), (300, 0), (1, 40), (129, 1000), (1, 0), (64, 64)],
        "long prefill": [(700, 0), (1, 0)],
    }


if interpreted():
    speed_up()


def run(
    backend: str, c: Case, query_len: int | None = None, out: Tensor | None = None, **options: Any
) -> Tensor:
    """The backend's output, poisoned beforehand; the caches are written."""
    config = ATTENTION.configure(*arguments(c, c.q, **options))
    assert ATTENTION.backend(backend).refusal(config) is None
    return call(backend, c, HostBounds(max_query_len=query_len), out, **options)


def reference(c: Case, **options: Any) -> Tensor:
    """In float32, from the same numbers; a copy of the caches is written."""
    q, k, v = (x.float() for x in (c.q, c.k, c.v))
    exact = Case(q, k, v, c.k_cache.clone(), c.v_cache.clone(), c.meta, c.rows)
    return run("reference", exact, **options)


def dense(
    c: Case,
    window: int | None = None,
    causal: bool = True,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> Tensor:
    """Attention with all options, a request at a time, in float64; the caches are written by now.

    Its own, so that options are tested whatever `reference` knows.
    """
    out = torch.zeros_like(c.q, dtype=torch.float64)
    S, group = c.k_cache.shape[1], c.q.shape[1] // c.k.shape[1]
    for r, (n, past) in enumerate(c.rows):
        first, last = c.meta.query_start_loc[r : r + 2].tolist()
        i = torch.arange(n + past, device=WHERE)
        block = c.meta.block_tables[r, i // S].long()
        k, v = (
            x.double()[block, i % S] * (1 if by is None else by.double().view(-1, 1))
            for x, by in ((c.k_cache, k_scale), (c.v_cache, v_scale))
        )
        k, v = (x.repeat_interleave(group, 1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", c.q[first:last].double(), k) * c.q.shape[-1] ** -0.5
        behind = (past + i[:n])[:, None] - i[None]
        hidden = behind < 0 if causal else torch.zeros_like(behind, dtype=torch.bool)
        if window is not None:
            hidden |= behind.abs() >= window
        scores = scores.masked_fill(hidden, float("-inf"))
        if sinks is not None:
            sink = sinks.double().view(-1, 1, 1).expand(-1, n, 1)
            scores = torch.cat([scores, sink], -1)
        weights = scores.softmax(-1)[..., : n + past]
        out[first:last] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def turn(c: Case, normed: bool, *, centred: bool = False, share: int = 2) -> dict[str, Any]:
    """Options that turn q and k: 2/share of each head, by angles that are NaN in padding."""
    (T, _, D), dtype = c.q.shape, c.q.dtype
    generator = torch.Generator().manual_seed(5)
    angle = torch.randn(T, 1, D // share, generator=generator) * 3
    angle[c.meta.slot_mapping.cpu() < 0] = NAN
    given: dict[str, Any] = {"cos": angle.cos(), "sin": angle.sin(), "q_norm": None, "k_norm": None}
    if normed:
        given |= {name: torch.randn(D, generator=generator) for name in ("q_norm", "k_norm")}
    made = {name: None if x is None else x.to(WHERE, dtype) for name, x in given.items()}
    return made | {"eps": 1e-5, "centred": centred}


def part(c: Case, r: int, B: int) -> Case:
    """Request `r` alone, over caches of its own, with a block table of `B` columns."""
    first, last = c.meta.query_start_loc[r : r + 2].tolist()
    meta = AttentionMeta(
        c.meta.slot_mapping[first:last],
        c.meta.seq_lens[r : r + 1],
        torch.tensor([0, last - first], dtype=torch.int32, device=c.q.device),
        wide(c.meta.block_tables[r : r + 1], B),
    )
    q, k, v = (x[first:last] for x in (c.q, c.k, c.v))
    return Case(q, k, v, c.k_cache.clone(), c.v_cache.clone(), meta, c.rows[r : r + 1])


def padded(c: Case, reqs: int, query_len: int | None) -> Case:
    """The same batch as a larger key has it: `reqs` requests of no length, and their tokens."""
    tokens = reqs * (query_len or 5)
    slots, lens, starts, tables = c.meta
    ends = torch.arange(1, reqs + 1, dtype=torch.int32, device=WHERE) * (query_len or 0)
    pad = torch.nn.functional.pad
    meta = AttentionMeta(
        pad(slots, (0, tokens), value=-1),
        pad(lens, (0, reqs)),
        torch.cat([starts, starts[-1] + ends]),
        pad(tables, (0, 0, 0, reqs)),
    )
    q, k, v = (torch.cat([x, x.new_full((tokens, *x.shape[1:]), NAN)]) for x in (c.q, c.k, c.v))
    return Case(q, k, v, c.k_cache.clone(), c.v_cache.clone(), meta, c.rows)


def wide(tables: Tensor, B: int) -> Tensor:
    """The block tables with further columns, up to B, that name no block there is."""
    return torch.nn.functional.pad(tables, (0, B - tables.shape[1]), value=10**6)


def build(*rows: tuple[int, int], **options: Any) -> Case:
    """`case` on the device under test."""
    return case(*rows, device=WHERE, **options)
