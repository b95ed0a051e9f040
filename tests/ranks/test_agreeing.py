"""Steps whose collectives meet others: what must be alike is compared, here as plain values, and on
two processes before anything is captured or launched; a test tries to run other keys."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import rank_differs
import starting
import torch

import fngraph as fg
from fngraph.ranks.agreement import RAISED, Peers, first_difference, refusal

# the comparison, of plain values


def test_the_first_difference_is_by_order() -> None:
    a, b = {"torch": "2.13", "limits": "16", "op 0": "mm"}, {"torch": "2.13", "limits": "8"}
    assert first_difference({0: a, 1: dict(a)}) is None
    assert first_difference({1: b, 0: a}) == ("limits", {0: "16", 1: "8"})
    assert first_difference({0: {**b, "limits": "16"}, 1: a}) == ("op 0", {0: "nothing", 1: "mm"})


def test_what_one_has_raised_comes_first() -> None:
    told = {0: {"limits": "16"}, 1: {RAISED: "ValueError: no."}, 2: {"limits": "8"}}
    assert first_difference(told) == (RAISED, {1: "ValueError: no."})
    error = str(refusal("run a step", told, {}))
    assert error == "to run a step is off: rank 1 raised ValueError: no. Nothing was launched"


def test_a_refusal_says_who_has_what_and_where() -> None:
    told = {0: {"op 3": "relu"}, 1: {"op 3": "tanh"}, 2: {"op 3": "relu"}}
    error = str(refusal("capture 2 keys", told, {"op 3": "model.py:7"}))
    assert "differ in op 3 (model.py:7): relu on ranks [0, 2]; tanh on rank 1" in error


def test_a_number_stands_for_all_that_is_said() -> None:
    one = Peers((("tp", "1"),), {"limits": "8"}, {}, True, ())
    other = Peers((("tp", "2"),), {"limits": "8"}, {"limits": "here"}, True, ())
    assert one.number({"key": "4"}) == other.number({"key": "4"}) < 2**63
    assert one.number({"key": "4"}) != one.number({"key": "8"})
    assert one.number({}) != Peers((), {"limits": "9"}, {}, True, ()).number({})


def test_numbers_of_what_differs_are_not_the_same_by_chance() -> None:
    """Of 60 bits, each of which is as often 1 as 0: 5,000 of 24 bits would hold some twice."""
    one = Peers((("tp", "1"),), {"limits": "8"}, {}, True, ())
    numbers = [one.number({"key": str(i)}) for i in range(5000)]
    assert len(set(numbers)) == 5000
    ones = [sum(number >> bit & 1 for number in numbers) for bit in range(60)]
    assert all(2200 < count < 2800 for count in ones)  # 8 of their standard deviation, 35


# two processes


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return starting.values(starting.run(rank_differs.differs, 2))


CAPTURES = {
    "limits": "differ in limits: Limits(max_tokens=16, max_reqs=4) on rank 0; Limits(max_tokens",
    "sizes": "differ in the dispatch table: DispatchTable(FULL: 2 FULL keys of 4..8)",
    "modes": "differ in modes: FULL on rank 0; PIECEWISE on rank 1",
    "code": "aten.relu.default(%1) -> float32[T, 8] on rank 0; aten.tanh.default(%1)",
    "dtype": "differ in w: held float32[8, 8]",
    "passes": "differ in passes: [] on rank 0; [('no_ops'",
    "padding": "of padding {0: 0.0} -> float32[T, 8] on rank 0; fngraph.all_reduce.default(%7)",
    "a budget": "which keys there is room for is measured",
}


@pytest.mark.parametrize("name", CAPTURES)
def test_captures_that_differ_are_refused_by_both(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        assert found[name].startswith("RankError: ")
        assert CAPTURES[name] in found[name]
    if name in ("code", "padding"):
        assert "(tests/ranks/rank_differs.py:" in ranks[1][name]


@pytest.mark.parametrize("name", ["same padding", "other numbers"])
def test_what_may_differ_is_captured(ranks: list[dict[str, Any]], name: str) -> None:
    assert [found[name] for found in ranks] == ["", ""]


STEPS = {
    "other keys": "FULL BatchDescriptor(4, 4) on rank 0; FULL BatchDescriptor(8, 4) on rank 1",
    "other modes": "FULL BatchDescriptor(4, 4) on rank 0; NONE BatchDescriptor(3, 2) on rank 1",
    "other counts": "differ in the batch: BatchSpec(num_tokens=3, num_reqs=2) on rank 0",
}


@pytest.mark.parametrize("name", STEPS)
def test_no_step_runs_as_other_keys(ranks: list[dict[str, Any]], name: str) -> None:
    """And nothing was launched: donated state is as it was, and nothing is counted."""
    for found in ranks:
        error, untouched, ran = found[name]
        assert error.startswith("RankError: ") and STEPS[name] in error
        assert untouched and ran == 0


DECIDED = {
    "decided otherwise": STEPS["other keys"],
    "decided by one": STEPS["other keys"],
}


@pytest.mark.parametrize("name", DECIDED)
def test_what_was_decided_is_compared_too(ranks: list[dict[str, Any]], name: str) -> None:
    for found in ranks:
        error, untouched, ran = found[name]
        assert error.startswith("RankError: ") and DECIDED[name] in error
        assert untouched and ran == (2 if name == "decided otherwise" else 3)


def test_what_was_decided_may_be_for_batches_of_other_counts(ranks: list[dict[str, Any]]) -> None:
    """`agree` and `settle` are for these: one key, and each process's own tokens in it."""
    assert [found["decided, other counts"] for found in ranks] == [("", False, 3)] * 2


def test_a_table_that_differs_is_found_before_what_was_decided_of_it(
    ranks: list[dict[str, Any]],
) -> None:
    """Nothing was captured before, and nothing is."""
    for found in ranks:
        error, captured = found["decided, other tables"]
        assert "differ in the dispatch table: DispatchTable(FULL: 2 FULL keys of 4..8)" in error
        assert captured == 0


@pytest.mark.parametrize(
    ("name", "kind"), [("one is refused", "TreeError"), ("beyond the limits", "SpecError")]
)
def test_what_one_cannot_run_none_does(ranks: list[dict[str, Any]], name: str, kind: str) -> None:
    (other, *untouched), (own, *_) = (found[name] for found in ranks)
    assert own.startswith(kind)
    assert other.startswith("RankError: ") and f"rank 1 raised {kind}: " in other
    assert untouched == [True, 0]


def test_what_was_decided_and_one_cannot_run_none_does(ranks: list[dict[str, Any]]) -> None:
    (other, *untouched), (own, *_) = (found["decided, one is refused"] for found in ranks)
    assert own.startswith("TreeError") and "rank 1 raised TreeError: " in other
    assert untouched == [True, 4]


def test_after_all_that_steps_go_on(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["then alike"] == ("", False, 1)
        assert found["decided for all"][::2] == ("", 2)
        assert found["other bounds"][::2] == ("", 4), "each process has bounds of its own"


def test_a_key_that_one_has_let_go_is_captured_by_both(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["one must capture it"] == ("", False, 5)
        assert found["captured"] == 2
        assert found["a few"] == [1, 0, 0], "who has no time left stops both"


def test_a_capture_that_fails_in_one_is_kept_by_none(ranks: list[dict[str, Any]]) -> None:
    other, own = (found["capture fails: raise"] for found in ranks)
    assert own[0].startswith("CaptureError: FULL BatchDescriptor(8, 4): ")
    assert other[0].startswith("RankError: FULL BatchDescriptor(8, 4) cannot be captured by every")
    assert "rank 1: CaptureError: " in other[0] and "no such luck" in other[0]
    for rank, found in enumerate(ranks):
        error, failed = found["capture fails: eager"]
        assert error == "" and len(failed) == 2
        assert all("no such luck" in why for why in failed)
        assert all(why.startswith("rank 1: ") for why in failed) == (rank == 0)
        assert found["and runs"] == ("", "NONE")


def test_a_key_that_has_failed_in_one_is_tried_by_none(ranks: list[dict[str, Any]]) -> None:
    """Or the collectives of one's capture would meet those of the other's eager step."""
    for found in ranks:
        assert found["one would try again"] == ("", True, 0, "NONE")


def test_what_runs_keys_is_compared_too(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert "differ in what is done: a step on rank 0; measure FULL" in found["times of one"]
        assert found["times of both"] == ""
        assert "differ in the keys to capture: FULL BatchDescriptor(4, 4)" in found["others lack"]


def test_who_has_rebound_alone_is_found_before_the_step(ranks: list[dict[str, Any]]) -> None:
    """Else sums would be of old weights and of new ones."""
    for found in ranks:
        before, by_one, by_both, again, by_other, at_last = found["rebound"]
        assert before == ("", [2]) and by_both == again == at_last == ("", [4])
        for error, rows in (by_one, by_other):
            assert error.startswith("RankError: ") and rows == [0]
            assert "differ in how often held leaves were rebound: " in error
        assert "0 times on rank 0; 1 time on rank 1" in by_one[0]
        assert "3 times on rank 0; 2 times on rank 1" in by_other[0]
        assert found["one is new"] == ""


def test_axes_of_one_name_are_in_the_order_of_their_calls() -> None:
    """Torch counts groups over all rows: 9 may be this row's first, and 10 another row's."""

    def groups(first: str, second: str) -> Any:
        a, b = fg.Axis("tp", 2, 0, first), fg.Axis("tp", 2, 0, second)

        def forward(x: torch.Tensor) -> torch.Tensor:
            return fg.all_reduce(fg.all_reduce(x, a), b)

        x = fg.like(torch.empty(3, 8, device="meta"))
        lowered = fg.graphify(forward, stage="x").trace(batch=x).split().lower()
        return lowered.compile().executable.peers.groups

    assert groups("9", "11") == (("tp", "9"), ("tp", "11"))
    assert groups("10", "12") == (("tp", "10"), ("tp", "12"))


@pytest.mark.parametrize("how", ["cond", "while_loop"])
def test_no_collective_depends_on_a_tensor(how: str) -> None:
    """Whose value may be another in each process: it is refused in a trace, at the user's line."""
    tp = fg.Axis("tp", 2, 0, "1")

    def forward(x: torch.Tensor) -> torch.Tensor:
        if how == "cond":
            return fg.cond(x.sum() > 0, lambda x: fg.all_reduce(x, tp), lambda x: x + 1, x)
        return fg.while_loop(lambda x: x.sum() < 9, lambda x: fg.all_reduce(x, tp), x)

    with pytest.raises(fg.errors.OperatorError, match=r"test_agreeing.py:\d+: a function of .*"):
        fg.graphify(forward, stage="x").trace(batch=torch.ones(3, 8))


def test_devices_of_other_numbers_are_alike() -> None:
    """Each process has its own: cuda:0 and cuda:1; and a group of another name."""

    def told(device: str, group: str) -> Peers | None:
        tp = fg.Axis("tp", 2, 0, group)
        spec = fg.like(torch.empty(8, 8, device="meta"))
        w = dataclasses.replace(spec, device=torch.device(device))

        def forward(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return fg.all_reduce(x @ w, tp)

        x = dataclasses.replace(w, shape=(3, 8))
        lowered = fg.graphify(forward, stage="x").trace(w, batch=x).split().lower()
        return lowered.compile().executable.peers

    one, other = told("cuda:0", "1"), told("cuda:1", "2")
    assert one is not None and other is not None
    assert one.groups != other.groups
    assert one.told == other.told
