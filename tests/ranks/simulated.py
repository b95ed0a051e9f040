"""Processes of a test that are threads of this one: what torch does over a group is done by hand.

Torch's fused ops are what its documentation says that they are, a product and a collective, one
after the other. A tensor `as_on_cuda` says that it is on a GPU, and lies in host memory.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fngraph.ranks import faults, rows, symmetric
from fngraph.torch_facts import symmetric as facts

GROUP = "group of tp"
WAIT_S = 30
T = TypeVar("T")


class _OnCuda(Tensor):
    is_cuda = True

    def new_empty(self, *shape: Any) -> Tensor:  # type: ignore[override]
        """In host memory, and says so."""
        return self.as_subclass(Tensor).new_empty(*shape)


def as_on_cuda(x: Tensor) -> Tensor:
    return x.as_subclass(_OnCuda)


class World:
    """So many processes along one axis, whose group is `GROUP`.

    Attributes:
        fused: calls of torch's fused ops, by name, in the order in which they came.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.fused: list[str] = []
        self._own = threading.local()
        self._meeting = threading.Barrier(size)
        self._told: list[Any] = [None] * size

    @property
    def rank(self) -> int:
        return self._own.rank  # type: ignore[no-any-return]

    def run(self, fn: Callable[[int], T]) -> list[T]:
        """What each process returns; raises what the first of them has raised."""
        errors: list[BaseException] = []

        def one(rank: int) -> Any:
            self._own.rank = rank
            try:
                return fn(rank)
            except BaseException as error:
                errors.append(error)
                self._meeting.abort()  # nobody waits for it

        with ThreadPoolExecutor(self.size) as pool:
            made = list(pool.map(one, range(self.size)))
        for error in errors:
            raise error
        return made

    def each(self, own: Any, group: Any = GROUP) -> list[Any]:
        """What every process has, in the order of ranks."""
        assert group == GROUP
        self._told[self.rank] = own
        self._meeting.wait(WAIT_S)
        told = list(self._told)
        self._meeting.wait(WAIT_S)
        return told

    def summed(self, x: Tensor) -> Tensor:
        return torch.stack(self.each(x)).sum(0)

    def all_reduce(self, x: Tensor, op: Any, group: Any) -> None:
        assert op == dist.ReduceOp.SUM and group == GROUP
        x.copy_(self.summed(x.clone()))

    def reduce_scatter_into(self, out: Tensor, x: Tensor, group: Any) -> None:
        assert group == GROUP
        out.copy_(self.summed(x).chunk(self.size)[self.rank])

    def all_gather_into(self, out: Tensor, x: Tensor, group: Any) -> None:
        assert group == GROUP
        out.copy_(torch.cat(self.each(x)))

    def produce_and_all2all(
        self, chunk_producer: Callable[[int, Tensor], None], output: Tensor, group_name: str
    ) -> None:
        assert group_name == GROUP and len(output) % self.size == 0
        self.fused.append("matmul_all_to_all")
        made = output.chunk(self.size)
        for rank in reversed(range(self.size)):  # torch begins with another's, too
            chunk_producer(rank, made[rank])
        told = self.each([x.clone() for x in made])
        for x, theirs in zip(made, told, strict=True):
            x.copy_(theirs[self.rank])

    def fused_all_gather_matmul(
        self, A: Tensor, Bs: Sequence[Tensor], gather_dim: int, group_name: str, *, return_A: bool
    ) -> tuple[Tensor, list[Tensor]]:
        assert (gather_dim, group_name, return_A) == (0, GROUP, True)
        self.fused.append("all_gather_matmul")
        whole = torch.cat([x.as_subclass(Tensor) for x in self.each(A)])
        return whole, [whole @ B for B in Bs]


def make_world(monkeypatch: pytest.MonkeyPatch, size: int) -> World:
    """In which the library's own code runs, until the end of a test."""
    world = World(size)
    torchs = facts._symmetric()  # defines torch's ops, before they are others
    monkeypatch.setattr(torchs, "_pipelined_produce_and_all2all", world.produce_and_all2all)
    monkeypatch.setattr(faults, "resolve_group", lambda name: name)
    monkeypatch.setattr(dist, "get_world_size", lambda group: world.size)
    monkeypatch.setattr(dist, "get_rank", lambda group=GROUP: world.rank)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [*range(size)])
    monkeypatch.setattr(dist, "all_reduce", world.all_reduce)
    monkeypatch.setattr(rows, "reduce_scatter_into", world.reduce_scatter_into)
    monkeypatch.setattr(rows, "all_gather_into", world.all_gather_into)
    monkeypatch.setattr(symmetric, "gather_objects", world.each)
    monkeypatch.setattr(torch.ops, "symm_mem", world)
    monkeypatch.setattr(facts, "is_capturing", lambda: False)
    monkeypatch.setenv(facts._NO_MULTICAST, "1")  # threads share it, and would take turns
    return world
