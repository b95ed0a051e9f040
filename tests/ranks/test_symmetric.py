"""Memory that processes share: whether it is made, of what, and what becomes of it where torch has
none for them. Processes are threads here, and the GPU's answers are a table's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from simulated import GROUP, World, make_world

from fngraph.errors import RankError
from fngraph.ops.symmetric import MOST_PROGRAMS, SymmetricMemory, block_bytes
from fngraph.ranks import symmetric
from fngraph.torch_facts.symmetric import ON_ONE_DEVICE

TIMEOUT_S = 7.5
Share = Callable[[str, int, torch.device], Any]


class Made:
    """What `share` of each process has been asked for, and has given."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: list[tuple[str, int, torch.device]] = []
        self.handles = [object() for _ in range(world.size)]
        self.blocks = [torch.zeros(2, dtype=torch.uint8) for _ in range(world.size)]

    def __call__(self, group: str, size: int, device: torch.device) -> Any:
        rank = self.world.rank
        self.asked.append((group, size, device))
        return (
            self.blocks[rank],
            [100 * rank + r for r in range(self.world.size)],
            self.handles[rank],
        )


def on_gpus(
    monkeypatch: pytest.MonkeyPatch, devices: Sequence[int], *, share: Share | None = None,
    capability: tuple[int, int] = (9, 0),
) -> tuple[World, Made]:  # fmt: skip
    """A world of processes on these devices of a host.

    Args:
        share: in place of what makes memory for each of them.
    """
    world = make_world(monkeypatch, len(devices))
    made = Made(world)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: devices[world.rank])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1 + max(devices))
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: a != b)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(symmetric.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(symmetric, "is_capturing", lambda: False)
    monkeypatch.setattr(symmetric, "timeout_s", lambda group: TIMEOUT_S)
    monkeypatch.setattr(symmetric, "share", share or made)
    monkeypatch.delenv(ON_ONE_DEVICE, raising=False)
    return world, made


def make(world: World) -> list[SymmetricMemory | None]:
    return world.run(lambda rank: symmetric._make("tp", GROUP))


def why(caplog: pytest.LogCaptureFixture) -> set[str]:
    """What processes have logged of why there is none."""
    told = [record.getMessage() for record in caplog.records]
    return {text.partition("memory: ")[2].partition(". So what")[0] for text in told}


@pytest.mark.parametrize("size", [2, 3])
def test_it_is_the_block_of_each_and_lives_with_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, size: int
) -> None:
    world, made = on_gpus(monkeypatch, range(size))
    for rank, one in enumerate(make(world)):
        assert one is not None
        assert one.own is made.blocks[rank]
        assert one.addresses.tolist() == [100 * rank + r for r in range(size)]
        assert one.addresses.dtype == one.turns.dtype == torch.int64
        assert one.turns.tolist() == [0] * MOST_PROGRAMS
        assert (one.rank, one.size) == (rank, size)
        assert one.kept == [made.handles[rank]]
        assert TIMEOUT_S <= one.wait_s <= TIMEOUT_S + 1, "as long as other collectives wait"
    every = [(GROUP, block_bytes(size), torch.device("cuda", rank)) for rank in range(size)]
    assert sorted(made.asked, key=str) == every
    assert not caplog.records


@pytest.mark.parametrize(("told", "there"), [("1", True), ("0", False), (None, False)])
def test_processes_on_one_gpu_have_it_where_torch_lets_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, told: str | None, there: bool
) -> None:
    world, made = on_gpus(monkeypatch, [0, 0])
    if told is not None:
        monkeypatch.setenv(ON_ONE_DEVICE, told)
    assert [one is not None for one in make(world)] == [there] * 2
    assert len(made.asked) == 2 * there
    assert why(caplog) == (set() if there else {"several of them are on one GPU"})


def test_none_is_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """And none of the processes is waited for."""
    world, made = on_gpus(monkeypatch, [0, 1])
    monkeypatch.setattr(symmetric, "is_capturing", lambda: True)
    monkeypatch.setattr(symmetric, "gather_objects", lambda *_: pytest.fail("it waits for others"))
    with pytest.raises(RankError, match=r"axis 'tp' has no memory .* Run the step once before"):
        make(world)
    assert not made.asked


@pytest.mark.parametrize(
    ("capability", "there"), [((6, 1), False), ((7, 0), True), ((8, 9), True), ((12, 0), True)]
)
def test_gpus_from_volta_on_have_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
    capability: tuple[int, int], there: bool,
) -> None:  # fmt: skip
    world, _ = on_gpus(monkeypatch, [0, 1], capability=capability)
    assert [one is not None for one in make(world)] == [there] * 2
    assert there or all("process 0 lacks a GPU whose loads and stores" in x for x in why(caplog))


@pytest.mark.parametrize("missing", [True, False])
def test_triton_is_looked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, missing: bool
) -> None:
    """One process that lacks it is enough."""
    world, made = on_gpus(monkeypatch, [0, 1])
    lacks = lambda name: None if missing and world.rank == 1 else name  # noqa: E731
    monkeypatch.setattr(symmetric.importlib.util, "find_spec", lacks)
    assert [one is None for one in make(world)] == [missing] * 2
    assert why(caplog) == ({"process 1 lacks Triton: pip install triton"} if missing else set())
    assert bool(made.asked) is not missing


def failing(*ranks: int, error: type[BaseException] = RuntimeError) -> Any:
    """A `share` that fails on some of two processes, with an error of several lines."""

    def build(monkeypatch: pytest.MonkeyPatch) -> World:
        world, made = on_gpus(monkeypatch, [0, 1])

        def share(*asked: Any) -> Any:
            if world.rank in ranks:
                raise error(f"rank {world.rank} cannot\nat some line of C++")
            return made(*asked)

        monkeypatch.setattr(symmetric, "share", share)
        return world

    return build


@pytest.mark.parametrize(
    ("ranks", "told"), [((0,), "rank 0 cannot"), ((1,), "rank 1 cannot"), ((0, 1), "rank 0 cannot")]
)
def test_where_one_fails_none_has_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, ranks: tuple[int, ...],
    told: str,
) -> None:  # fmt: skip
    """All say the same reason: the first one's that has failed, in a line."""
    world = failing(*ranks)(monkeypatch)
    assert make(world) == [None, None]
    assert why(caplog) == {told} and len(caplog.records) == 2
    assert {record.levelno for record in caplog.records} == {logging.WARNING}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, TypeError])
def test_what_is_no_failure_of_torch_s_is_raised(
    monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    world = failing(0, 1, error=error)(monkeypatch)
    with pytest.raises(error, match="cannot"):
        make(world)


def test_a_gathering_that_fails_says_what_it_was_for(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = on_gpus(monkeypatch, [0, 1])

    def fails(*_: Any) -> Any:
        raise RuntimeError("connection closed by peer")

    monkeypatch.setattr(symmetric, "gather_objects", fails)
    with pytest.raises(RankError, match=r"making shared memory over axis 'tp'.*connection closed"):
        make(world)
