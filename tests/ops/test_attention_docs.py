"""docs/attention.md: its Python runs from public names, block after block, and is as it says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fngraph.core import Support
from fngraph.errors import BackendError
from fngraph.ops import ATTENTION, Backend, attention, listed_levels

PAGE = Path(__file__).parents[2] / "docs" / "attention.md"


@pytest.fixture(scope="module")
def ran() -> Any:
    """Its names, once it has run."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 3 and not re.search(r"\n\n    \S", PAGE.read_text())
    names: dict[str, Any] = {"__name__": "attention_docs"}
    assert blocks[-1].count('define(\n    "norm",') == 1  # a name of its own: blocks run elsewhere
    blocks[-1] = blocks[-1].replace('define(\n    "norm",', 'define(\n    "norm_of_docs",')
    for block in blocks:
        exec(compile(block, "attention.md", "exec"), names)
    yield names
    ATTENTION.unregister("mine")


def test_its_backend_is_known_and_its_primitive_a_cut(ran):
    assert attention.level("mine").name == "UNIFORM_SINGLE_TOKEN_DECODE"
    split = ran["fast"].trace(ran["params"], batch=ran["batch"]).split()
    assert [cut.op for cut in split.cuts] == ["fngraph::norm_of_docs"]
    assert [row.backend for row in ran["norm"].backends()] == ["plain"]


def test_its_table_lists_what_is_shipped(ran):
    """Each backend of attention with its level."""
    rows = dict(re.findall(r"^\| `(\w+)` \| ([A-Z_]+) \|", PAGE.read_text(), re.MULTILINE))
    shipped = {
        b.backend: b.level.name for b in attention.backends() if "not shipped" not in b.usable
    }
    assert rows == {name: level for name, level in shipped.items() if name != "mine"}


def test_its_published_table_is_the_data():
    text = listed_levels().as_text()
    assert text in PAGE.read_text() and repr(listed_levels()) == text


def test_a_published_name_is_found_and_differs_for_a_reason():
    listed = listed_levels()
    for one in listed:
        assert attention.level(one.name) is one.ours
        assert bool(one.why) == (one.level is not one.ours), one
    assert attention.level("FlashInfer") is attention.level("flashinfer")
    assert {one.where for one in listed} == {"table", "walk-through"} and len(listed) == 15
    with pytest.raises(BackendError, match="FlashInfer 9"):
        attention.level("FlashInfer 9")


def test_a_published_name_chooses_the_backend_that_it_stands_for():
    assert ATTENTION.backend("Triton Attention") is ATTENTION.backends["triton"]
    mine = Backend("FlashInfer", None, support=lambda config: Support.NEVER)
    ATTENTION.register(mine)  # one's own of that name goes before
    try:
        assert attention.level("FlashInfer") is Support.NEVER
    finally:
        ATTENTION.unregister("FlashInfer")
    assert attention.level("FlashInfer") is Support.UNIFORM_SINGLE_TOKEN_DECODE
