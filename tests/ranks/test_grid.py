"""Agreement of four processes, two by two: who shares no axis with the one that differs is told as
well, and does what all do. All of it is one run, since four processes take seconds to meet."""

from __future__ import annotations

from typing import Any

import pytest
import rank_grid
import starting
from rank_grid import RANKS


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return starting.values(starting.run(rank_grid.found, RANKS))


@pytest.mark.parametrize("who", range(RANKS))
def test_where_one_differs_none_goes_on(ranks: list[dict[str, Any]], who: int) -> None:
    others = [rank for rank in range(RANKS) if rank != who]
    values = sorted([(others[0], f"7 on ranks {others}"), (who, f"8 on rank {who}")])
    said = f"differ in number: {'; '.join(text for _, text in values)}. All must"
    for found in ranks:
        for how in ("differs", "in a row"):
            assert found[how, who].startswith("RankError: ranks [0, 1, 2, 3] were about to go on")
            assert said in found[how, who]


@pytest.mark.parametrize("who", range(RANKS))
def test_where_one_refuses_none_goes_on(ranks: list[dict[str, Any]], who: int) -> None:
    said = f"to go on is off: rank {who} raised ValueError: no. Nothing was launched"
    assert [found["refuses", who] for found in ranks] == [f"RankError: {said}"] * RANKS


def test_each_knows_what_all_have_to_say(ranks: list[dict[str, Any]]) -> None:
    want = {rank: {"rank": str(rank)} for rank in range(RANKS)}
    assert [found["all"] for found in ranks] == [want] * RANKS


@pytest.mark.parametrize("who", range(RANKS))
def test_a_flag_of_one_is_known_to_all(ranks: list[dict[str, Any]], who: int) -> None:
    assert [found["flags", who] for found in ranks] == [[0, 2]] * RANKS
    assert [found["own flags"] for found in ranks] == [[0, 1, 2, 3]] * RANKS


def test_axes_of_one_size_are_not_swapped(ranks: list[dict[str, Any]]) -> None:
    """Shapes and ops are alike, and it is said at which line they are not."""
    for found in ranks:
        assert found["swapped"].startswith("RankError: ")
        assert "differ in op 3 (tests/ranks/rank_differs.py:" in found["swapped"]
        assert "axis=tp" in found["swapped"] and "axis=dp" in found["swapped"]


@pytest.mark.parametrize("who", range(RANKS))
def test_a_key_that_one_lacks_is_captured_by_all(ranks: list[dict[str, Any]], who: int) -> None:
    for error, keys, captured in (found["lacks", who] for found in ranks):
        assert error == "" and keys == 2
        assert captured == ranks[who]["lacks", who][2] > 0


def test_a_key_that_has_failed_in_one_is_captured_by_none(ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(ranks):
        error, keys, failed = found["fails"]
        assert (error, keys, len(failed)) == ("", 0, 2)
        assert all("no such luck" in why for why in failed)
        assert all(why.startswith("rank 3: ") for why in failed) == (rank != 3)
        assert found["would try again"] == ("", "NONE")
