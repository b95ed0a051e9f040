"""`demo` and `generate` with --tp 2 in two processes, the second as torchrun starts them: the first
process prints, once."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import starting

from fngraph.models import demo, generate

ROOT = Path(__file__).parents[2]
PROMPTS = "The default implementation\nReturn a list of\n"


@pytest.fixture
def prompts(tmp_path: Path) -> tuple[str, str]:
    """Of the commands, the flag."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    return "--prompts", str(tmp_path / "prompts.txt")


def printed(rank: int, words: tuple[str, ...]) -> tuple[int, str]:
    """What the demo of one process returns and prints."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        code = demo.main([*words])
    return code, told.getvalue()


ABORTED = "terminate called without an active exception"
"""What a process of gloo's may say behind its last line: without fngraph 7 of 20 do (torch 2.13),
and 1 of 20 that destroys its groups."""


def under_torchrun(*words: str) -> str:
    """What two processes print together; fails if one does."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        *words,
    ]  # fmt: skip
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=280, cwd=ROOT)
    assert ran.returncode == 0 or ABORTED in ran.stderr, ran.stderr[-4000:]
    return ran.stdout


@pytest.mark.sampled(0)
def test_the_demo_keeps_its_word_over_two_processes(prompts: tuple[str, str]):
    words = (*prompts, "--tp", "2", "--max-new", "12")
    (code, told), other = starting.values(starting.run(printed, 2, words, within=240))
    assert code == 0 and other == (0, "")
    assert "on cpu with the tape, shared by 2 processes" in told
    for modes in demo.MEANING:
        assert len(re.findall(rf"(?m)^{modes} +tokens equal", told)) == 1, told


@pytest.mark.sampled(0)
def test_the_first_file_of_the_page_runs_under_torchrun(tmp_path: Path):
    page = (ROOT / "docs/ranks.md").read_text()
    begin = page.index("    # two.py")
    code = page[begin : page.index("\nBoth print `FULL True`", begin)]
    (tmp_path / "two.py").write_text(textwrap.dedent(code))
    told = under_torchrun(str(tmp_path / "two.py"))
    assert sorted(told.split()) == ["FULL", "FULL", "True", "True"], told


@pytest.mark.sampled(0)
def test_the_demo_runs_under_torchrun(prompts: tuple[str, str]):
    """The clone's own name for it; the first process prints, the second nothing."""
    told = under_torchrun("-m", "models.demo", "--tp", "2", *prompts, "--max-new", "6")
    assert told.count("on cpu with the tape, shared by 2 processes") == 1
    for modes in demo.MEANING:
        assert len(re.findall(rf"(?m)^{modes} +tokens equal", told)) == 1, told


@pytest.mark.sampled(0)
def test_generate_writes_the_same_over_two_processes(
    prompts: tuple[str, str], capsys: pytest.CaptureFixture
):
    words = (*prompts, "--max-new", "12", "--modes", "NONE", "--drafts", "2")
    told = under_torchrun("-m", "fngraph.models.generate", "--tp", "2", *words)
    assert generate.main([*words]) == 0
    texts = re.compile(r"(?m)^\d .*=> .*$")
    want = texts.findall(capsys.readouterr().out)
    assert texts.findall(told) == want and len(want) == 2
