"""The whole grid on the GPU: head dims, groups, blocks, windows, contexts of 1 to 8192, fp8 too."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch

import fngraph as fg
from fngraph.ops import ATTENTION
from fngraph.testing.cases import Case, arguments, call, case
from fngraph.testing.differences import difference

HEADS = [(4, 4, 64), (8, 1, 80), (6, 2, 96), (16, 2, 128), (8, 1, 192), (4, 1, 256)]
ROWS = {
    "one token each": ([(1, 0), (1, 8191), (1, 15), (1, 2000), (1, 1)], 1),
    "four each": ([(4, 0), (4, 4000), (4, 31)], 4),
    "ragged": ([(1, 8191), (300, 0), (1, 4), (64, 1000), (2, 255)], None),
}
INNER = list(itertools.product((1, 16, 32, 256), (None, 100), ROWS))


def point(heads: Any, dtype: Any, fp8: bool, size: int, rows: str) -> Case:
    """The same case at each call."""
    given, query_len = ROWS[rows]
    return case(
        *given, heads=heads, block_size=size, dtype=dtype, device="cuda", pad_reqs=2,
        pad_tokens=2 * (query_len or 3), query_len=query_len or 0, seed=size,
        cache_dtype=torch.float8_e4m3fn if fp8 else None,
    )  # fmt: skip


def options(fp8: bool, window: int | None) -> dict[str, Any]:
    scales = torch.tensor(0.5, device="cuda"), torch.tensor(2.0, device="cuda")
    return {"window": window} | (dict(zip(("k_scale", "v_scale"), scales)) if fp8 else {})


@functools.lru_cache(maxsize=len(INNER))  # for all backends, since it takes most of the time
def wanted(heads: Any, dtype: Any, fp8: bool, size: int, window: Any, rows: str) -> Any:
    """What `reference` makes of a point, and the case that it has made it of."""
    theirs = point(heads, dtype, fp8, size, rows)
    host = fg.HostBounds(max_query_len=max(n for n, _ in ROWS[rows][0]))
    return call("reference", theirs, host, **options(fp8, window)), theirs


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["sdpa", "varlen", "triton", "triton_decode"])
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fp8", [False, True], ids=["as the model", "fp8"])
def test_every_point(name, heads, dtype, fp8):
    ran = 0
    for size, window, rows in INNER:
        mine, given = point(heads, dtype, fp8, size, rows), options(fp8, window)
        config = ATTENTION.configure(*arguments(mine, mine.q, **given))
        if ATTENTION.backend(name).refusal(config) is not None:
            continue
        host = fg.HostBounds(max_query_len=max(n for n, _ in ROWS[rows][0]))
        got, (want, theirs) = (
            call(name, mine, host, **given), wanted(heads, dtype, fp8, size, window, rows)
        )  # fmt: skip
        assert not difference(got, want, mine, theirs), (size, window, rows)
        ran += 1
    if not ran:
        pytest.skip(f"{name} runs none of these")
