"""Each block of Python in README and the docs runs alone, and prints what its page says."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest

from tests.site.pages import (
    ROOT,
    Block,
    blocks_of,
    files_of,
    pages,
    printed_by,
    without_times,
)

ELSEWHERE = {"transformers": "tests/integrations/test_transformers_docs.py"}  # it needs models
BLOCKS = [block for page in pages() if page.stem not in ELSEWHERE for block in blocks_of(page)]
FILES = files_of(BLOCKS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty one, but for the clone's results."""
    (tmp_path / "benchmarks").symlink_to(ROOT / "benchmarks")
    return tmp_path


@pytest.mark.sampled("README-1", "first_hour", "own_backend", "planned_sizes", "own_report")
@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: f"{block.page}-{block.number}")
def test_a_block_runs_and_prints_what_its_page_says(block: Block, folder: Path) -> None:
    from fngraph.ops import ATTENTION

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        printed = printed_by(block, folder, FILES)
    if "mine" in ATTENTION.backends:
        ATTENTION.unregister("mine")
    if block.printed is not None:
        assert without_times(printed) == without_times(block.printed)


def test_files_have_names_of_their_own() -> None:
    named = [block.name for block in BLOCKS if block.code.startswith(f"# {block.name}\n")]
    assert len(named) == len(set(named)) and set(FILES) == set(named)


def test_all_blocks_are_found() -> None:
    """None is indented, fenced by tildes, or of another spelling of Python."""
    for page in pages():
        fences = [line for line in page.read_text().splitlines() if "```" in line or "~~~" in line]
        assert all(fence in ("```", "```python", "```text") for fence in fences), page.name
        assert len(blocks_of(page)) == fences.count("```python"), page.name
    assert all((ROOT / file).exists() for file in ELSEWHERE.values())


def test_a_page_that_says_another_number_would_be_seen() -> None:
    shown = "| what | is |\n|---|---:|\n| padded rows | 1207 |\n| rows | 18.8% |\n| ms | 47.9 |"
    assert without_times(shown) == without_times(shown.replace("47.9", "1542.3"))
    swapped = "\n".join([*shown.splitlines()[:2], *reversed(shown.splitlines()[2:])])
    assert without_times(shown) == without_times(swapped) != without_times(f"{shown}\n| a | 1 |")
    for old, new in (("1207", "1208"), ("18.8%", "18.9%")):
        assert without_times(shown) != without_times(shown.replace(old, new))
