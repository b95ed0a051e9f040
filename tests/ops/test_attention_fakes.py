"""Backends over libraries that are not here: over stand-ins that do as the documentation says."""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
from test_attention import BATCHES, bits, case
from test_attention_backends import NAN, arguments, worst_row
from torch import Tensor

import fngraph as fg
from fngraph.ops import ATTENTION, attention_flash, attention_varlen


def attend(q: Tensor, keys: list[Tensor], values: list[Tensor], starts: list[int], scale: float,
           window: tuple[int, int]) -> Tensor:  # fmt: skip
    """Requests one behind the other, causal to the lower right; what is nobody's is garbage."""
    out = torch.full_like(q, 7.0)
    for r, (k, v) in enumerate(zip(keys, values)):
        n = starts[r + 1] - starts[r]
        at = torch.arange(len(k) - n, len(k))[:, None]
        key = torch.arange(len(k))
        seen = torch.ones(n, len(k), dtype=torch.bool)
        if window[0] >= 0:
            seen &= key >= at - window[0]
        if window[1] >= 0:
            seen &= key <= at + window[1]
        each = q.shape[1] // k.shape[1]
        for h in range(q.shape[1]):
            qs = q[starts[r] : starts[r + 1], h].double()
            scores = (qs @ k[:, h // each].double().T * scale).masked_fill(~seen, -torch.inf)
            values_h = v[:, h // each].double()
            out[starts[r] : starts[r + 1], h] = (scores.softmax(-1) @ values_h).nan_to_num(0).to(q)
    return out


def rows(cache: Tensor, table: Tensor, lens: list[int]) -> list[Tensor]:
    return [cache[row.long()].flatten(0, 1)[:n] for row, n in zip(table, lens)]


def varlen_attn(q, k, v, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
    """torch 2.11's: contiguous keys."""
    starts, ends = cu_seq_q.tolist(), cu_seq_k.tolist()
    assert cu_seq_q.dtype is cu_seq_k.dtype is torch.int32
    assert max_q >= max(b - a for a, b in pairwise(starts))
    assert max_k >= max(b - a for a, b in pairwise(ends))
    parts = [[x[a:b] for a, b in pairwise(ends)] for x in (k, v)]
    return attend(q, *parts, starts, scale, window_size)


def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *,
                           softmax_scale, causal, window_size, softcap, block_table):  # fmt: skip
    """flash-attn's, over pages."""
    assert softcap == 0.0 and block_table.dtype is torch.int32
    lens = cu_seqlens_k.diff().tolist()
    window = (window_size[0], 0) if causal else window_size
    parts = [rows(x, block_table, lens) for x in (k, v)]
    return attend(q, *parts, cu_seqlens_q.tolist(), softmax_scale, window)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, page_table, cu_seqlens_q,
                            max_seqlen_q, softmax_scale, causal, window_size, softcap):  # fmt: skip
    """hopper's, over pages."""
    lens = cache_seqlens.tolist()
    window = (window_size[0], 0) if causal else window_size
    parts = [rows(x, page_table, lens) for x in (k_cache, v_cache)]
    return attend(q, *parts, cu_seqlens_q.tolist(), softmax_scale, window)


@pytest.fixture(params=["varlen", "flash_attn", "flash_attn_3"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> fg.ops.Backend:
    """Each over its stand-in."""
    attention_varlen._parameters.cache_clear()
    monkeypatch.setattr(attention_varlen, "_varlen", lambda: varlen_attn)
    for name, fn in (("flash_attn", flash_attn_varlen_func),
                     ("flash_attn_interface", flash_attn_with_kvcache)):  # fmt: skip
        module = ModuleType(name)
        setattr(module, fn.__name__, fn)
        monkeypatch.setitem(sys.modules, name, module)
    request.addfinalizer(attention_varlen._parameters.cache_clear)
    return ATTENTION.backend(request.param)


@pytest.mark.parametrize("batch", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize(
    "options", [{}, {"window": 3}, {"causal": False}, {"causal": False, "window": 2}]
)
@pytest.mark.parametrize("query_len", [0, 2])
def test_what_it_is_called_with_is_what_attention_means(backend, batch, options, query_len):
    if options.get("causal") is False:
        batch = [(n + past, 0) for n, past in batch]
    padding: dict[str, Any] = {"pad_reqs": 2, "pad_tokens": 4, "query_len": query_len}
    a, b = (case(*batch, heads=(4, 2, 8), block_size=4, **padding) for _ in "ab")
    args = arguments(a, torch.full_like(a.q, NAN), **options)
    host = fg.HostBounds(max_query_len=max(2, *(n for n, _ in batch)))
    ATTENTION.call(backend, args, ATTENTION.configure(*args), host)
    wanted = arguments(b, torch.full_like(b.q, NAN), **options)
    ATTENTION.call(ATTENTION.backend(), wanted, ATTENTION.configure(*wanted), host)
    assert worst_row(args[9], wanted[9]) < 1e-5
    assert bits(a.k_cache).equal(bits(b.k_cache)) and bits(a.v_cache).equal(bits(b.v_cache))


@pytest.mark.parametrize(
    "change, reason",
    [
        ({"dtype": torch.float32}, "computes in float16 and bfloat16, not in torch.float32"),
        ({"cache_dtype": torch.float16}, "the cache is torch.float16"),
        ({"head_dim": 100}, "head_dim 100 is not a multiple of 8"),
        ({"head_dim": 512}, "head_dim 512 is not a multiple of 8 up to 256"),
        ({"device": "cpu"}, "runs on CUDA, not on cpu"),
        ({}, None),
    ],
)
def test_what_flash_attention_cannot_compute_is_refused(change, reason, monkeypatch):
    monkeypatch.setattr(attention_flash, "missing_2", lambda: None)
    monkeypatch.setattr(attention_flash, "missing_3", lambda: None)
    c = case((3, 5), dtype=torch.bfloat16)
    config = ATTENTION.configure(*arguments(c, c.q))
    config = config._replace(device="cuda", block_size=256)._replace(**change)
    for name in ("varlen", "flash_attn", "flash_attn_3"):
        found = ATTENTION.backend(name).supports(config)
        assert (found is None) if reason is None else reason in found
    if reason is None:
        pages = ATTENTION.backend("flash_attn").supports(config._replace(block_size=16))
        assert pages == "block_size 16 is not a multiple of 256"
