"""What one process refuses in a call of a graphified function, none of those that its collectives
meet runs; and the calls that follow are the same ones everywhere."""

from __future__ import annotations

from typing import Any

import pytest
import rank_refused
import starting
from rank_refused import AFTER, AHEAD, REFUSED, STATIC, WINDOWS


@pytest.fixture(scope="module")
def found() -> list[Any]:
    return starting.in_turn(rank_refused.refusing, 2, (*REFUSED, *STATIC, *AHEAD))


def check_refused(own: str, other: str) -> None:
    kind, _, why = own.partition(": ")
    assert kind in ("TreeError", "AddressError")
    assert other.startswith(("RankError: to run a step as ", "RankError: to verify a step is off"))
    assert f"rank 0 raised {kind}: {why[:40]}" in other and "Nothing was launched" in other


@pytest.mark.parametrize("name", REFUSED)
def test_a_call_that_one_refuses_none_runs(found: list[Any], name: str) -> None:
    own, other = (one[name] for one in found)
    before = 0 if "at first" in name else 1
    refused = 2 if name.startswith("twice") else 1
    assert own[:before] == other[:before] == [0.0] * before
    for each in range(before, before + refused):
        check_refused(own[each], other[each])
    sums = [2 * number for number in AFTER] * (WINDOWS if name.startswith("verified") else 1)
    assert own[before + refused :] == other[before + refused :] == sums


@pytest.mark.parametrize("name", STATIC)
def test_nor_of_the_program_that_it_would_be(found: list[Any], name: str) -> None:
    """The one without collectives asks nobody meanwhile."""
    own, other = (one[name] for one in found)
    before = int(name == STATIC[0])
    check_refused(own[before], other[before])
    then = [10.0, *(2 * number for number in AFTER), *AFTER]
    assert own[before + 1 :] == other[before + 1 :] == then


ERRORS = dict(zip(AHEAD, ("KeyError", "SpecError", "AddressError", "KeyError"), strict=True))


@pytest.mark.parametrize("name", AHEAD)
def test_nor_what_captures_or_replays_between_steps(found: list[Any], name: str) -> None:
    own, other = (one[name] for one in found)
    assert own[0].startswith(f"{ERRORS[name]}: ")
    assert other[0].startswith("RankError: to ") and f"rank 0 raised {ERRORS[name]}: " in other[0]
    assert own[1:] == other[1:] == [2 * number for number in AFTER]
