"""What a type checker says of a user's file: nothing of right uses; wrong ones at their lines."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TYPED = ROOT / "tests" / "typed"


def marked(path: Path) -> set[int]:
    """Lines that say that they are wrong."""
    lines = path.read_text().splitlines()
    return {number for number, line in enumerate(lines, 1) if "# wrong: " in line}


def by_mypy(path: Path) -> dict[int, str]:
    """Errors by line. The cache is that of `make lint`, without which this takes a minute."""
    code = "import sys; from mypy import api; print(api.run(sys.argv[1:])[0])"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--no-error-summary", str(path)],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.findall(rf"{path.name}:(\d+): error: (.*)", ran.stdout)
    assert found or not ran.stdout.strip(), ran.stdout
    return {int(line): text for line, text in found}


def by_pyright(path: Path) -> dict[int, str]:
    """Errors by line, of pyright's own rules."""
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error",
         "--pythonpath", sys.executable, "-p",
         str(TYPED / "pyrightconfig.json"), str(path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {item["range"]["start"]["line"] + 1: item["message"] for item in found}


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_right_uses_pass(checker) -> None:
    assert (TYPED / "right.py").read_text().count("\n# ") + 2 == 20 + 2  # each says its number
    assert checker(TYPED / "right.py") == {}


@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_wrong_uses_are_errors_at_their_lines(checker) -> None:
    wrong = marked(TYPED / "wrong.py")
    assert len(wrong) == 20
    assert checker(TYPED / "wrong.py").keys() == wrong
