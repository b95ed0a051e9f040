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


def by_mypy(*paths: Path) -> set[tuple[str, int]]:
    """Errors, as (file, line). The cache is that of `make lint`; without one it takes a minute."""
    code = "import sys; from mypy import api; print(api.run(sys.argv[1:])[0])"
    ran = subprocess.run(
        [sys.executable, "-c", code, "--no-error-summary", *paths],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = re.findall(r"(\w+\.py):(\d+): error: ", ran.stdout)
    assert found or not ran.stdout.strip(), ran.stdout
    return {(name, int(line)) for name, line in found}


def by_pyright(*paths: Path) -> set[tuple[str, int]]:
    """Errors, as (file, line), of pyright's own rules."""
    ran = subprocess.run(
        [sys.executable, "-m", "basedpyright", "--outputjson", "--level", "error",
         "--pythonpath", sys.executable, "-p", TYPED / "pyrightconfig.json", *paths],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    found = json.loads(ran.stdout)["generalDiagnostics"]
    return {(Path(item["file"]).name, item["range"]["start"]["line"] + 1) for item in found}


@pytest.mark.sampled(0)
@pytest.mark.parametrize("checker", [by_mypy, by_pyright])
def test_right_uses_pass_and_wrong_ones_are_errors_at_their_lines(checker) -> None:
    right, wrong = TYPED / "right.py", TYPED / "wrong.py"
    assert right.read_text().count("\n# ") == len(marked(wrong)) == 20  # each says its number
    assert checker(right, wrong) == {("wrong.py", line) for line in marked(wrong)}
