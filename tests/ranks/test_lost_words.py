"""What is said of processes that are gone, by one that is left: of a store that this process keeps
and a clock that it moves, so that none is started and nobody waits."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from fngraph.ranks import faults

DOCS = " ".join((Path(__file__).parents[2] / "docs" / "ranks.md").read_text().split())


class Clock:
    """Of which `sleep` is all that passes.

    Attributes:
        s: seconds that have passed.
    """

    s = 0.0

    def monotonic(self) -> float:
        return self.s

    def sleep(self, seconds: float) -> None:
        self.s += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(faults, "time", found)
    return found


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """That of rank 0's processes."""
    found = dist.HashStore()
    monkeypatch.setattr(faults, "default_store", lambda: found)
    monkeypatch.setattr(faults, "dist", types.SimpleNamespace(get_rank=lambda: 0))
    return found


def said(store: Any, rank: int) -> str:
    return store.get(f"fngraph/failed/{rank}").decode()


def say(store: Any, **words: str) -> None:
    for rank, word in words.items():
        store.set(f"fngraph/failed/{rank.removeprefix('rank_')}", word)


@pytest.mark.parametrize("word", [None, "came 105.0"])
def test_others_are_waited_for_as_long_as_the_docs_say(
    store: Any, clock: Clock, word: str | None
) -> None:
    """Also who has come, but may know more in a moment."""
    if word is not None:
        say(store, rank_1=word)
    who = faults._who([0, 1], came=100.0)
    assert "waits up to 3 seconds for the others' word" in DOCS
    assert "raises within the timeout and 3 seconds" in DOCS
    assert 3 <= clock.s < 3.1
    assert (
        who
        == {
            None: "rank 1 is gone, or did not come in time",
            "came 105.0": "rank 1 came 5.0 s after this one, by its clock",
        }[word]
    )


def test_who_has_said_why_is_not_waited_for(store: Any, clock: Clock) -> None:
    say(store, rank_1="raised ValueError: no", rank_2="found that rank 3 is gone")
    who = faults._who([0, 1, 2], came=100.0)
    assert who == "rank 1 raised ValueError: no; rank 2 found that rank 3 is gone"
    assert clock.s == 0


@pytest.mark.parametrize("first", ["came 50.0", "raised ValueError: no"])
def test_what_was_said_first_stays(store: Any, clock: Clock, first: str) -> None:
    """Others may have read it, and why it failed is more than when it came."""
    say(store, rank_0=first, rank_1="came 100.0")
    faults._who([0, 1], came=100.0)
    assert said(store, 0) == first


def test_who_has_said_nothing_says_when_it_came(store: Any, clock: Clock) -> None:
    say(store, rank_1="came 100.0")
    faults._who([0, 1], came=100.0)
    assert said(store, 0) == "came 100.0"


def test_who_is_missed_is_said_to_those_who_do_not_meet_it(store: Any, clock: Clock) -> None:
    say(store, rank_1="came 100.0")
    who = faults._who([0, 1, 2], came=100.0)
    assert (
        said(store, 0)
        == f"found that {who}"
        == "found that rank 2 is gone, or did not come in time"
    )
