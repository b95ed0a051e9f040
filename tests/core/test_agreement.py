"""`fngraph.core.agreement`: ranks that must run alike find out alone that they do."""

from itertools import product

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Decision,
    Limits,
    Mode,
    Proposal,
    agree,
    build_table,
    dispatch,
    ladders,
    propose,
    settle,
)
from fngraph.errors import ModesError

NONE, PIECEWISE, FULL = Mode.NONE, Mode.PIECEWISE, Mode.FULL


def table(modes="FULL_AND_PIECEWISE", **options):
    return build_table(modes, ladders((1, 2, 4, 8), (1, 2), 8), Limits(64, 8), **options)


def test_a_proposal_is_what_the_rank_would_run():
    one = table()
    assert propose(one, BatchSpec(3, 3, 1)) == Proposal(FULL, 3, 3, 1, one.plan_hash)
    assert propose(one, BatchSpec(3, 2)) == Proposal(PIECEWISE, 3, 2, None, one.plan_hash)
    assert propose(one, BatchSpec(9, 2)).mode is NONE
    assert propose(one, BatchSpec(3, 3, 1), ["NONE"]).mode is NONE


@pytest.mark.parametrize(
    ("proposals", "decisions"),
    [
        ([Proposal(FULL, 3, 3, 1)], [Decision(FULL, 3, 3, 1)]),
        (
            [Proposal(FULL, 3, 3, 1), Proposal(FULL, 8, 8, 1)],
            [Decision(FULL, 8, 8, 1)] * 2,
        ),
        (
            [Proposal(FULL, 4, 2, 2), Proposal(PIECEWISE, 7, 1), Proposal(FULL, 5, 5, 1)],
            [Decision(PIECEWISE, 7, 5, None)] * 3,
        ),
        (
            [Proposal(FULL, 4, 2, 2), Proposal(FULL, 5, 5, 1)],
            [Decision(FULL, 5, 5, None)] * 2,
        ),
        (
            [Proposal(FULL, 4, 2, 2), Proposal(NONE, 70, 3), Proposal(PIECEWISE, 7, 1)],
            [Decision(NONE, 4, 2, 2), Decision(NONE, 70, 3), Decision(NONE, 7, 1)],
        ),
    ],
)
def test_the_weakest_mode_and_the_largest_batch_hold(proposals, decisions):
    assert agree(proposals) == tuple(decisions)
    assert agree(proposals[::-1]) == tuple(decisions[::-1])


def test_a_rank_may_say_no_more_than_mode_and_tokens():
    assert Proposal(FULL, 3) == (FULL, 3, 1, None, "") and Decision(FULL, 3) == (FULL, 3, 1, None)
    assert agree([Proposal(FULL, 3), Proposal(PIECEWISE, 8)]) == (Decision(PIECEWISE, 8),) * 2


def test_nobody_and_different_tables():
    with pytest.raises(ModesError) as info:
        agree([])
    assert str(info.value) == "No rank proposes anything. Pass one Proposal a rank."
    plans = [Proposal(FULL, 1, plan_hash=plan) for plan in ("a", "b", "a", "")]
    with pytest.raises(ModesError) as info:
        agree(plans)
    assert str(info.value) == (
        "Ranks planned different dispatch tables: a on [0, 2]; b on [1]; no hash on [3]. "
        "Build every rank's table from the same modes, sizes and limits."
    )
    different = [propose(table(), BatchSpec(1, 1)), propose(table("FULL"), BatchSpec(1, 1))]
    with pytest.raises(ModesError, match="Ranks planned different"):
        agree(different)


def test_settling():
    one, spec = table(), BatchSpec(3, 3, 1)
    assert settle(one, spec, Decision(FULL, 5, 5, 1)) == dispatch(one, BatchSpec(5, 5, 1))
    assert settle(one, spec, Decision(PIECEWISE, 5, 5, 1)).key == (PIECEWISE, BatchDescriptor(8))
    assert settle(one, spec, Decision(NONE, 5, 5, 1)) == (
        NONE,
        BatchDescriptor(3, 3, 1),
        "a rank runs NONE",
    )
    decode = table("FULL_DECODE_ONLY")
    assert settle(decode, spec, Decision(FULL, 5, 4, None)) == (
        NONE,
        BatchDescriptor(3, 3, 1),
        "over all ranks: FULL keys are for uniform batches of query_len 1 or 2",
    )


BATCHES = [
    BatchSpec(*counts, adapters=adapters)
    for counts in ((1, 1, 1), (3, 3, 1), (4, 2, 2), (8, 4, 2), (5, 2), (8, 8), (9, 1), (4, 4, 1))
    for adapters in (0, 1, 2, 4)
]


@pytest.mark.parametrize("modes", [mode.name for mode in Mode])
def test_all_ranks_run_the_same_mode_and_pad_alike(modes):
    """Every pair of batches, and triples with one more, under every mode."""
    one = table(modes, adapters=(0, 1, 3))
    for specs in [*product(BATCHES, repeat=2), *product(BATCHES[::5], repeat=3)]:
        decisions = agree([propose(one, spec) for spec in specs])
        ran = [settle(one, spec, decision) for spec, decision in zip(specs, decisions)]
        assert len({answer.mode for answer in ran}) == 1
        weakest = min(dispatch(one, spec).mode.strength for spec in specs)
        assert ran[0].mode.strength <= weakest
        if ran[0].mode is NONE:
            assert [answer.descriptor for answer in ran] == [spec.descriptor() for spec in specs]
        else:
            assert len({answer.descriptor[:3] for answer in ran}) == 1
            for spec, answer in zip(specs, ran):
                assert answer.descriptor.num_tokens >= spec.num_tokens
                assert (answer.descriptor.num_reqs or 64) >= spec.num_reqs
                assert answer.descriptor.adapters == one.adapters.round(spec.adapters)


def test_a_pipeline_sees_one_batch_and_agrees_on_the_weakest_stage():
    spec = BatchSpec(3, 3, 1)
    stages = [table(), table("PIECEWISE"), table()]
    proposals = [propose(stage, spec)._replace(plan_hash="") for stage in stages]
    ran = [settle(stage, spec, decision) for stage, decision in zip(stages, agree(proposals))]
    assert {answer.key for answer in ran} == {(PIECEWISE, BatchDescriptor(4))}
