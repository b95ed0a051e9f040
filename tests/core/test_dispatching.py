"""`fngraph.core.dispatching`: examples. Its laws: test_dispatching_laws.py."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Equal,
    Field,
    Limits,
    Mode,
    build_table,
    default_sizes,
    dispatch,
    dispatch_by_definition,
    dispatching,
    ladders,
)
from fngraph.errors import ModesError, SpecError

UBATCHES = Field("ubatches", Equal(), default=1, full=(1,), piecewise=(1,))
LIMITS = Limits(max_tokens=8192, max_reqs=256)


def table_of(modes, sizes, query_lens=(1,), max_reqs=256, **options):
    limits = Limits(8192, max_reqs)
    return build_table(modes, ladders(sizes, query_lens, max_reqs), limits, **options)


BOTH = table_of("FULL_AND_PIECEWISE", default_sizes(LIMITS))


@pytest.mark.parametrize(
    ("spec", "mode", "key"),
    [
        (BatchSpec(37, 37, query_len=1), Mode.FULL, BatchDescriptor(40, 40, query_len=1)),
        (BatchSpec(256, 256, query_len=1), Mode.FULL, BatchDescriptor(256, 256, query_len=1)),
        (BatchSpec(37, 5), Mode.PIECEWISE, BatchDescriptor(40)),
        (BatchSpec(37, 37), Mode.PIECEWISE, BatchDescriptor(40)),  # one each, but nobody said so
        (BatchSpec(512, 1), Mode.PIECEWISE, BatchDescriptor(512)),
        (BatchSpec(513, 1), Mode.NONE, BatchDescriptor(513, 1)),
        (BatchSpec(37, 37, 1, cascade=True), Mode.PIECEWISE, BatchDescriptor(40)),
        (BatchSpec(37, 37, 1, encoder_outputs=True), Mode.PIECEWISE, BatchDescriptor(40)),
        (BatchSpec(37, 37, 1, adapters=1), Mode.NONE, BatchDescriptor(37, 37, 1, adapters=1)),
    ],
)
def test_default_ladder(spec, mode, key):
    assert dispatch(BOTH, spec).key == (mode, key)


def test_two_requests_of_three_tokens_go_to_nine_not_to_piecewise_eight():
    table = table_of("FULL_AND_PIECEWISE", [1, 8, 16], query_lens=(1, 2, 3, 4))
    assert dispatch(table, BatchSpec(6, 2, query_len=3)).key == (
        Mode.FULL,
        BatchDescriptor(9, 3, query_len=3),
    )


def test_a_decision_is_kept_by_the_definition_too():
    spec = BatchSpec(37, 5)
    larger = dispatch(BOTH, BatchSpec(50, 5))
    for decision in (larger, dispatch(BOTH, spec, "NONE")):
        assert dispatch(BOTH, spec, decision) == decision
        assert dispatch_by_definition(BOTH, spec, decision) == decision.key
    assert dispatching.modes_of(larger) == {Mode.PIECEWISE}
    assert dispatching.modes_of(["NONE"]) == {Mode.NONE} and len(dispatching.modes_of(None)) == 3
    foreign = larger._replace(descriptor=BatchDescriptor(57))
    eager = dispatch(BOTH, spec, "NONE")
    for wanted, decision, says in (
        (BatchSpec(57, 5), larger, (
            "BatchSpec(num_tokens=57, num_reqs=5) was to run as PIECEWISE BatchDescriptor(56), "
            "which does not cover it: num_tokens is 56 there and 57 here. Decide for the batch "
            "itself: step.dispatch(spec)."
        )),
        (spec, foreign, (
            "BatchSpec(num_tokens=37, num_reqs=5) was to run as PIECEWISE BatchDescriptor(57), "
            f"which is no key of {BOTH!r}. Capture it, or decide by this table: "
            "step.dispatch(spec)."
        )),
        (BatchSpec(36, 5), eager, (
            "BatchSpec(num_tokens=36, num_reqs=5) was to run eagerly by a decision for other "
            "counts, BatchDescriptor(37, 5). Decide for the batch itself: step.dispatch(spec)."
        )),
    ):  # fmt: skip
        with pytest.raises(ModesError) as info:
            dispatch(BOTH, wanted, decision)
        assert str(info.value) == says
    for decide in (dispatch, dispatch_by_definition):
        with pytest.raises(SpecError, match="the table knows no user-defined field"):
            decide(BOTH, spec._replace(extra={"ubatches": 2}), larger)


def test_allowed_narrows_and_names_are_enough():
    spec = BatchSpec(37, 37, query_len=1)
    assert dispatch(BOTH, spec, ["PIECEWISE", "NONE"]).mode is Mode.PIECEWISE
    assert dispatch(BOTH, spec, {Mode.NONE}).key == (Mode.NONE, spec.descriptor())
    with pytest.raises(ModesError, match="cannot run as FULL"):
        dispatch(BOTH, BatchSpec(37, 5), ["FULL"])


def test_the_definition_knows_allowed_too():
    spec = BatchSpec(37, 37, query_len=1)
    assert dispatch_by_definition(BOTH, spec, ["PIECEWISE"])[0] is Mode.PIECEWISE
    with pytest.raises(ModesError) as info:
        dispatch_by_definition(BOTH, BatchSpec(37, 5), ["FULL"])
    assert str(info.value) == ("BatchSpec(num_tokens=37, num_reqs=5) has no key among ['FULL'].")


@pytest.mark.parametrize("extra", [{}, {"fields": [UBATCHES]}])
def test_an_ordinary_step_never_takes_the_long_way(monkeypatch, extra):
    """`_choose` answers the same, three times slower: `allowed=` and a user's field need it."""
    table = table_of("FULL_AND_PIECEWISE", (2, 8), (1, 2), adapters=(0, 4, 99), **extra)
    specs = [
        BatchSpec(*counts, adapters=adapters, cascade=cascade)
        for counts in ((2, 2, 1), (2, 1), (3, 1, 3), (9, 9, 1))
        for adapters in (0, 1, 65, 100)
        for cascade in (False, True)
    ]
    found = [dispatch(table, spec) for spec in specs]
    long_way: list[BatchSpec] = []
    monkeypatch.setattr(dispatching, "_choose", lambda *args: long_way.append(args[0]))
    again = [dispatch(table, spec) for spec in specs]
    assert (again == found and not long_way) if not extra else long_way == specs


def test_unknown_field_is_refused():
    with pytest.raises(SpecError, match="'ubatches'"):
        dispatch(BOTH, BatchSpec(4, 4, extra={"ubatches": 2}))
