"""Passes over collectives: a sum over processes with the addition and the norm behind it, over gloo
in every mode; on GPUs the kernel that reads the others' memory, on one device and on two."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import rank_norms
import starting
import torch

from fngraph.ranks import symmetric
from fngraph.ranks.symmetric import Has, why_none

MODES = ("FULL", "PIECEWISE", "NONE")
REDUCED = "all_reduce_rms_norm"


SEQUENCE = "sequence_parallel"
BOTH = (SEQUENCE, "matmul_reduce_scatter", "all_gather_matmul")
LISTS: dict[str, dict[str, int]] = {  # how often: the third sum's norm is of some rows alone
    "reduced": {REDUCED: 2},
    "sequence": {SEQUENCE: 2},
    "overlapped": {SEQUENCE: 2, BOTH[1]: 2, BOTH[2]: 1},  # the second norm is returned as well
}
CASES = [("reduced", mode) for mode in MODES] + [("sequence", "NONE"), ("overlapped", "FULL")]
COMPILED = [(one, (one,), "FULL") for one in (REDUCED, SEQUENCE)]


@pytest.fixture(scope="module")
def ran() -> Callable[[int], list[dict[str, Any]]]:
    """What each of so many processes finds, by list of passes."""

    @functools.cache
    def of(size: int) -> list[dict[str, Any]]:
        cases = [(name, tuple(LISTS[name]), mode) for name, mode in CASES]
        return starting.values(starting.run(rank_norms.in_graphs, size, size, cases))

    return of


@pytest.mark.parametrize(("passes", "mode"), CASES)
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.rest)])
def test_it_is_the_ops_that_it_stands_for(
    ran: Callable[[int], list[dict[str, Any]]], size: int, passes: str, mode: str
) -> None:
    """Of rows that can be shared out evenly, and not."""
    for found in ran(size):
        exact = mode == "NONE" and passes == "reduced"  # products are of more rows in graphs
        off, matches = found[passes, mode]
        assert off <= (0.0 if exact else 1e-5)
        assert matches == LISTS[passes]


@pytest.mark.rest  # Inductor and a C++ compiler
def test_in_compiled_pieces() -> None:
    ran = starting.run(rank_norms.in_graphs, 2, 2, COMPILED, "pieces", within=300)
    for found in starting.values(ran):
        assert all(off < 1e-5 and matches for off, matches in found.values())


HERE = Has("here", 0, "", (1, 2, 3))
NEXT = HERE._replace(device=1, reaches=(0, 2, 3))
NONE: dict[str, tuple[list[Has], str]] = {
    "alone": ([HERE], "2 to 8 processes"),
    "on one GPU": ([HERE, HERE], "several of them are on one GPU"),
    "elsewhere": ([HERE, NEXT._replace(host="there")], "on several hosts: here, there"),
    "without Triton": ([HERE, NEXT._replace(lacks="Triton")], "process 1 lacks Triton"),
    "out of reach": ([HERE, NEXT._replace(reaches=(2,))], "cuda:1 of process 1 cannot read cuda:0"),
}


@pytest.mark.parametrize("name", NONE)
def test_why_there_is_no_shared_memory(name: str) -> None:
    have, why = NONE[name]
    assert why in why_none(have, on_one=False)


def test_where_there_is_shared_memory() -> None:
    assert why_none([HERE, NEXT], on_one=False) == why_none([HERE, HERE], on_one=True) == ""


def test_another_group_of_a_name_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has by the name goes with that of the group before."""
    groups, forgotten = [object()], list[str]()
    monkeypatch.setattr(symmetric, "group_of", lambda *who: groups[-1])
    monkeypatch.setattr(symmetric, "_make", lambda *who: object())
    monkeypatch.setattr(symmetric, "forget_workspace", forgotten.append)
    monkeypatch.setattr(symmetric, "_MADE", {})
    first = symmetric.shared_of("tp", "0")
    assert symmetric.shared_of("tp", "0") is first and not forgotten
    groups.append(object())
    assert symmetric.shared_of("tp", "0") is not first and forgotten == ["0"]


# on GPUs

ON_ONE = [pytest.param(n, True, id=f"{n} on one device") for n in (2, 3)]
WORLDS = [*ON_ONE, *(pytest.param(n, False, id=f"{n} over NCCL") for n in (2, 4))]


def on_gpus(
    fn: Callable[..., Any], size: int, shares_device: bool, *args: Any, within: float = 250
) -> list[Any]:
    env = {} if shares_device else starting.over_gpus(size)
    return starting.run(fn, size, *args, shares_device, within=within, env=env)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes CUDA")
@pytest.mark.parametrize(("size", "shares_device"), WORLDS)
def test_the_kernel(size: int, shares_device: bool) -> None:
    ran = on_gpus(rank_norms.on_devices, size, shares_device, size)
    for found in starting.values(ran):
        assert not found["wrong"]
        assert all(off < 1e-4 for off in found["steps"])
        assert shares_device or found["matches"] == {REDUCED: 2}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes CUDA")
@pytest.mark.parametrize(("size", "shares_device"), WORLDS)
def test_in_one_graph_that_is_launched_again(size: int, shares_device: bool) -> None:
    ran = on_gpus(rank_norms.in_a_graph, size, shares_device, size)
    for found in starting.values(ran):
        assert found["wrong"] == 0
        print(f"{size} processes: {found['us']:.1f} us an op of a (1, 4096) row")


@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.rest), pytest.param("cuda", marks=pytest.mark.gpu)],
)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("passes", ["sequence", "overlapped"])
def test_many_rows_of_ones_own(passes: str, size: int, device: str) -> None:
    """On GPUs products of 512 rows and more go at once with what gathers or sums them."""
    env = starting.over_gpus(size) if device == "cuda" else None
    asked = size, tuple(LISTS[passes]), device
    ran = starting.run(rank_norms.own_rows, size, *asked, within=250, env=env)
    for found in starting.values(ran):
        assert found["matches"] == LISTS[passes]
        assert {mode for _, mode, _ in found["off"]} == {"FULL", "NONE"}
        assert all(off < 1e-4 for *_, off in found["off"]), found["off"]
        if device == "cuda":
            assert (found["kept"] > 0) is (passes == "overlapped"), "they go at once, or do not"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="takes CUDA")
@pytest.mark.parametrize(("size", "shares_device"), [WORLDS[0], WORLDS[2]])
def test_a_peer_that_does_not_come_is_not_waited_for(size: int, shares_device: bool) -> None:
    waits, _ = on_gpus(rank_norms.alone, size, shares_device, within=60)
    assert re.search(r"RuntimeError: after [2-5] s: .*CUDA", waits.error), waits
