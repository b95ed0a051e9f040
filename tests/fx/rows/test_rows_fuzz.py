"""Random programs: facts hold on adversarial batches, and graphs compute what `forward` does.

A sample runs here. `make fuzz` runs tens of thousands in processes, and tells which rules, options
and refusals they have reached.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from rows_tried import Outcome, outcome, tried
from rows_whole import NAMES, OF_STATE, Program, draw

from fngraph.fx.rows import sums

PROGRAMS = 16


def whole(fn: Any, **of: Any) -> Program:
    """The program of one op; `of`: what it takes, and which leaves of the state it becomes."""
    at = [NAMES.index(name) for name in of["takes"].split()]
    news = {name: NAMES.index(name) for name in OF_STATE}
    news |= dict.fromkeys(of.get("becomes", "").split(), len(NAMES))
    return Program([(fn, at)], list(news.values()), [len(NAMES)], "tuple")


@pytest.mark.filterwarnings("ignore")  # torch's own, of odd programs
def test_random_programs_are_right_or_refused() -> None:
    """And both verdicts are common, so that neither is won by default."""
    seen = []
    for seed in range(PROGRAMS):
        found = outcome(seed)
        assert found.kind in ("accepted", "refused", "shaky"), (seed, found.why, found.code)
        seen.append(found.kind)
    assert seen.count("accepted") >= PROGRAMS / 4 and seen.count("refused") >= PROGRAMS / 16
    assert seen.count("shaky") <= PROGRAMS / 20


def test_a_seed_is_a_program() -> None:
    one, other = (draw(random.Random(7)) for _ in range(2))
    assert [at for _, at in one.steps] == [at for _, at in other.steps]
    assert (one.news, one.outputs, one.nested) == (other.news, other.outputs, other.nested)


def test_each_verdict_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(fn: Any, takes: str = "x", **of: Any) -> Outcome:
        return tried(whole(fn, takes=takes, **of))

    assert kind(lambda x: x * 2) == Outcome("accepted")
    assert kind(lambda y: y.sum(0), "y") == Outcome("refused", "RowsError")
    monkeypatch.setattr(sums.reduction, "__code__", sums.running.__code__)  # claims all of it
    wrong = kind(lambda y: (y.log2() - 1).sum(0), "y")
    assert wrong.kind == "wrong" and "sum" in wrong.why and "torch.ops.aten.log2" in wrong.code


@pytest.mark.parametrize("takes", ["total", "seen"])
def test_graphs_that_differ_are_seen(takes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no rule is about: a state that is not what forward makes of it."""
    import fngraph.step.step as steps

    adds = whole(lambda s: s.add_(1), takes=takes, becomes=takes)
    assert tried(adds) == Outcome("accepted")
    replays = steps.results_of

    def twice(*args: Any) -> Any:
        replays(*args)
        return replays(*args)

    monkeypatch.setattr(steps, "results_of", twice)
    found = tried(adds)
    assert found.kind == "wrong" and "results of call 0, (7, 3, None)" in found.why


def test_an_error_of_torch_is_told_with_its_place() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] is not None and type(x) is not torch.Tensor:
            raise RuntimeError("no trace")
        return x * 1

    found = tried(whole(fails, takes="x"))
    assert found.kind == "raw" and "no trace" in found.why and "test_rows_fuzz.py:" in found.why
