"""A warm-up that fails in one process alone: every process is told which, and of what, and none
goes on with other collectives than the others."""

from __future__ import annotations

from typing import Any

import pytest
import rank_warming
import starting


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return starting.values(starting.run(rank_warming.fails, 2))


WHAT = {
    "a key": "FULL BatchDescriptor(8, 4)",
    "a batch": "without a graph",
    "copies": "no memory for the copies",
}


@pytest.mark.parametrize("what", WHAT)
def test_it_is_told_in_every_process(ranks: list[dict[str, Any]], what: str) -> None:
    (other, *_), (own, *_) = (found[f"{what}, raise"] for found in ranks)
    assert own.startswith("CaptureError: ") and WHAT[what] in own
    assert other.startswith("RankError: ") and "by every process, so none keeps it: " in other
    assert "rank 1: CaptureError: " in other and WHAT[what] in other
    assert what == "copies" or "no such luck" in other


@pytest.mark.parametrize("what", WHAT)
def test_where_it_may_fail_all_go_on(ranks: list[dict[str, Any]], what: str) -> None:
    """A key that cannot be warmed is none's; a batch that cannot leaves keys as they are."""
    told = [found[f"{what}, eager"] for found in ranks]
    assert told[0] == told[1]
    error, after, right, captured = told[0]
    assert (error, after, right) == ("", "", True)
    assert captured == (2 if what == "a batch" else 0)


@pytest.mark.parametrize("what", WHAT)
def test_the_next_step_is_as_good_as_any(ranks: list[dict[str, Any]], what: str) -> None:
    for found in ranks:
        _, after, right, _ = found[f"{what}, raise"]
        assert after == "" and right
