"""Products that go at once with a collective are what they are one after the other, and go so where
they can: over processes that are threads, and torch's ops by their meaning."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import simulated
import torch
from simulated import GROUP, World, as_on_cuda, make_world
from torch import Tensor

from fngraph.ops.symmetric import APART, ONE_SHOT, SymmetricMemory
from fngraph.ranks import norms, rows

pytestmark = pytest.mark.usefixtures("one_thread")
E, F = 8, 6
EPS = 1e-5
WHO = ("tp", GROUP)
SIZES = (2, 3)


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rows_for(size: int) -> int:
    """The fewest that go at once."""
    return 512 + -512 % size


def memory(rank: int, size: int) -> SymmetricMemory:
    none = torch.empty(0)
    return SymmetricMemory(none, none, none, rank, size, 1)


def shares(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    of = lambda *who: memory(world.rank, world.size)  # noqa: E731
    monkeypatch.setattr(rows, "shared_of", of)


def among_zeros(x: Tensor, rank: int, size: int) -> Tensor:
    """A process's own rows."""
    k = -(-len(x) // size)
    made = torch.zeros_like(x)
    made[rank * k : (rank + 1) * k] = x[rank * k : (rank + 1) * k]
    return made


def is_close(got: Tensor, want: Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_a_product_whose_rows_are_summed(
    monkeypatch: pytest.MonkeyPatch, size: int, at_once: bool
) -> None:
    world, T = make_world(monkeypatch, size), rows_for(size)
    shares(monkeypatch, world)
    xs, ws = [drawn(i, T, F) for i in range(size)], [drawn(9 + i, E, F) for i in range(size)]
    y, weight = drawn(20, T, E), drawn(21, E)

    def run(rank: int) -> tuple[Tensor, Tensor]:
        x = as_on_cuda(xs[rank]) if at_once else xs[rank]
        return rows._product_sum_and_norm(x, ws[rank], y, weight, EPS, False, *WHO)

    total = y + sum(x @ w.t() for x, w in zip(xs, ws))
    normed = total * torch.rsqrt(total.square().mean(-1, keepdim=True) + EPS) * weight
    for rank, (own, own_normed) in enumerate(world.run(run)):
        is_close(own, among_zeros(total, rank, size))
        is_close(own_normed, among_zeros(normed, rank, size))
    assert world.fused == ["matmul_all_to_all"] * size * at_once


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_products_of_rows_that_are_gathered(
    monkeypatch: pytest.MonkeyPatch, size: int, at_once: bool
) -> None:
    world, T = make_world(monkeypatch, size), rows_for(size)
    shares(monkeypatch, world)
    x, weights = drawn(0, T, E), [drawn(1, F, E), drawn(2, 3, E)]

    def run(rank: int) -> list[Tensor]:
        own = among_zeros(x, rank, size)
        return rows._gathered_products(as_on_cuda(own) if at_once else own, weights, [1, 1], *WHO)

    for made in world.run(run):
        for got, w in zip(made, weights, strict=True):
            is_close(got, x @ w.t())
    assert world.fused == ["all_gather_matmul"] * size * at_once


def of(T: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return as_on_cuda(torch.zeros(T, E, dtype=dtype))


OVERLAPS: dict[str, tuple[Tensor, int, bool]] = {
    "the fewest rows": (of(512), 2, True),
    "a row for each fewer": (of(510), 2, False),
    "many rows": (of(4096), 2, True),
    "rows that divide evenly over three": (of(513), 3, True),
    "rows that do not over two": (of(513), 2, False),
    "rows that do not over three": (of(512), 3, False),
    "bfloat16": (of(512, torch.bfloat16), 2, True),
    "float16": (of(512, torch.float16), 2, True),
    "float64": (of(512, torch.float64), 2, False),
    "a batch of matrices": (as_on_cuda(torch.zeros(512, 2, E)), 2, False),
    "on the CPU": (torch.zeros(512, E), 2, False),
}


@pytest.mark.parametrize("name", OVERLAPS)
def test_where_a_product_goes_at_once_with_a_collective(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    x, size, overlaps = OVERLAPS[name]
    make_world(monkeypatch, size)
    shared = memory(0, size)
    monkeypatch.setattr(rows, "shared_of", lambda *who: shared if who == WHO else None)
    assert rows._overlapping(x, *WHO) is (shared if overlaps else None)


def test_it_goes_one_after_the_other_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    make_world(monkeypatch, 2)
    monkeypatch.setattr(rows, "shared_of", lambda *who: None)
    assert rows._overlapping(of(512), *WHO) is None


# --- a sum and the norm behind it -----------------------------------------------------------------


class Kernel:
    """Stands for the kernel, and for memory that is good for one way.

    Attributes:
        asked: rows and bytes of a row.
        given: what the kernel got.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
        self.asked: list[tuple[int, int]] = []
        self.given: list[tuple[Any, ...]] = []
        self.shared = SimpleNamespace(way=lambda *sizes: self.asked.append(sizes) or way)
        monkeypatch.setattr(norms, "shared_of", lambda *who: self.shared)
        monkeypatch.setattr(norms, "_kernel", lambda: self.run)
        monkeypatch.setattr(norms, "reduced", lambda x, *how: (x * 2).as_subclass(Tensor))

    def run(self, *given: Any) -> str:
        self.given.append(given)
        return "made"


def summed(x: Tensor, way: str, monkeypatch: pytest.MonkeyPatch) -> tuple[Kernel, Any]:
    kernel = Kernel(monkeypatch, way)
    y, weight = torch.ones(x.shape, dtype=x.dtype), torch.ones(x.shape[-1], dtype=x.dtype)
    return kernel, norms._run(x, y, weight, EPS, True, *WHO)


@pytest.mark.parametrize(("dtype", "row_bytes"), [(torch.float32, 32), (torch.bfloat16, 16)])
def test_the_way_of_a_sum_goes_by_its_rows(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, row_bytes: int
) -> None:
    """Whatever dims are before the last."""
    x = as_on_cuda(torch.ones(3, 5, E, dtype=dtype))
    kernel, made = summed(x, ONE_SHOT, monkeypatch)
    assert kernel.asked == [(15, row_bytes)] and made == "made"
    (got,) = kernel.given
    assert got[0] is x and got[3:] == (EPS, True, kernel.shared, ONE_SHOT)


@pytest.mark.parametrize("name", ["no rows", "no columns", "on the CPU", "apart"])
def test_a_sum_without_the_kernel(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Nothing to sum, or too much."""
    shape = {"no rows": (0, E), "no columns": (3, 0)}.get(name, (3, E))
    x = torch.ones(shape)
    x = x if name == "on the CPU" else as_on_cuda(x)
    kernel, (total, _) = summed(x, APART if name == "apart" else ONE_SHOT, monkeypatch)
    assert kernel.given == [] and len(kernel.asked) == (name == "apart")
    assert torch.equal(total, torch.full(shape, 3.0))


def test_threads_fail_as_processes_do() -> None:
    """Those who wait for one that has failed do not wait for long, and it is its error that
    comes."""
    world = simulated.World(3)

    def fails(rank: int) -> Any:
        if rank == 1:
            raise KeyError("gone")
        return world.each(rank)

    with pytest.raises(KeyError, match="gone"):
        world.run(fails)
    assert simulated.World(2).run(lambda rank: rank) == [0, 1]
