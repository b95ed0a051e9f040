"""What people's modules call, over padded rows: each line of docs/row_ops.md is so."""

from __future__ import annotations

import re

import pytest
from row_scan import CASES, PAGE, SAME, Case, page, row, verdict


def read() -> list[tuple[Case, str]]:
    """The lines of the page, with what each is said to be."""
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert len(rows) == len(CASES), "run python tests/fx/rows/row_scan.py"
    return [(case, line.rpartition("` | ")[2][:-2]) for case, line in zip(CASES.values(), rows)]


def test_the_page_is_what_the_scan_writes() -> None:
    """Its lines, their order, its counts."""
    assert page(read()) == PAGE.read_text()


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_a_line_is_what_the_page_says(name: str) -> None:
    """The same as the bare call, every fact of it checked, or refused for the reason told."""
    said = {case.name: said for case, said in read()}
    assert row(CASES[name], verdict(CASES[name])) == row(CASES[name], said[name])


def test_nearly_all_that_computes_within_rows_is_the_same() -> None:
    """Of 300 and more, torch.nn's modules among them; and over T, most are refused."""
    within = [(case, said) for case, said in read() if case.group != "along"]
    assert len(within) > 300 and len({case.code for case, _ in within}) > 300
    assert sum(said == SAME for _, said in within) >= 0.95 * len(within)
    over = [said for case, said in read() if case.group == "along"]
    assert over.count(SAME) < len(over) / 3
    assert all(re.match(rf"{SAME}$|[A-Z]\w+Error: ", said) for _, said in read())
