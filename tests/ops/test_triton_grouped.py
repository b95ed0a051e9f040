"""Triton's kernels of grouped rows: on CUDA with `-m gpu`, else interpreted, by
test_triton_interpreter.py. What they write is poisoned before."""

from __future__ import annotations

import pytest
import torch
from fused_cases import draw
from torch import Tensor
from triton_cases import GPU, WHERE

from fngraph.ops.fused import plain_silu_mul
from fngraph.ops.grouped import GroupTile, plain_group_rows, tile_of
from fngraph.ops.triton.products import grouped

pytestmark = [pytest.mark.gpu] if GPU else []
DTYPE = torch.bfloat16 if GPU else torch.float32  # interpreted, bfloat16 is not known
CLOSE = {"atol": 0.04, "rtol": 0.02} if GPU else {"atol": 1e-4, "rtol": 1e-4}
SIZES = [(6, 40, 80), (1, 64, 64), (130, 24, 48)]  # groups, columns out and in
TILES = [GroupTile(16, 32, 16, 4, 2), GroupTile(64, 128, 32, 4, 3)]
GROUPS = {  # of rows, as shares of the number of groups; 1 and above: of none
    "spread": lambda N: torch.rand(N, generator=torch.Generator().manual_seed(N)),
    "all in one": lambda N: torch.full((N,), 0.5),
    "some in none": lambda N: torch.linspace(0, 1.4, N),
    "none in any": lambda N: torch.ones(N),
}


def groups(kind: str, N: int, X: int) -> Tensor:
    return (GROUPS[kind](N) * X).long().clamp(max=X).to(WHERE)


def by_group(x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """Group by group; rows of none are NaN."""
    out = x.new_full((len(x), weight.shape[1]), float("nan"))
    begin = 0
    for w, end in zip(weight, ends.tolist()):
        out[begin:end] = x[begin:end] @ w.t()
        begin = end
    return out


@pytest.mark.parametrize("kind", GROUPS)
@pytest.mark.parametrize("N", [1, 8, 33, 300])
def test_rows_are_sorted_as_by_torch(kind: str, N: int):
    for X in (1, 5, 130):
        group, numbers = groups(kind, N, X), torch.arange(X, device=WHERE)
        for got, want in zip(grouped.group_rows(group, numbers), plain_group_rows(group, numbers)):
            torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("tile", TILES, ids=lambda tile: f"{tile.rows} rows")
@pytest.mark.parametrize("kind", GROUPS)
def test_products_are_near_to_torchs(kind: str, tile: GroupTile):
    """Strided rows, columns that no tile divides; rows of no group stay as they were."""
    for X, O, K in SIZES:
        T, chosen = 11, 2
        group = groups(kind, T * chosen, X)
        order, ends, _ = plain_group_rows(group, torch.arange(X, device=WHERE))
        x = draw(T, K + 8, dtype=DTYPE).to(WHERE)[:, 8:]
        gate, up = ((draw(X, O, K, seed=i) / K**0.5).to(DTYPE).to(WHERE) for i in (1, 2))
        out = x.new_full((T * chosen, O), float("nan"))
        grouped.gated(x, order, ends, gate, up, out, chosen, tile)
        rows = x[order // chosen]
        want = plain_silu_mul(*(by_group(rows, ends, w) for w in (gate, up)))
        torch.testing.assert_close(out, want, equal_nan=True, **CLOSE)
        out = torch.full_like(out, float("nan"))
        grouped.linear(rows, ends, gate, out, tile)
        torch.testing.assert_close(out, by_group(rows, ends, gate), equal_nan=True, **CLOSE)


def test_a_row_does_not_depend_on_the_others_of_its_group():
    X, O, K, N = 3, 32, 64, 20
    tile = TILES[0]
    weight = draw(X, O, K, dtype=DTYPE, seed=1).to(WHERE)
    x, ends = draw(N, K, dtype=DTYPE).to(WHERE), torch.tensor([20, 20, 20], device=WHERE).int()
    out, alone = (x.new_empty(N, O) for _ in range(2))
    grouped.linear(x, ends, weight, out, tile)
    for n in range(N):
        one = x.new_empty(1, O)
        grouped.linear(x[n : n + 1], torch.ones_like(ends), weight, one, tile)
        alone[n] = one[0]
    torch.testing.assert_close(out, alone, rtol=0, atol=0)


def test_a_tile_has_room_for_twice_as_many_rows_as_a_group_has_on_average():
    assert [tile_of(N, 8, True).most for N in (8, 100, 200, 1000)] == [16, 32, 64, 64]
