"""Backends over libraries that are not here: over stand-ins that do as the documentation says."""

from __future__ import annotations

import dataclasses
import sys
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.ops import ATTENTION, AttentionConfig, AttentionMeta
from fngraph.ops.paged import flash, flashinfer, reference
from fngraph.testing.cases import BATCHES, arguments, call, case
from fngraph.testing.differences import difference


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
    for name, fn in (("torch.nn.attention.varlen", varlen_attn),
                     ("flash_attn", flash_attn_varlen_func),
                     ("flash_attn_interface", flash_attn_with_kvcache)):  # fmt: skip
        module = ModuleType(name)
        setattr(module, fn.__name__, fn)
        monkeypatch.setitem(sys.modules, name, module)
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
    host = fg.HostBounds(max_query_len=max(2, *(n for n, _ in batch)))
    got, want = call(backend, a, host, **options), call("reference", b, host, **options)
    assert not difference(got, want, a, b)


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
    monkeypatch.setattr(flash, "missing_2", lambda: None)
    monkeypatch.setattr(flash, "missing_3", lambda: None)
    c = case((3, 5), dtype=torch.bfloat16)
    config = ATTENTION.configure(*arguments(c, c.q))
    config = config._replace(device="cuda", block_size=256)._replace(**change)
    for name in ("varlen", "flash_attn", "flash_attn_3"):
        found = ATTENTION.backend(name).supports(config)
        assert (found is None) if reason is None else reason in found
    if reason is None:
        pages = ATTENTION.backend("flash_attn").supports(config._replace(block_size=16))
        assert pages == "block_size 16 is not a multiple of 256"


# --- flashinfer -----------------------------------------------------------------------------------


class Paged:
    """What both wrappers do: `plan` on the host, `run` over what it has put on the device."""

    def __init__(self, scratch: Tensor, layout: str, **buffers: Any) -> None:
        assert layout == "NHD"
        self.fixed = {name: x for name, x in buffers.items() if name.endswith("_buffer")}

    def plan(self, starts: Tensor, indptr: Tensor, indices: Tensor, last: Tensor, num_heads: int,
             num_kv_heads: int, head_dim: int, page_size: int, *, sm_scale: float, **rest: Any
             ) -> None:  # fmt: skip
        assert all(x.dtype is torch.int32 for x in (starts, indptr, indices, last))
        assert rest["window_left"] == -1 and rest["logits_soft_cap"] is None
        given = {"indptr": indptr, "indices": indices, "last_page_len": last}
        for name, x in given.items():
            into = self.fixed.get(f"paged_kv_{name}_buffer")
            if into is not None:
                assert name == "indices" or into.shape == x.shape
                into[: len(x)] = x
                given[name] = into
        self.given, self.starts, self.page, self.scale = given, starts, page_size, sm_scale

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor]) -> Tensor:
        indptr, indices, last = self.given.values()
        num = indptr.diff()
        lens = torch.where(num > 0, (num - 1) * self.page + last, 0)
        at = indptr[:-1, None] + torch.arange(toys.B)
        tables = indices[at.clamp(max=len(indices) - 1)]
        (_, H, D), K = q.shape, kv[0].shape[2]
        config = AttentionConfig(H, K, D, self.page, q.dtype, q.dtype, "cpu", self.scale)
        meta = AttentionMeta(None, lens, self.starts, tables)  # type: ignore[arg-type]
        return reference.attend(q, kv, meta, config)


class Decode(Paged):
    """One token a request."""

    def plan(self, indptr: Tensor, *args: Any, **options: Any) -> None:
        super().plan(torch.arange(len(indptr), dtype=torch.int32), indptr, *args, **options)


class Prefill(Paged):
    """Any batch; nothing is fixed."""

    def plan(self, *args: Any, causal: bool, **options: Any) -> None:
        assert causal and not self.fixed
        super().plan(*args, **options)


def test_flashinfer_is_planned_for_each_step(monkeypatch, request):
    module = ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Decode  # type: ignore[attr-defined]
    module.BatchPrefillWithPagedKVCacheWrapper = Prefill  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(flashinfer, "WORKSPACE", 16)
    backend = dataclasses.replace(
        flashinfer.BACKEND, supports=lambda config: None, missing=lambda: None
    )
    ATTENTION.register(backend)
    request.addfinalizer(lambda: ATTENTION.register(flashinfer.BACKEND))
    fast = fg.graphify(
        toys.attend, donate="cache", stage="batch", sizes=toys.SIZES, query_lens=(1, 2),
        backends={"attention": "flashinfer"}, recorder="tape",
    )  # fmt: skip
    params, cache = toys.attention_params(), toys.attention_cache()
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    ran = []
    for rows, query_len in [
        ([3, 1, 5], None), ([(1, 3), (1, 1), (1, 5)], 1), ([(1, 4), (1, 2), (1, 6)], 1),
        ([(2, 5), (2, 3)], 2), ([(1, 7), (3, 5), (1, 7)], None), ([(1, 8)], 1),
    ]:  # fmt: skip
        batch = toys.batch(*rows, query_len=query_len, seed=len(rows))
        want, after = toys.bare(toys.attend, params, cache, batch)
        got, _ = step(cache, batch)
        ran.append(step.dispatch(batch.spec).mode.name)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
        toys.assert_trees(cache, after, atol=1e-5, rtol=1e-5)
    assert ran == ["PIECEWISE", "FULL", "FULL", "PIECEWISE", "PIECEWISE", "FULL"]
