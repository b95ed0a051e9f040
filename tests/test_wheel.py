"""The wheel gives a user what the docs show: all of it, and nothing beside `fngraph`.

It is built without a network, of an sdist of the files that git would hold, and used from an
empty folder: each block of README and the code of docs/serving.md, alone.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import extension
import pytest

ROOT = Path(__file__).parent.parent
BUILD = "import sys; from setuptools import build_meta as b; print(getattr(b, sys.argv[1])('dist'))"
USE = """
import json, sys, torch
for name, code, check in json.load(sys.stdin):
    names = {"__name__": "user"}
    exec(compile(code, name, "exec"), names)
    exec(compile(check, f"check of {name}", "exec"), names | {"torch": torch})
    print("ran", name)
found = [sys.modules[name].__file__ for name in sys.modules if name.split(".")[0] == "fngraph"]
print(json.dumps([path for path in found if path]))
"""
CHECKS = {  # of each block, found by what no other has
    "logits, cache = fast_fwd(params, cache, batch)": """
torch.testing.assert_close(cache[:3], params["embed"][[1, 2, 3]])
assert not cache[3:].any()
""",
    "load_checkpoint()  # a small Llama": "assert len(step) == len(list(step.table))",
    "fg.dispatch(table, decode)": "assert fg.dispatch(table, decode).descriptor.num_reqs == 4",
    "def train_step(weights, xy):": "assert loss < 1e-3",
    "fg.from_module(net.eval())": "torch.testing.assert_close(y, net(x).detach())",
    "adapters = lora.slots(": "assert adapters[0]['attn.wq'].a[3].any() and len(adapted) == 2",
    "class Batch(llama.Batch, sampling.Sampling)": "assert leaves.top_p.tolist()[1] == 1",
    "schedule(state, policy, steps)": "assert not state.live and state.submitted == 3",
}


def python(
    code: str, *args: str, cwd: Path, path: str = "", stdin: str = "", **names: str
) -> str:  # fmt: skip
    """What a new Python prints that has nothing of this checkout on its path.

    Args:
        names: of its environment.
    """
    names = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", **names}
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code, *args], cwd=cwd, input=stdin, text=True,
        capture_output=True, env={**os.environ, **names},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist of a copy, unpacked: building writes beside its sources."""
    source = tmp_path_factory.mktemp("source")
    for name in files_of("pyproject.toml", "README.md", "LICENSE", "fngraph", "models"):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name, follow_symlinks=False)
    sdist = source / "dist" / python(BUILD, "build_sdist", cwd=source).split()[-1]
    with tarfile.open(sdist) as tar:
        tar.extractall(source / "sdist", filter="data")
    (found,) = (source / "sdist").iterdir()
    return found


@pytest.fixture(scope="module")
def wheel(unpacked: Path) -> Path:
    """The wheel, built of the sdist."""
    return unpacked / "dist" / python(BUILD, "build_wheel", cwd=unpacked).split()[-1]


def files_of(*paths: str) -> list[str]:
    """The files that git holds or would hold, and that are there."""
    asked = ["git", "ls-files", "-co", "--exclude-standard", *paths]
    listed = subprocess.run(asked, cwd=ROOT, text=True, capture_output=True, check=True).stdout
    return [name for name in listed.splitlines() if (ROOT / name).exists()]


def held_by(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as unzipped:
        return {name for name in unzipped.namelist() if ".dist-info/" not in name}


def ours() -> set[str]:
    found = {name for name in files_of("fngraph") if (ROOT / name).is_file()}
    return found | {f"fngraph/{name}" for name in files_of("models")}


def test_it_holds_all_of_fngraph_and_nothing_else(wheel: Path):
    built = held_by(wheel) - ours()
    assert len(built) == extension.can_compile()
    assert all(re.match(r"fngraph/graphs/_words\.[^/]*(so|pyd)$", name) for name in built)
    assert held_by(wheel) == ours() | built
    assert {"fngraph/py.typed", "fngraph/models/checkpoints/bytes.safetensors"} <= held_by(wheel)


def test_it_is_built_without_a_compiler(unpacked: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    shutil.copytree(unpacked, copy, ignore=shutil.ignore_patterns("build", "dist", "*.so"))
    made = copy / "dist" / python(BUILD, "build_wheel", cwd=copy, CC="no-such-compiler").split()[-1]
    assert held_by(made) == ours()


def python_of(page: str) -> list[str]:
    """The blocks of Python in a page."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


@pytest.mark.sampled(0)
def test_what_the_docs_show_runs_from_it(wheel: Path, tmp_path: Path):
    unpacked, empty = tmp_path / "site", tmp_path / "empty"
    empty.mkdir()
    with zipfile.ZipFile(wheel) as unzipped:
        unzipped.extractall(unpacked)
    blocks = python_of("README.md")
    assert len(blocks) == 5
    blocks += [code for code in python_of("docs/serving.md") if "fngraph.models" in code]
    checked = [[check for line, check in CHECKS.items() if line in code] for code in blocks]
    assert [len(checks) for checks in checked] == [1] * len(CHECKS)
    given = [(str(i), code, check) for i, (code, (check,)) in enumerate(zip(blocks, checked))]
    printed = python(USE, path=str(unpacked), cwd=empty, stdin=json.dumps(given))
    assert re.search(r"3 \| +4 \| +1 \| FULL \| +1", printed), printed
    assert re.search(r"^2 b'.' length$", printed, re.MULTILINE), printed
    files = json.loads(printed.splitlines()[-1])
    assert len(files) > 100 and all(file.startswith(f"{unpacked}/") for file in files)
    assert not any(empty.iterdir())
