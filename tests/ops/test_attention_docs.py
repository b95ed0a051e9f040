"""docs/attention.md: its Python runs from public names, block after block, and is as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fngraph.ops import ATTENTION, attention

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


@pytest.fixture(scope="module")
def ran() -> Any:
    """Its names, once it has run."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3 and not re.search(r"\n\n    \S", PAGE.read_text())
    names: dict[str, Any] = {"__name__": "attention_docs"}
    for block in blocks:
        exec(compile(block, "attention.md", "exec"), names)
    yield names
    ATTENTION.unregister("mine")


def test_its_backend_is_known_and_its_primitive_a_cut(ran):
    assert attention.level("mine").name == "UNIFORM_SINGLE_TOKEN_DECODE"
    split = ran["fast"].trace(ran["params"], batch=ran["batch"]).split()
    assert [cut.op for cut in split.cuts] == ["fngraph::norm"]
    assert [row.backend for row in ran["norm"].backends()] == ["plain"]


def test_its_table_lists_what_is_shipped(ran):
    """Each backend of attention with its level."""
    rows = dict(re.findall(r"^\| `(\w+)` \| ([A-Z_]+) \|", PAGE.read_text(), re.MULTILINE))
    shipped = {
        b.backend: b.level.name for b in attention.backends() if "not shipped" not in b.usable
    }
    assert rows == {name: level for name, level in shipped.items() if name != "mine"}
