"""The whole grid on the GPU: head dims, groups, blocks, windows, contexts of 1 to 8192, fp8 too."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.ops import ATTENTION
from fngraph.testing.cases import arguments, call, case
from fngraph.testing.differences import difference

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
    ran, options = 0, dict[str, Any]()
    if fp8:
        scales = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
        options |= dict(zip(("k_scale", "v_scale"), scales))
    for size, window, (rows, query_len) in itertools.product(
        (1, 16, 32, 256), (None, 100), ROWS.values()
    ):
        mine, theirs = (
            case(
                *rows, heads=heads, block_size=size, dtype=dtype, device="cuda", pad_reqs=2,
                pad_tokens=2 * (query_len or 3), query_len=query_len or 0, seed=size,
                cache_dtype=torch.float8_e4m3fn if fp8 else None,
            )
            for _ in range(2)
        )  # fmt: skip
        options["window"] = window
        config = ATTENTION.configure(*arguments(mine, mine.q, **options))
        if ATTENTION.backend(name).refusal(config) is not None:
            continue
        host = fg.HostBounds(max_query_len=max(n for n, _ in rows))
        got, want = call(name, mine, host, **options), call("reference", theirs, host, **options)
        assert not difference(got, want, mine, theirs), (size, window, rows)
        ran += 1
    if not ran:
        pytest.skip(f"{name} runs none of these")
