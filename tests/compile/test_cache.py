"""The cache end to end: what is compiled once is loaded by the next process, and computes the same;
what is damaged, or of another program, is compiled; and the command that looks after it."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import toys
from test_compiled import captured, check, lowered, rows_model
from test_graphify import Model
from torch._inductor.runtime import compile_tasks

from fngraph.__main__ import main
from fngraph.compile.disk import Disk
from fngraph.torch_facts import inductor

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).parents[2]
BATCHES = [toys.batch(3), toys.batch(1), toys.decode(4)]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the artefacts of `rows_model`."""
    folder = tmp_path_factory.mktemp("filled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FNGRAPH_CACHE", str(folder))
        lowered(rows_model(), modes="NONE").compile()
    return folder


@pytest.fixture
def disk(filled: Path, tmp_path: Path, monkeypatch) -> Disk:
    """A copy of it, that is in use."""
    for path in filled.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setenv("FNGRAPH_CACHE", str(tmp_path))
    return Disk(tmp_path)


def was(toy: Model, **options: Any) -> list[str]:
    """How each artefact came, once it has been seen to compute what bare forward does."""
    step = captured(toy, "tape", modes="NONE", **options)
    for batch in BATCHES:
        check(toy, step, batch)
    (piece,) = step.main.executable.compiled
    assert step.stats.compiled == sum(not one.loaded for one in piece.made)
    return ["loaded" if one.loaded else "compiled" for one in piece.made]


NOT_LOADED = (
    "torch._inductor.lowering", "torch._inductor.select_algorithm", "torch._inductor.decomposition",
    "torch._inductor.graph", "torch._inductor.codegen.wrapper", "torch._inductor.scheduler",
    "torch._inductor.ir", "torch._inductor.debug", "torch._inductor.compile_fx",
    "torch._functorch.aot_autograd", "torch._functorch.partitioners", "networkx",
)  # fmt: skip
FRESH = """
import sys
sys.path.insert(0, "tests")
import torch
torch.set_num_threads(1)
import torch._inductor
from torch._dynamo.utils import counters

def refuse(*args, **kwargs):
    raise AssertionError("Inductor was asked to compile")

torch._inductor.standalone_compile = refuse
import toys
from test_compiled import captured, check, rows_model

toy = rows_model()
step = captured(toy, "tape", modes=sys.argv[1], sizes=(4,))
for batch in (toys.batch(3), toys.batch(1), toys.decode(4)):
    check(toy, step, batch)
assert not counters["aot_autograd"] and "fxgraph_cache_miss" not in counters["inductor"]
loaded = [name for name in sys.argv[2:] if name in sys.modules]
assert not loaded, f"a process that compiles nothing has loaded {loaded}"
print(step.stats.compiled, sum(took.times for took in step.stats.compiles.values()))
"""


@pytest.mark.sampled(0)
def test_a_second_process_compiles_nothing(disk: Disk):
    ran = subprocess.run(
        [sys.executable, "-c", FRESH, "FULL", *NOT_LOADED],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["0", "2"]


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch) -> Path:
    """An assembler that torch brings, as in its builds for CUDA 13; a compile in this process then
    sets a flag of Triton's, as that of a kernel for a GPU does."""
    home = tmp_path / "a/torch/_inductor/runtime"
    for folder in (home.parents[1], home.parent):  # 2.11 looks into the first, 2.13 the second
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/ptxas").touch(0o755)
    monkeypatch.setattr(compile_tasks, "__file__", str(home / "compile_tasks.py"))
    monkeypatch.setenv("TRITON_PTXAS_PATH", "")  # so that it is put back
    monkeypatch.setattr("fngraph.compile.artefact.compile_ahead", in_process)
    return home


def in_process(*args: Any) -> Any:
    compile_tasks._set_triton_ptxas_path()
    return inductor.compile_ahead(*args)


def test_what_inductor_sets_as_it_compiles_is_no_other_key(disk: Disk, bundled: Path, monkeypatch):
    """The first process sets it between two artefacts; the second one, which loads, would not."""
    disk.clear()
    for found in ("compiled", "loaded"):
        compile_tasks._set_triton_ptxas_path.cache_clear()  # as in a new process
        monkeypatch.delenv("TRITON_PTXAS_PATH")
        assert was(rows_model()) == [found, found]
        assert os.environ["TRITON_PTXAS_PATH"].endswith("bin/ptxas")
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/mine/ptxas")
    compile_tasks._set_triton_ptxas_path.cache_clear()
    assert was(rows_model()) == ["compiled", "compiled"]
    compile_tasks._set_triton_ptxas_path.cache_clear()


def test_what_is_compiled_anew_says_in_what_its_key_differs(
    disk: Disk, monkeypatch, caplog, capsys
):
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    with caplog.at_level(logging.INFO, "fngraph"):
        assert was(rows_model()) == ["compiled", "compiled"]
    lines = [r.getMessage() for r in caplog.records if "not on disk" in r.getMessage()]
    differs = "differs in flag TRITON_F32_DEFAULT (ieee; there nothing)"
    assert [re.sub(r"\b[0-9a-f]{12}\b", "...", line) for line in lines] == [
        f"piece 0 for {sizes} is not on disk: ..., of the same piece, {differs}"
        for sizes in ("T 1..16, R 1..4", "T 1, R 1")
    ]
    assert main(["cache", "ls"]) == 0
    shown = capsys.readouterr().out
    sizes = r"piece 0 for (?:T 1\.\.16, R 1\.\.4|T 1, R 1), differ in flag TRITON"
    assert len(re.findall(sizes, shown)) == 2
    caplog.clear()
    for path in disk.folder.iterdir():  # what is damaged is no help, and no harm
        path.write_bytes(path.read_bytes()[:70])
    with caplog.at_level(logging.INFO, "fngraph"), pytest.warns(RuntimeWarning, match="damaged"):
        assert was(rows_model()) == ["compiled", "compiled"]


def test_what_is_kept_is_loaded_for_every_level_and_mode(disk: Disk, caplog):
    with caplog.at_level(logging.INFO, "fngraph"):
        assert was(rows_model()) == ["loaded", "loaded"]
    lines = [r.getMessage() for r in caplog.records if "piece 0" in r.getMessage()]
    assert [line.split(":")[0] for line in lines] == [
        "loaded piece 0 for T 2..16, R 1..4", "loaded piece 0 for T 1, R 1"
    ]  # fmt: skip
    assert was(rows_model(), compile="once") == ["loaded", "loaded"]


def test_a_damaged_artefact_is_compiled_again(disk: Disk):
    path = disk.path(disk.entries()[0].digest)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1
    path.write_bytes(bytes(data))
    with pytest.warns(RuntimeWarning, match="its bytes are not those that were written"):
        assert sorted(was(rows_model())) == ["compiled", "loaded"]
    assert was(rows_model()) == ["loaded", "loaded"]


def test_an_artefact_that_torch_cannot_load_is_compiled_again(disk: Disk):
    for entry in disk.entries():
        kept = disk.read(entry.digest)
        assert kept is not None
        disk.write(entry.digest, kept._replace(body=b"not a pickle"))
    with pytest.warns(RuntimeWarning, match="torch cannot load it: UnpicklingError"):
        assert was(rows_model()) == ["compiled", "compiled"]
    assert was(rows_model()) == ["loaded", "loaded"]


def threes(params: Any, state: Any, batch: toys.Batch) -> Any:
    return torch.tanh(params["w"][batch.token_ids]) * 3, state


def test_another_constant_is_another_artefact(disk: Disk):
    assert was(rows_model()._replace(fn=threes)) == ["compiled", "compiled"]
    assert was(rows_model()) == ["loaded", "loaded"] and len(disk.entries()) == 4


def test_without_a_cache_all_is_compiled_and_nothing_is_kept(disk: Disk, monkeypatch):
    before = {entry.digest: entry.used for entry in disk.entries()}
    assert was(rows_model(), cache=False) == ["compiled", "compiled"]
    monkeypatch.setenv("FNGRAPH_CACHE", "off")
    assert was(rows_model()) == ["compiled", "compiled"]
    assert {entry.digest: entry.used for entry in disk.entries()} == before


def test_what_cannot_be_kept_is_said_and_runs(disk: Disk, monkeypatch, caplog):
    disk.clear()
    monkeypatch.setenv("FNGRAPH_CACHE_BYTES", "100")
    assert was(rows_model()) == ["compiled", "compiled"]
    (line, _) = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert line.startswith("piece 0 for T 2..16, R 1..4 is not kept: its ")


def test_a_folder_that_can_only_be_read_serves_what_it_has(disk: Disk, monkeypatch, caplog):
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    before = {entry.digest for entry in disk.entries()}
    monkeypatch.setattr(Path, "mkdir", refuse)  # what comes first where something is kept
    assert was(rows_model()) == ["loaded", "loaded"]
    assert was(rows_model()._replace(fn=threes)) == ["compiled", "compiled"]
    lines = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(lines) == 2 and all("cannot be written: Permission denied" in x for x in lines)
    assert {entry.digest for entry in disk.entries()} == before


# --- the command ----------------------------------------------------------------------------------


def test_the_command_lists_and_clears(disk: Disk, capsys):
    assert main(["cache", "ls"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("| piece 0 |") == 2 and "T 2..16, R 1..4" in shown
    assert shown.rstrip().splitlines()[-1].startswith(f"{disk.folder}: 2 artefacts, ")
    assert main(["cache", "clear"]) == 0
    assert capsys.readouterr().out == f"{disk.folder}: 2 artefacts removed\n"
    assert main(["cache", "ls"]) == 0
    assert capsys.readouterr().out.startswith(f"{disk.folder}: 0 artefacts, 0 of ")


def compile_rows() -> None:
    """What `warm` is told to call."""
    lowered(rows_model(), modes="NONE").compile()


def test_the_command_warms(disk: Disk, capsys):
    disk.clear()
    assert main(["cache", "warm", f"{__name__}:compile_rows"]) == 0
    assert capsys.readouterr().out.startswith(f"2 artefacts made. {disk.folder}: 2 artefacts")
    assert was(rows_model()) == ["loaded", "loaded"]


@pytest.mark.parametrize(
    "argv, environment, told",
    [
        ("cache warm mine.serving", {}, "expected MODULE:NAME, as in mine.serving:compile_all"),
        ("cache ls", {"FNGRAPH_CACHE": "off"}, "FNGRAPH_CACHE is off: set it to a folder"),
        ("cache ls", {"FNGRAPH_CACHE": __file__}, "test_cache.py is a file. Set FNGRAPH_CACHE to"),
        ("cache ls", {"FNGRAPH_CACHE_BYTES": "x"}, "FNGRAPH_CACHE_BYTES='x': a number of bytes"),
        ("cache", {}, "required: ls | clear | warm"),
    ],
)
def test_a_mistake_in_the_command_is_told(argv, environment, told, monkeypatch, capsys):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as stopped:
        main(argv.split())
    assert stopped.value.code == 2 and told in capsys.readouterr().err


def test_python_runs_the_command(disk: Disk):
    told = [sys.executable, "-m", "fngraph", "cache", "ls"]
    ran = subprocess.run(told, cwd=ROOT, env={**os.environ}, capture_output=True, text=True)
    assert ran.returncode == 0 and "2 artefacts" in ran.stdout
