"""Passes match on a process's part of a model as often as on the whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fngraph as fg
from fngraph.models import generate, loading, shard
from fngraph.passes import PASSES
from tests.models import tiny

pytestmark = pytest.mark.usefixtures("one_thread")
SIZES = {"tp2": {"tp": 2}, "tp4": {"tp": 4}, "tp2_ep2": {"tp": 2, "ep": 2}}
APART = ("no_ops", "fold_constants")  # what a split vocabulary adds is for them as well
REDUCED = "all_reduce_rms_norm"
ROWS = ("sequence_parallel", "matmul_reduce_scatter", "all_gather_matmul")
NO_LINEARS = tuple(
    one.name for one in PASSES if "linears" not in one.name and one.name not in (REDUCED, *ROWS)
)
SUMS = {  # sums over processes with an addition and a norm behind
    "llama": 3, "mistral": 3, "qwen2": 3, "qwen3": 3,
    "gemma3_text": 0,  # its norms come before the addition
    "qwen3_moe": 5, "mamba2": 1, "deepseek_v2": 5, "deepseek_v3": 5, "qwen3_next": 7,
}  # fmt: skip


def traced_by(family: Any, params: Any, passes: tuple[str, ...]) -> Any:
    """The passes of the step of a model whose weights lie side by side."""
    laid = fg.ops.lay_side_by_side(params)
    cache = family.init_cache(
        params.config, 8, block_size=generate.BLOCK_SIZE, num_slots=2, dtype=params.norm.dtype
    )
    fast = fg.graphify(
        family.forward, passes=passes, modes="FULL", donate="cache", stage="batch", sizes=(16,)
    )
    return fast.trace(laid, cache, limits=fg.Limits(16, 2, B=8)).passes


def matches(family: Any, params: Any, passes: tuple[str, ...]) -> dict[str, int]:
    """By pass."""
    ran = traced_by(family, params, passes)
    return {one.one.name: one.matches for one in ran if one.one.name not in APART}


def part(family: Any, params: Any, sizes: dict[str, int]) -> Any:
    """That of the last process."""
    axes = (fg.Axis(name, n, n - 1, f"group of {name}") for name, n in sizes.items())
    return shard(params, family.specs(params.config), fg.Mesh(tuple(axes)))


@pytest.mark.sampled("llama-tp2]", "mamba2-tp2]")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", tiny.GENERATIVE)
def test_passes_match_on_a_part_as_often_as_on_the_whole(
    name: str, sizes: dict[str, int], folder: Callable[[str], Path]
):
    """The norm behind Mamba-2's gate is over all processes, and stays as it was traced. A linear
    layer has its norm and its gate with it; what is added is behind the sum over processes, and
    goes with the norm that follows."""
    family = loading.family(folder(name))
    _, params = family.load(folder(name))
    want, own = matches(family, params, NO_LINEARS), part(family, params, sizes)
    assert want["side_by_side"] > 0 or name == "mamba2"
    if name == "mamba2":
        want["rms_norm"] -= len(params.layers)
    assert matches(family, own, NO_LINEARS) == want
    assert matches(family, own, ("linears",)) == matches(family, params, ("linears",))


@pytest.mark.sampled("llama-tp2]")
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("name", tiny.GENERATIVE)
def test_sums_over_processes_go_with_the_norms_behind_them(
    name: str, sizes: dict[str, int], folder: Callable[[str], Path]
):
    """As often as there are such; each is a sum and a norm less for the pass of these. Never on the
    whole."""
    family = loading.family(folder(name))
    _, params = family.load(folder(name))
    own, sums = part(family, params, sizes), (REDUCED, "add_rms_norm")
    assert set(matches(family, params, (REDUCED, *ROWS)).values()) == {0}
    assert matches(family, own, ROWS[:1]) == {ROWS[0]: SUMS[name]}
    if name == "llama":  # whose products are all by arguments
        assert matches(family, own, ROWS) == dict.fromkeys(ROWS, 3)
        *_, late = traced_by(family, own, ("linears", ROWS[0]))
        assert late.matches == 0 and "pass it before those that fuse norms" in late.notes[0]
    for one in traced_by(family, own, (REDUCED, ROWS[0])):  # who comes second says so
        assert one.matches == (0 if one.one.name == ROWS[0] else SUMS[name])
        why = "no sum over processes has an addition and an RMSNorm behind it that are still apart"
        why = "'all_reduce_rms_norm' has its places: pass this before it" if SUMS[name] else why
        told = one.one.name == ROWS[0] or not SUMS[name]
        assert [note.startswith(why) for note in one.notes] == [True] * told
    found, alone = matches(family, own, sums), matches(family, own, sums[1:])
    assert found == {REDUCED: SUMS[name], "add_rms_norm": alone["add_rms_norm"] - SUMS[name]}
