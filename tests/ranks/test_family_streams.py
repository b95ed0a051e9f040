"""Decoder families, served by two and four processes, write what one process does: every family in
pipeline stages and with experts spread, one each in tensor parallel, teams whose steps meet, and
two of these at once; in every mode, with drafts, adapters, draws, and too few blocks. Padding holds
NaN."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import family_streams as run
import pytest
import starting
import torch
from serving_run import Ran

from tests.models import tiny

ONE = {"tp": "llama", "dp": "llama", "dp tp": "llama", "pp tp": "mamba2", "ep tp": "qwen3_next",
       "dp ep tp": "deepseek_v3"}  # fmt: skip
"""Of meshes whose parts other tests hold for each family: `test_sharded.py`, and those here."""
CASES = [
    pytest.param(world, kind, name, id=f"{kind.replace(' ', '_')}-{name}")
    for world, kinds in run.MESHES.items()
    for kind in kinds
    for name in run.names(world, kind)
    if ONE.get(kind, name) == name
]
RAN = {"NONE": {"NONE"}, "PIECEWISE": {"PIECEWISE"}, "FULL_AND_PIECEWISE": {"FULL", "PIECEWISE"}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tiny models of all families."""
    made = tmp_path_factory.mktemp("families")
    with torch.no_grad():
        for name in tiny.GENERATIVE:
            tiny.save(name, made / name)
    return made


@pytest.fixture(scope="module")
def one(folder: Path, one_thread: None) -> Callable[[str], Ran]:
    """What one process writes, of a family."""
    kept: dict[str, Ran] = {}

    def of(name: str) -> Ran:
        if name not in kept:
            kept[name] = run.alone(folder, name)
        return kept[name]

    return of


def check(found: list[starting.Found], world: int, kind: str, name: str, want: Ran) -> None:
    """Leaders have each their own requests, and all of them together; followers have none."""
    over = run.MESHES[world][kind]
    leads = range(0, world, world // over.sizes[over.apart[0]]) if over.apart else (0,)
    for modes in run.MODES:
        texts: dict[int, tuple[int, ...]] = {}
        for rank, each in enumerate(found):
            ran = each[kind, name, modes]
            assert bool(ran.texts) == (rank in leads)
            assert set(ran.modes) == (RAN[modes] if rank in leads else set())
            assert not texts.keys() & ran.texts
            texts |= ran.texts
        assert texts.keys() == want.texts.keys()
        for number, tokens in want.texts.items():
            if number == run.CANCELLED:  # in another step, where there are other rows
                shorter = min(len(tokens), len(texts[number]))
                assert shorter and texts[number][:shorter] == tokens[:shorter]
            else:
                assert texts[number] == tokens, (modes, number)
        if not over.apart:
            assert (found[0][kind, name, modes].thrown, want.thrown) == (want.thrown, 1)


def test_the_streams_have_everything(one: Callable[[str], Ran]) -> None:
    want = one("llama")
    assert {kind.removesuffix(" lora") for kind in want.kinds} == {
        "prefill", "mixed", "decode", "verify"
    }  # fmt: skip
    assert any(kind.endswith(" lora") for kind in want.kinds) and want.thrown
    assert len(set().union(*want.texts.values())) > 50


@pytest.mark.sampled("pp-gemma3_text")
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("world", "kind", "name"), CASES)
def test_a_family_over_ranks_writes_what_one_process_does(
    world: int, kind: str, name: str, folder: Path, one: Callable[[str], Ran]
) -> None:
    jobs = [(kind, name, modes) for modes in run.MODES]
    found = starting.in_turn(run.streams, world, jobs, world, folder, "cpu", within=240)
    check(found, world, kind, name, one(name))
