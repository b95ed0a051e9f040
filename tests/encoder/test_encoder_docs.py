"""docs/encoders.md: its Python runs, and prints what the page says."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import re
from pathlib import Path
from typing import Any

import torch

import fngraph as fg

PAGE = (Path(__file__).parents[2] / "docs" / "encoders.md").read_text()


def test_its_python_runs_and_prints_what_it_says():
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "encoder_docs"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "encoders.md", "exec"), names)
    for image, output in zip(names["images"], names["outputs"], strict=True):
        want = names["forward"](names["params"], names["collate"]("default", [image]))
        torch.testing.assert_close(output, want, atol=1e-3, rtol=1e-4)
    tables = re.findall(r"(?:^    \|.*\n)+", PAGE, re.MULTILINE)
    assert len(tables) == 2
    for shown in tables:
        assert re.sub(r"(?m)^    ", "", shown).strip() in printed.getvalue()
    assert "| 16, 32, 64, 128 " in printed.getvalue()


def test_it_names_every_part_of_a_model():
    rows = re.findall(r"^\| (`.*?`) \|", PAGE, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`(\w+)", row)}
    assert named == {field.name for field in dataclasses.fields(fg.EncoderModel)}
