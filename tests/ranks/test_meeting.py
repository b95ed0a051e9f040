"""Processes that do not meet, or make another mesh each, are told so by `make_mesh`."""

from __future__ import annotations

import datetime
import re
import socket
import time
from typing import Any

import pytest
import starting
import torch.distributed as dist

import fngraph as fg
from fngraph.errors import RankError


@pytest.fixture
def port() -> int:
    """One where nobody listens."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


TOLD = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
WRONG = [
    ({"MASTER_ADDR": ""}, "MASTER_ADDR is not set in the environment. Start all processes with: t"),
    ({"MASTER_ADDR": "", "MASTER_PORT": ""}, "MASTER_ADDR, MASTER_PORT are not set"),
    ({"RANK": ""}, "RANK is not set"),
    ({"RANK": "zero"}, "RANK='zero', and WORLD_SIZE=2 has 0 to 1"),
    ({"RANK": "3"}, "RANK='3', and WORLD_SIZE=2 has 0 to 1"),
    ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment is no number"),
    ({"MASTER_PORT": "http"}, "2 processes have not met at 127.0.0.1:http in 1 s"),
    ({}, "2 processes have not met at 127.0.0.1:{port} in 1 s, of which this is rank 1. There all"),
    ({"RANK": "0"}, "of which this is rank 0"),
]  # fmt: skip


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("changed", "text"), WRONG)
def test_what_torchrun_would_say_and_nobody_does(
    changed: dict[str, str], text: str, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (TOLD | {"MASTER_PORT": str(port)} | changed).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankError, match=re.escape(text.format(port=port))):
        fg.make_mesh("cpu", timeout=1, tp=2)


MESHES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "sizes": ({"tp": 2, "dp": 1}, {"tp": 1, "dp": 2}),
    "order": ({"tp": 2, "dp": 1}, {"dp": 1, "tp": 2}),
    "names": ({"tp": 2}, {"ep": 2}),
    "timeouts": ({"tp": 2, "timeout": 20}, {"tp": 2, "timeout": 21}),
}


def make(rank: int) -> dict[str, str]:
    """By what differs, what is said; then one mesh that both make."""
    found = {}
    for name, both in MESHES.items():
        with pytest.raises(RankError) as caught:
            fg.make_mesh("cpu", **{"timeout": 20, **both[rank]})
        found[name] = str(caught.value)
    return found | {"one": repr(fg.make_mesh("cpu", timeout=20, tp=2))}


@pytest.fixture(scope="module")
def both() -> list[dict[str, str]]:
    return starting.values(starting.run(make, 2))


@pytest.mark.parametrize("name", MESHES)
def test_meshes_that_differ_are_refused_by_both(both: list[dict[str, str]], name: str) -> None:
    spelled = [
        ", ".join(f"{key}={value!r}" for key, value in one.items() if key != "timeout")
        for one in MESHES[name]
    ]
    own, other = (one[name] for one in both)
    assert own == other and own.startswith("all processes make one mesh, with axes in one order")
    for rank, one in enumerate(spelled):
        assert f"{one}) on rank {rank}" in own
    assert both[rank]["one"] == f"Mesh(tp=2; this process is tp {rank}, on cpu)"


def absent(rank: int) -> str:
    """What is said to one that makes a mesh alone."""
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=1))
    if rank:
        time.sleep(2)
        return ""
    with pytest.raises(RankError) as caught:
        fg.make_mesh("cpu", timeout=1, tp=2)
    return str(caught.value)


@pytest.mark.sampled(0)
def test_who_makes_one_alone_is_told_so() -> None:
    own, _ = starting.values(starting.run(absent, 2))
    assert own.startswith("make_mesh: not all of ranks [0, 1] have called it in time")
