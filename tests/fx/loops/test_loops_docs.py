"""docs/loops.md: its Python runs, block after block, and is as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch

PAGE = Path(__file__).parents[3] / "docs" / "loops.md"


def test_its_python_runs_and_is_as_it_says():
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {"__name__": "loops_docs"}
    for block in blocks:
        exec(compile(block, "loops.md", "exec"), names)
    torch.testing.assert_close(names["root"], torch.tensor([2.0, 3.0]))
    assert 3 < names["turns"] < 20
    assert names["losses"].shape == (8,)
    assert names["train"].steps[0].donation.rows[0].how == "in place"
    assert names["same"]


def test_its_files_are_there():
    root = PAGE.parents[1] / "fngraph"
    for row in re.findall(r"^\| (`.*?) \|", PAGE.read_text().split("## Inside")[1], re.MULTILINE):
        folder = ""
        for name in re.findall(r"`([\w/]+\.py)`", row):
            folder = name.rpartition("/")[0] or folder
            assert (root / folder / name.rpartition("/")[2]).exists(), name
