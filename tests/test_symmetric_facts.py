"""What is asked of torch for memory that processes share, and of its ops that go through such."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fngraph.torch_facts import symmetric

VARIABLE = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
CUDA = torch.device("cuda", 3)
SIZE = 16
PROCESSES = 3


class Torch:
    """Stands for torch's memory of so many processes, and its ops; this one is the second.

    Attributes:
        further: bytes from where an allocation begins to its tensor.
        multicast: what the variable was at each call, by name.
        fails: the name of what raises.
        handle: what a rendezvous gives.
        room: memory of a group that its ops go through.
    """

    rank = 1

    def __init__(self) -> None:
        self.further, self.fails = 0, ""
        self.multicast: list[tuple[str, str | None]] = []
        self.own = torch.full((SIZE,), 7, dtype=torch.uint8)
        self.is_synchronized_after_zeros = False
        self.room = torch.zeros(1)
        self._group_name_to_workspace_tensor = {"tp": self.room}

    def _called(self, name: str) -> None:
        self.multicast.append((name, os.environ.get(VARIABLE)))
        if name == self.fails:
            raise RuntimeError(f"{name} fails")

    def empty(self, size: int, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._called("empty")
        assert (size, dtype, device) == (SIZE, torch.uint8, CUDA)
        return self.own

    def synchronize(self, device: torch.device) -> None:
        assert device == CUDA
        self.is_synchronized_after_zeros = not self.own.any()

    def rendezvous(self, own: Tensor, group: str) -> Any:
        self._called("rendezvous")
        assert own is self.own and group == "tp"
        assert self.is_synchronized_after_zeros, "a peer's words would be zeroed"
        self.buffer_ptrs = [1000, own.data_ptr() - self.further, 5000]
        return self

    def _pipelined_produce_and_all2all(
        self, chunk_producer: Callable[[int, Tensor], None], output: Tensor, group_name: str
    ) -> None:
        """Peers have twice and three times as much as this process."""
        self._called("matmul_all_to_all")
        assert group_name == "tp"
        made = [torch.empty_like(one) for one in output.chunk(PROCESSES)]
        for rank, one in enumerate(made):
            chunk_producer(rank, one)
        output.copy_(torch.cat([made[self.rank] * (1 + r) for r in range(PROCESSES)]))

    def fused_all_gather_matmul(
        self, A: Tensor, Bs: list[Tensor], gather_dim: int, group_name: str, *, return_A: bool
    ) -> tuple[Tensor, list[Tensor]]:
        self._called("all_gather_matmul")
        assert isinstance(Bs, list), "as its schema says"
        assert (gather_dim, group_name) == (0, "tp")
        assert return_A is True, "else it is by multicast"
        return A, [A @ B for B in Bs]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Torch:
    symmetric._symmetric()  # defines torch's ops, before they are others
    made = Torch()
    monkeypatch.setattr(symmetric, "_symmetric", lambda: made)
    monkeypatch.setattr(symmetric, "is_capturing", lambda: True)
    monkeypatch.setattr(torch.ops, "symm_mem", made)
    monkeypatch.setattr(torch.cuda, "synchronize", made.synchronize)
    monkeypatch.delenv(VARIABLE, raising=False)
    return made


X, W = torch.arange(12.0).view(6, 2), torch.arange(8.0).view(2, 4)


def scattered(kept: list[Any]) -> Tensor:
    return symmetric.matmul_all_to_all(X, W, PROCESSES, "tp", kept)


def gathered(kept: list[Any]) -> Sequence[Tensor]:
    return symmetric.all_gather_matmul(X, (W, W + 1), "tp", kept)


CALLS: dict[str, Callable[[list[Any]], Any]] = {
    "empty": lambda kept: symmetric.share("tp", SIZE, CUDA),
    "matmul_all_to_all": scattered,
    "all_gather_matmul": gathered,
}


@pytest.mark.parametrize("further", [0, 64])
def test_a_block_is_zeros_before_a_peer_may_write(fake: Torch, further: int) -> None:
    """Addresses are of tensors, which may lie further on than what torch has allocated."""
    fake.further = further
    own, addresses, kept = symmetric.share("tp", SIZE, CUDA)
    assert own is fake.own and not own.any()
    assert addresses == [1000 + further, own.data_ptr(), 5000 + further]
    assert kept is fake, "the handle keeps all of them alive"


def test_products_are_what_torch_gives(fake: Torch) -> None:
    own = X[2:4] @ W
    assert torch.equal(scattered([]), torch.stack([own, own * 2, own * 3]))
    for got, want in zip(gathered([]), (X @ W, X @ (W + 1)), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("before", [None, "0", "1"])
@pytest.mark.parametrize("name", CALLS)
def test_nothing_is_by_multicast_and_the_variable_is_as_it_was(
    fake: Torch, monkeypatch: pytest.MonkeyPatch, name: str, before: str | None, fails: bool
) -> None:
    if before is not None:
        monkeypatch.setenv(VARIABLE, before)
    fake.fails = name if fails else ""
    if fails:
        with pytest.raises(RuntimeError, match=f"{name} fails"):
            CALLS[name]([])
    else:
        CALLS[name]([])
    assert fake.multicast and {told for _, told in fake.multicast} == {"1"}
    assert os.environ.get(VARIABLE) == before


@pytest.mark.parametrize("call", [scattered, gathered])
def test_each_op_keeps_what_a_graph_goes_through(
    fake: Torch, monkeypatch: pytest.MonkeyPatch, call: Callable[[list[Any]], Any]
) -> None:
    """Once, and while a graph is captured."""
    other = object()
    kept: list[Any] = [other]
    for _ in range(2):
        call(kept)
        assert len(kept) == 2 and kept[0] is other and kept[1] is fake.room
    fake._group_name_to_workspace_tensor["tp"] = torch.zeros(2)
    monkeypatch.setattr(symmetric, "is_capturing", lambda: False)
    call(kept)
    assert len(kept) == 2
    monkeypatch.setattr(symmetric, "is_capturing", lambda: True)
    call(kept)
    assert [len(x) for x in kept[1:]] == [1, 2]
