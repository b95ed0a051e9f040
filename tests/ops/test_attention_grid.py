"""The whole grid on the GPU: head dims, groups, blocks, windows, contexts of 1 to 8192, fp8 too."""

from __future__ import annotations

import itertools

import pytest
import torch
from test_attention import case
from test_attention_backends import NAN, TOLERANCE, arguments, worst_row

import fngraph as fg
from fngraph.ops import ATTENTION

HEADS = [(4, 4, 64), (8, 1, 80), (6, 2, 96), (16, 2, 128), (8, 1, 192), (4, 1, 256)]
ROWS = {
    "one token each": ([(1, 0), (1, 8191), (1, 15), (1, 2000), (1, 1)], 1),
    "four each": ([(4, 0), (4, 4000), (4, 31)], 4),
    "ragged": ([(1, 8191), (300, 0), (1, 4), (64, 1000), (2, 255)], None),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "varlen", "triton", "triton_decode"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["as the model", "fp8"])
def test_every_point(name, heads, dtype, fp8):
    ran = 0
    for size, window, (rows, query_len) in itertools.product(
        (1, 16, 32, 256), (None, 100), ROWS.values()
    ):
        batch = case(
            *rows, heads=heads, block_size=size, dtype=dtype, device="cuda", pad_reqs=2,
            pad_tokens=2 * (query_len or 3), query_len=query_len or 0, seed=size,
        )  # fmt: skip
        options = {"window": window}
        if fp8:
            k, v = batch.k_cache.nan_to_num(0), batch.v_cache.nan_to_num(0)
            batch.k_cache, batch.v_cache = (x.to(torch.float8_e4m3fn) for x in (k, v))
            scales = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
            options |= dict(zip(("k_scale", "v_scale"), scales))
        got, want = torch.full_like(batch.q, NAN), torch.full_like(batch.q, NAN)
        given = arguments(batch, got, **options)
        backend, config = ATTENTION.backend(name), ATTENTION.configure(*given)
        if backend.refusal(config) is not None:
            continue
        host = fg.HostBounds(max_query_len=max(n for n, _ in rows))
        ATTENTION.call(backend, given, config, host)
        cache = [x.clone() for x in (batch.k_cache, batch.v_cache)]
        given = arguments(batch, want, **options)
        ATTENTION.call(ATTENTION.backend("reference"), given, config, host)
        assert worst_row(got, want) < TOLERANCE[dtype], (size, window, rows)
        for a, b in zip(cache, (batch.k_cache, batch.v_cache)):
            assert a.view(torch.uint8).equal(b.view(torch.uint8))
        ran += 1
    if not ran:
        pytest.skip(f"{name} runs none of these")
