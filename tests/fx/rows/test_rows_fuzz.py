"""Random programs: facts hold on adversarial batches, and graphs compute what `forward` does.

A sample runs here. `make fuzz` runs tens of thousands in processes, and tells which rules, options
and refusals they have reached.
"""

from __future__ import annotations

import random
from types import ModuleType
from typing import Any

import pytest
import torch
from rows_odd import ODD
from rows_torch import Elsewhere, Unwritten
from rows_tried import Outcome, is_shaky, outcome, tried
from rows_whole import (
    BATCHES,
    INVALID,
    NAMES,
    OF_STATE,
    STARTS,
    Program,
    batch,
    draw,
    params,
    state,
)

from fngraph.fx.rows import sums
from fngraph.graphs.tape import mode, shapes

PROGRAMS = range(50, 66)


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
    for seed in PROGRAMS:
        found = outcome(seed)
        assert found.kind in ("accepted", "refused", "shaky"), (seed, found.why, found.code)
        seen.append(found.kind)
    assert (
        seen.count("accepted") >= len(PROGRAMS) / 4 and seen.count("refused") >= len(PROGRAMS) / 16
    )
    assert seen.count("shaky") <= len(PROGRAMS) / 20


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


@pytest.mark.filterwarnings("ignore")  # torch's own, of odd programs
def test_each_chain_of_stages_can_be_drawn() -> None:
    """A chain that always fails would be drawn again, and never tried."""
    values = {name: make(params(), state(), batch(*BATCHES[0])) for name, make in STARTS.items()}
    for names, make in ODD:
        made = 0
        for seed in range(12):
            try:
                made += (
                    make(random.Random(seed))(*[values[name] for name in names.split()]) is not None
                )
            except INVALID:
                continue
        assert made > 3, names


@torch.library.custom_op("rows_fuzz::by_place", mutates_args=(), tags=[torch.Tag.pointwise])
def by_place(x: torch.Tensor) -> torch.Tensor:
    """Another number for an infinity that comes first."""
    return torch.cat([x[:1].nan_to_num(posinf=7), x[1:]])


by_place.register_fake(torch.empty_like)


def test_what_torch_leaves_open_is_no_fault() -> None:
    with (found := Elsewhere()):
        by_place(torch.tensor([1.0, 2.0]))
        torch.exp(torch.tensor([1.0, float("inf")]))
        assert not found.found
        by_place(torch.tensor([float("inf"), 2.0]))
    assert found.found == {"rows_fuzz.by_place.default"}
    with Unwritten(7):
        assert (torch.empty(3) == 7).all() and (torch.ones(2).new_empty(2) == 7).all()
    given = params(), state(), batch(*BATCHES[0])
    unwritten = whole(lambda w: torch.empty_like(w)[:3].exp(), takes="w")
    assert is_shaky(unwritten, *given) and not is_shaky(whole(torch.neg, takes="x"), *given)


def test_the_tape_is_not_blamed_for_torchs_rules_of_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def kind(module: ModuleType, name: str) -> Outcome:
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *args: [][0])
            return tried(whole(lambda x: x * 2, takes="x"))

    shapes._known.cache_clear()
    assert kind(shapes, "as_computed") == Outcome(
        "refused", "CaptureError: torch's rule for the shape of an op fails"
    )
    assert kind(mode, "check_no_read").kind == "raw"


def test_a_row_that_is_kept_for_padding_is_no_difference() -> None:
    written = whole(lambda s, at, x: s.index_put((at,), x), takes="total place x", becomes="total")
    assert tried(written) == Outcome("accepted")
