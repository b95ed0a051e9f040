"""Models that are split over processes compute what one process does: every decoder family, over
tensor and expert parallel meshes, as `forward` is and in graphs on the tape, prefills, single
tokens and both at once.

What is compared are logits of tiny models in float32, to 1e-5 of the largest one, on GPUs to 1e-4.
fp8 rounds each process's columns by themselves where no scale is known, and is held to what fp8 is
held to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sharded_models as own
import starting
import torch

from fngraph.models import loading
from tests.models import tiny

FAMILIES = tuple(tiny.GENERATIVE)
EXPERTS = ("qwen3_moe", "qwen3_next", "deepseek_v2", "deepseek_v3")
WORLDS = {  # processes: meshes, and the families that can be split over them
    2: {"tp2": FAMILIES, "ep2": EXPERTS},
    4: {"tp4": FAMILIES, "tp2_ep2": FAMILIES},
}
IN_GRAPHS = {2: ("llama", "qwen3_moe", "mamba2"), 4: ()}  # all of them where all cases run
Found = list[dict[Any, Any]]  # of each process


def cases(only: dict[int, tuple[str, ...]] | None = None) -> list[Any]:
    """World, mesh and family."""
    return [
        pytest.param(world, mesh, name, id=f"{mesh}-{name}")
        for world, meshes in WORLDS.items()
        for mesh, names in meshes.items()
        for name in names
        if only is None or name in only[world]
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of all families."""
    made = tmp_path_factory.mktemp("sharded")
    with torch.no_grad():
        for name in FAMILIES:
            tiny.save(name, made / name)
    return made


@pytest.fixture(scope="module")
def found(folder: Path, one_thread: None) -> Callable[..., Found]:
    """What the processes of a world find, which are started once."""
    kept: dict[Any, Found] = {}

    def of(world: int, graphs: tuple[str, ...] | None = None) -> Found:
        graphs = IN_GRAPHS[world] if graphs is None else graphs
        if (world, graphs) not in kept:
            kept[world, graphs] = []  # where the run fails, it does so once
            ran = starting.run(own.parts, world, folder, FAMILIES, graphs, "cpu", within=560)
            kept[world, graphs] = starting.values(ran)
        assert kept[world, graphs], "see the first that failed"
        return kept[world, graphs]

    return of


@pytest.fixture(scope="module")
def wanted(folder: Path) -> Callable[[str], list[torch.Tensor]]:
    """What one process gives, of a family."""
    kept: dict[str, Any] = {}

    def of(name: str) -> list[torch.Tensor]:
        if name not in kept:
            family = loading.family(folder / name)
            kept[name] = own.bare(own.Made(family, family.load(folder / name)[1]))
        return kept[name]

    return of


def assert_near(got: Any, want: Any, within: float = 1e-5) -> None:
    """To so much of the largest number."""
    assert len(got) == len(want)
    for a, b in zip(got, want):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert (a - b).abs().max() <= within * b.abs().max()


@pytest.mark.parametrize(("world", "mesh", "name"), cases())
def test_parts_compute_what_the_whole_does(world, mesh, name, found, wanted):
    for one in found(world):
        assert_near(one[mesh, name, "bare"], wanted(name))


def check_graphs(all_found: Found, mesh: str, name: str, want: list[torch.Tensor]) -> None:
    """FULL, PIECEWISE and NONE."""
    for one in all_found:
        assert one[mesh, name, "modes"] == [
            "PIECEWISE", "FULL", "PIECEWISE", "FULL", "PIECEWISE", *["NONE"] * len(own.STEPS)
        ]  # fmt: skip
        assert_near(one[mesh, name, "graphs"], want)
        assert_near(one[mesh, name, "none"], want)
    first, *others = (one[mesh, name, "graphs"] for one in all_found)
    for other in others:  # so that all draw the same token
        assert all(torch.equal(a, b) for a, b in zip(first, other))


@pytest.mark.parametrize(("world", "mesh", "name"), cases(IN_GRAPHS))
def test_graphs_hold_the_collectives(world, mesh, name, found, wanted):
    check_graphs(found(world), mesh, name, wanted(name))


@pytest.mark.sampled(0)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", WORLDS)
def test_graphs_of_every_family_hold_the_collectives(world, found, wanted):
    all_found = found(world, FAMILIES)
    for mesh, names in WORLDS[world].items():
        for name in names:
            check_graphs(all_found, mesh, name, wanted(name))


@pytest.mark.parametrize(("world", "mesh"), [(2, "ep2"), (4, "tp2_ep2")])
@pytest.mark.parametrize("name", EXPERTS)
def test_processes_with_tokens_of_their_own(name: str, world: int, mesh: str, found, folder: Path):
    """Neighbours along "ep", the last axis, have each their own request."""
    family = loading.family(folder / name)
    made = own.Made(family, family.load(folder / name)[1])
    want = [own.own_batches(made, i) for i in range(2)]
    for rank, one in enumerate(found(world)):
        assert_near(one[mesh, name, "own"], want[rank % 2])
        if name in IN_GRAPHS[world]:
            assert_near(one[mesh, name, "own graphs"], want[rank % 2])


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", ["biases", "tied", "adapters"])
def test_parts_of_params_in_memory(name: str, world: int, found):
    """Biases once, a vocabulary that cannot be split evenly, adapters over what is split."""
    want = own.in_memory(name, None)
    for one in found(world):
        assert_near(one[f"tp{world}", name, "bare"], want)


def test_adapters_say_something():
    plain = own.bare(own.Made(own.llama, own.whole("adapters")))
    for spans, a, b in zip(own.STEPS, own.in_memory("adapters", None), plain):
        for (i, *_), row, without in zip(spans, a, b):
            assert torch.allclose(row, without) == (i == 0)


@pytest.mark.parametrize("world", WORLDS)
def test_parts_in_fp8(world: int, found):
    for one in found(world):
        assert_near(one[f"tp{world}", "product", "bare"], own.product(None), 1e-6)
        for name in ("fp8", "fp8 by known scales"):
            for got, want in zip(one[f"tp{world}", name, "bare"], own.in_memory(name, None)):
                assert (got - want).norm() < 0.2 * want.norm()


@pytest.mark.parametrize(("world", "mesh"), [(w, m) for w in WORLDS for m in WORLDS[w]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_that_are_split(dtype: torch.dtype, world: int, mesh: str, found):
    """In bfloat16 they are grouped. Padding holds NaN."""
    want = own.mixed(dtype, None)
    assert all(x[:9].isfinite().all() for x in want)
    for one in found(world):
        got = one[mesh, "mix", str(dtype)]
        assert_near([x[:9] for x in got], [x[:9] for x in want], {4: 1e-6, 2: 0.02}[dtype.itemsize])
        assert all(torch.equal(got[i][9:], torch.zeros(3, 32, dtype=dtype)) for i in (0, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", FAMILIES)
def test_graphs_of_every_family_on_gpus(name: str, world: int, folder: Path, wanted):
    """Over NCCL; as near as float32 is on a GPU."""
    env = starting.over_gpus(world)
    ran = starting.run(own.parts, world, folder, (name,), (name,), "cuda", within=280, env=env)
    for one in starting.values(ran):
        for mesh, names in WORLDS[world].items():
            if name in names:
                assert one[mesh, name, "modes"][:2] == ["PIECEWISE", "FULL"]
                for how in ("bare", "graphs", "none"):
                    assert_near(one[mesh, name, how], wanted(name), 1e-4)
