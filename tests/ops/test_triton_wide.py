"""Triton's kernels of linear layers of up to 64 rows: on CUDA with `-m gpu`, else interpreted, by
test_triton_interpreter.py. What they write is poisoned before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fused_cases import draw
from triton_cases import GPU, WHERE

from fngraph.ops import fused_linear
from fngraph.ops.fused import plain_rms_norm
from fngraph.ops.fused_linear import WideTile, plain, wide_of
from fngraph.ops.triton.products import skinny, wide

pytestmark = [pytest.mark.gpu] if GPU else []
# Interpreted, products are in float32: bfloat16 is not known there
DTYPE = torch.bfloat16 if GPU else torch.float32
CLOSE = {"atol": 0.04, "rtol": 0.02} if GPU else {"atol": 1e-4, "rtol": 1e-4}
SIZES = [(64, 80), (200, 512), (96, 384)]  # (N, K)
TILES = [WideTile(64, 64, 1, 4, 3), WideTile(64, 128, 2, 4, 3), WideTile(32, 64, 4, 4, 2)]


def weights(count: int, N: int, K: int) -> list[torch.Tensor]:
    return [(draw(N, K, seed=i) / K**0.5).to(DTYPE).to(WHERE) for i in range(count)]


@pytest.mark.parametrize("rows", [1, 16, 21, 64] if GPU else [3, 21])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_gate_and_a_product_are_near_to_torchs(rows: int, size: tuple[int, int]):
    x, ws = draw(rows, size[1] + 8, dtype=DTYPE).to(WHERE)[:, 8:], weights(2, *size)
    out = wide.product(x, ws, TILES[0])
    torch.testing.assert_close(out, plain(x, ws, None, None, 0.0, False, True), **CLOSE)
    alone = wide.product(x, ws[:1], TILES[0])
    assert alone.dtype == DTYPE
    torch.testing.assert_close(alone, x @ ws[0].t(), **CLOSE)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"in {tile.split}")
@pytest.mark.parametrize("centred", [None, False, True])
def test_a_sum_and_its_norm_are_near_to_torchs(tile: WideTile, centred: bool | None):
    for rows in (1, 21, 64) if GPU else (21,):
        for N, K in SIZES:
            (w,), norm = weights(1, N, K), draw(N, dtype=DTYPE, seed=3).to(WHERE)
            x = draw(rows, K, dtype=DTYPE).to(WHERE)
            more = draw(rows, 2 * N, dtype=DTYPE, seed=4).to(WHERE)[:, N:]
            by = None if centred is None else norm
            total, normed = wide.summed(x, w, more, by, 1e-5, bool(centred), tile)
            torch.testing.assert_close(total, x @ w.t() + more, **CLOSE)
            want = total if centred is None else plain_rms_norm(total, norm, 1e-5, centred)
            torch.testing.assert_close(normed, want, **CLOSE)


@pytest.mark.parametrize("rows", [2, 8, 9, 64])
def test_a_product_alone_goes_to_its_kernel_and_is_of_all_weights(rows: int, monkeypatch):
    """Of q, k and v with a norm, which is made apart; such that lie apart are torch's from 9 on."""
    ran = []
    half = torch.bfloat16 if GPU else torch.float16  # interpreted, the one half precision

    def watch(module: Any, name: str) -> None:
        was = getattr(module, name)

        def watched(*given: Any, **how: Any) -> Any:
            ran.append(name)
            return was(*given, **how)

        monkeypatch.setattr(module, name, watched)

    watch(skinny, "run")
    watch(wide, "product")
    watch(fused_linear, "_by_torch")
    monkeypatch.setattr(fused_linear, "has_kernels", lambda x: True)
    K, sizes = 2176, (64 * 60, 64 * 20, 64 * 20) if GPU else (70, 40, 30)
    whole = (draw(sum(sizes), K) / K**0.5).to(half).to(WHERE)
    x, norm = draw(rows, K).to(half).to(WHERE), draw(K, seed=3).to(half).to(WHERE)
    want = plain(x.float(), [whole.float()], norm.float(), None, 1e-5, False, False)
    for weights in (list(whole.split(sizes)), [w.clone() for w in whole.split(sizes)]):
        got = fused_linear.run(x, weights, norm, None, 1e-5, False, False, False, False)
        assert got.shape == want.shape
        assert (got.float() - want).norm() < 0.01 * want.norm()
    assert ran == (["run", "run"] if rows <= 8 else ["product", "_by_torch"])


def test_tiles_fill_the_processors_and_no_more():
    """Two processors on the CPU, 132 of an H200: columns are cut until that many have a part."""
    device = torch.device(WHERE, 0) if GPU else torch.device("cpu")
    assert wide_of(64, 8192, 64, True, device).split == 1
    assert wide_of(64, 8192, 64, False, device).split == (8 if GPU else 2)
    assert wide_of(64, 8192, 64 * 200, False, device).split == 1
    assert wide_of(64, 600, 64, False, device).split == 1  # of too few columns
    assert [wide_of(T, 8192, 64, False, device) is None for T in (1, 2, 64, 65)] == [
        True, False, False, True,
    ]  # fmt: skip
    assert wide_of(64, 8192, 64, False, device, itemsize=4) is None
    assert wide_of(64, 2048, 64 * 2004, False, device, sums=False) is None
    alone = [wide_of(64, 8192, 64 * n, False, device, sums=False) for n in (1, 87, 88, 2004)]
    assert [tile and tile.split for tile in alone] == [None, None if GPU else 1, 1, 1]
    one_row = [wide_of(1, 14336, 4096, is_gated, device) is None for is_gated in (False, True)]
    assert one_row == [False, True]  # a gate of one row is one launch, however long
