"""`fg.testing.assert_graph`: what it takes, and what it says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import toys

import fngraph as fg


def toy(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Gather, mul, add, and the state's own add."""
    return params["w"][batch.token_ids] * 2 + 1, state + 1


@pytest.fixture
def replay(device: Any) -> Any:
    """Of one FULL key: 4 kernels, those that take the batch in and a copy out."""
    options = {"donate": 1, "stage": "batch", "limits": toys.LIMITS, "sizes": (8,)}
    fast = fg.graphify(toy, modes="FULL", **options)
    params = {"w": toys.tally_params()["w"].to(device)}
    batch = toys.on(toys.batch(3, 2), device)
    state = torch.zeros(3, device=device)
    step = fast.bind(params).capture(state, batch=batch, progress=False)
    return step[fg.BatchDescriptor(8, 4)]


@pytest.fixture
def more(device: Any) -> int:
    """Kernels beyond 5: on CUDA two take a batch in, not one."""
    return int(device.type == "cuda")


def test_what_holds_passes(replay: Any, more: int):
    assert_graph = fg.testing.assert_graph
    assert_graph(replay)
    assert_graph(replay, kernels=5 + more, memcpys=1, memsets=0, nodes=6 + more)
    assert_graph(replay, kernels=range(3, 7), memcpys={0, 1}, nodes=lambda n: n < 8)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"kernels": 4}, ["expected kernels=4, got {k}"]),
        ({"kernels": range(3, 5)}, ["expected kernels=range(3, 5), got {k}"]),
        ({"memcpys": 0, "memsets": 0}, ["expected memcpys=0, got 1"]),
        ({"memsets": 1}, ["expected memsets=1, got 0"]),
        ({"nodes": lambda n: n < 6}, ["expected nodes=<lambda>, got {n}"]),
        ({"nodes": 8, "kernels": 7}, ["expected nodes=8, got {n}", "expected kernels=7, got {k}"]),
    ],
)
def test_what_does_not_hold_is_said(replay: Any, more: int, wanted: Any, said: list[str]):
    k, n = 5 + more, 6 + more
    with pytest.raises(AssertionError) as caught:
        fg.testing.assert_graph(replay, **wanted)
    first, *lines = str(caught.value).splitlines()
    assert first.startswith(f"Replay(FULL BatchDescriptor(8, 4): 1 graph of {n} nodes")
    assert lines[: len(said)] == [line.format(k=k, n=n) for line in said]
    assert lines[len(said)] == f"{n} nodes ({k} kernels, 1 memcpy)"
    kernels = lines[len(said) + 1 :]
    assert kernels and all(" x " in line for line in kernels)
    assert any("unpack" in line for line in kernels)
