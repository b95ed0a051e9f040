"""`demo` and `generate` with --tp 2, as torchrun starts them: the first process prints, once."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fngraph.models import demo, generate

ROOT = Path(__file__).parents[2]
PROMPTS = "The default implementation\nReturn a list of\n"


def over_two(tmp_path: Path, module: str, *words: str) -> str:
    """What two processes of a command print."""
    (tmp_path / "prompts.txt").write_text(PROMPTS)
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m",
        module, "--prompts", str(tmp_path / "prompts.txt"), *words,
    ]  # fmt: skip
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, env=env, timeout=240, cwd=ROOT)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return ran.stdout


def test_the_demo_keeps_its_word_over_two_processes(tmp_path: Path):
    told = over_two(tmp_path, "fngraph.models.demo", "--tp", "2", "--max-new", "12")
    assert "on cpu with the tape, shared by 2 processes" in told
    for modes in demo.MEANING:
        assert len(re.findall(rf"(?m)^{modes} +tokens equal", told)) == 1, told


def test_generate_writes_the_same_over_two_processes(tmp_path: Path, capsys: pytest.CaptureFixture):
    words = ("--max-new", "12", "--modes", "NONE", "--drafts", "2")
    told = over_two(tmp_path, "fngraph.models.generate", "--tp", "2", *words)
    assert generate.main(["--prompts", str(tmp_path / "prompts.txt"), *words]) == 0
    texts = re.compile(r"(?m)^\d .*=> .*$")
    want = texts.findall(capsys.readouterr().out)
    assert texts.findall(told) == want and len(want) == 2
