"""Collectives in graphs: bits of bare `forward` on two and four processes, in every mode, compiled
too, with padding poisoned; what is known of padding behind them; and what is said of wrong uses."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import rank_rows
import rank_steps
import starting
import torch
from rank_steps import Batch, batch
from torch import Tensor

import fngraph as fg
from fngraph.errors import RankError, SpecError

RANDOM = (3, 4, 15, 16, 17, 19)
MODES = ("FULL", "PIECEWISE", "NONE")
TP = fg.Axis("tp", 2, 0, "nobody's")
"""Of a group that this process has none of: enough for a trace."""


@pytest.fixture(scope="module")
def two() -> list[dict[str, Any]]:
    return starting.values(starting.run(rank_steps.steps, 2, {"tp": 2}, MODES))


@pytest.fixture(scope="module")
def four() -> list[dict[str, Any]]:
    return starting.values(starting.run(rank_steps.steps, 4, {"dp": 2, "tp": 2}, MODES[:1]))


@pytest.fixture(scope="module")
def rows() -> list[dict[Any, tuple[str, Any]]]:
    seeds = [*rank_rows.TOLD, *RANDOM]
    ran = starting.values(starting.run(rank_rows.programs, 2, seeds))
    return [{seed: (kind, why) for seed, kind, why in one} for one in ran]


@pytest.mark.parametrize("mode", MODES)
def test_two_processes(two: list[dict[str, Any]], mode: str) -> None:
    for rank, found in enumerate(two):
        wrong, ran = found[mode]
        assert not wrong
        assert ran == sorted({mode, "NONE"}), "one batch is beyond all keys"
        assert found["mesh"] == f"Mesh(tp=2; this process is tp {rank}, on cpu)"


def test_two_axes_of_four_processes(four: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(four):
        assert found["FULL"] == ([], ["FULL", "NONE"])
        assert f"dp {rank // 2}, tp {rank % 2}" in found["mesh"]
        assert found["waits"] == [60.0, 60.0], "as long as make_mesh was told"


def test_they_give_what_all_tensors_say(two: list[Any], four: list[Any]) -> None:
    """Of each dtype, along each dim and axis; what they give is contiguous."""
    assert [found["untrue"] for found in two] == [[[]]] * 2
    assert [found["untrue"] for found in four] == [[[], []]] * 4


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=str)
def test_gpus(sizes: dict[str, int]) -> None:
    """NCCL's inside FULL graphs."""
    ranks = math.prod(sizes.values())
    env = starting.over_gpus(ranks)
    ran = starting.run(rank_steps.steps, ranks, sizes, MODES, "cuda", within=250, env=env)
    for found in starting.values(ran):
        assert all(not found[mode][0] for mode in MODES)


def test_memory_counts_what_they_make() -> None:
    """As it counts what a `cat` of the same size makes."""

    def pool(join: Callable[[Tensor], Tensor]) -> int:
        def forward(batch: Batch) -> Any:
            return join(batch.x * 2).sum(1)

        fast = fg.graphify(forward, stage="batch", modes="FULL", sizes=(16,))
        lowered = fast.trace().split().lower(rank_steps.LIMITS)
        return lowered.memory.rows[0].estimated.pool

    gathered = pool(lambda x: fg.all_gather(x, TP, 1))
    assert gathered == pool(lambda x: torch.cat([x, x], 1)) > pool(lambda x: x + 1)
    assert pool(lambda x: fg.all_reduce(x, TP)) == pool(lambda x: x + 1)


@pytest.mark.rest  # Inductor and a C++ compiler, twice: half a minute of two cores
def test_compiled_pieces_come_to_them_in_one_order(tmp_path: Path) -> None:
    """Both write one cache at once, and read it later."""
    env = {"FNGRAPH_CACHE": str(tmp_path)}
    ran = starting.values(starting.run(rank_steps.compiled, 2, env=env, within=200))
    called = []
    for found in ran:
        assert found["first"][0] and found["again"] == (True, [True])
        code = Path(found["code"]).read_text()
        called.append(re.findall(r"^ +buf\d+ = torch\.ops\.fngraph\.(.+)", code, re.MULTILINE))
        names = [one.partition(".")[0] for one in called[-1]]
        assert names == "all_reduce all_reduce all_reduce all_gather all_gather".split()
    assert called[0] == called[1]


@pytest.mark.parametrize("name", rank_rows.TOLD)
def test_what_is_known_of_padding(rows: list[dict[Any, Any]], name: str) -> None:
    for found in rows:
        kind, why = found[name]
        assert kind == rank_rows.TOLD[name][0], why


def test_random_programs_are_right_or_refused(rows: list[dict[Any, Any]]) -> None:
    for found in rows:
        kinds = [found[seed][0] for seed in RANDOM]
        assert set(kinds) <= {"right", "refused"}, found
        assert kinds.count("right") >= 2


# wrong uses


WRONG: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "a name": (lambda x: fg.all_reduce(x, "tp"), "pass the mesh's own, mesh['tp']"),  # type: ignore[arg-type]
    "a mesh": (
        lambda x: fg.all_gather(x, fg.Mesh((fg.Axis("dp"),))),  # type: ignore[arg-type]
        "of type Mesh. Pass one of the mesh's: mesh['dp']",
    ),
    "none": (lambda x: fg.all_to_all(x, None), "Pass one of a mesh: mesh['tp']"),  # type: ignore[arg-type]
    "an op": (lambda x: fg.all_reduce(x, TP, "summ"), "Did you mean 'sum'?"),
    "no such dim": (lambda x: fg.all_gather(x, TP, 2), "which has 2 dims"),
    "a dim that is none": (lambda x: fg.all_gather(x, TP, "1"), "dim='1'"),  # type: ignore[arg-type]
    "an uneven split": (
        lambda x: fg.reduce_scatter(x[:, :5], TP, 1),
        "5 elements along dim 1 of [T, 5] cannot be split evenly over 2 processes",
    ),
    "no tensor": (lambda x: fg.all_reduce(3, TP), "takes a tensor, not a int"),  # type: ignore[arg-type]
    "a sum of bools": (lambda x: fg.all_reduce(x > 0, TP), '"max" is any, "min" is all'),
    "short integers": (lambda x: fg.all_reduce(x.to(torch.int16), TP), "'sum' of int16"),
    "the largest complex": (
        lambda x: fg.all_reduce(x.to(torch.complex64), TP, "max"), "'max' of complex64"),
    "a gradient": (
        lambda x: torch.func.grad(lambda y: fg.all_reduce(y, TP).sum())(x),
        "all_reduce under a gradient",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_uses_are_told_by_line(name: str) -> None:
    """By `graphify` and by `fg.check`, which goes on behind them."""
    fn, why = WRONG[name]

    def forward(batch: Batch) -> Any:
        made = fn(batch.x)
        return made

    args = (batch(0, 3, 2),)
    report = fg.check(forward, *args, stage="batch", limits=rank_steps.LIMITS)
    assert why in str(report.errors[0])
    assert "tests/ranks/test_collectives.py:" in str(report.errors[0])
    with pytest.raises(RankError, match=r"test_collectives.py:\d+: (all_|reduce_)"):
        fg.graphify(forward, stage="batch", limits=rank_steps.LIMITS).trace()


def test_along_rows_is_refused() -> None:
    def forward(batch: Batch) -> Any:
        return fg.all_to_all(batch.x, TP)

    report = fg.check(forward, batch(0, 4, 2), stage="batch", limits=rank_steps.LIMITS)
    assert "calls fngraph.all_to_all.default along T rows" in report.as_text()


def test_a_group_that_is_gone() -> None:
    with pytest.raises(RankError, match="axis 'tp' has no processes: its group \"nobody's\""):
        fg.all_reduce(torch.zeros(3), TP)


def test_an_axis_of_one_process_returns_what_it_is_given() -> None:
    mesh, x = fg.make_mesh("cpu", tp=1), torch.zeros(3, dtype=torch.int16)
    for fn in (fg.all_gather, fg.reduce_scatter, fg.all_to_all):
        assert fn(x.float(), mesh["tp"]).equal(x.float())
    assert fg.all_gather(x, mesh["tp"]) is x
    assert dataclasses.replace(mesh["tp"]) in {mesh["tp"]}


@pytest.mark.parametrize("timeout", [0, -1, float("inf"), float("nan"), "1", True])
def test_a_timeout_that_is_none(timeout: Any) -> None:
    with pytest.raises(RankError, match="a number of seconds above 0"):
        fg.make_mesh("cpu", timeout=timeout, tp=1)


@pytest.mark.parametrize("device", ["cup", "cuda:0", "", 0])
def test_a_device_that_is_none(device: Any) -> None:
    with pytest.raises(RankError, match=re.escape(f'make_mesh({device!r}): pass "cpu" or')):
        fg.make_mesh(device, tp=1)


@pytest.mark.parametrize("devices", [0, 3])
def test_a_process_without_a_device(monkeypatch: pytest.MonkeyPatch, devices: int) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(RankError, match=f"finds {devices} CUDA devices here, and process 3 of"):
        fg.make_mesh("cuda", tp=4)


@pytest.mark.parametrize("name", [0, None, "a b", "in"])
def test_what_cannot_be_an_axis(name: Any) -> None:
    """The fix is Python."""
    with pytest.raises(RankError, match=r"An axis goes by its name: mesh\['dp'\]"):
        fg.make_mesh("cpu", dp=1)[name]
    with pytest.raises(RankError, match=r"Make it: make_mesh\(dp=1, ep=2\)"):
        fg.make_mesh("cpu", dp=1)["ep"]


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda: fg.Axis("tp", "2"), "size='2' is a str"),  # type: ignore[arg-type]
        (lambda: fg.Mesh(TP), "is an Axis. Pass a list of an axis of a mesh, mesh['tp']"),  # type: ignore[arg-type]
        (lambda: fg.Mesh.over(3), "mesh=3 is an int. Pass a DeviceMesh"),  # type: ignore[arg-type]
        (lambda: TP.part("4"), "total='4' is a str"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_what_no_axis_and_no_mesh_is_made_of(call: Callable[[], Any], text: str) -> None:
    with pytest.raises(SpecError, match=re.escape(text)):
        call()
