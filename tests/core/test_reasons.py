"""`fngraph.core.dispatching` and `arrange`: the sentence that comes with each answer."""

import dataclasses

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Limits,
    Mode,
    build_table,
    dispatch,
    ladders,
)
from fngraph.errors import ModesError


def table(modes, query_lens=(1,), sizes=(2, 4), **options):
    return build_table(modes, ladders(sizes, query_lens, 3), Limits(64, 3), **options)


UNIFORM_ONLY = "FULL keys are for uniform batches of query_len 1"
PIECEWISE_END = "PIECEWISE keys for such batches end at 4 tokens"


@pytest.mark.parametrize(
    ("modes", "spec", "mode", "reason"),
    [
        ("FULL_AND_PIECEWISE", BatchSpec(2, 2, 1), Mode.FULL, "least FULL key"),
        ("FULL_AND_PIECEWISE", BatchSpec(2, 2), Mode.PIECEWISE, UNIFORM_ONLY),
        ("FULL_AND_PIECEWISE", BatchSpec(4, 2, 2), Mode.PIECEWISE, UNIFORM_ONLY),
        (
            "FULL_AND_PIECEWISE",
            BatchSpec(4, 4, 1),
            Mode.PIECEWISE,
            "FULL keys for such batches end at 3 tokens",
        ),
        (
            "FULL_AND_PIECEWISE",
            BatchSpec(2, 2, 1, cascade=True),
            Mode.PIECEWISE,
            "FULL keys take no cascade batches",
        ),
        (
            "FULL_AND_PIECEWISE",
            BatchSpec(2, 2, 1, encoder_outputs=True),
            Mode.PIECEWISE,
            "FULL keys take no encoder_outputs batches",
        ),
        ("PIECEWISE", BatchSpec(2, 2, 1), Mode.PIECEWISE, "least PIECEWISE key"),
        ("FULL_AND_PIECEWISE", BatchSpec(5, 2), Mode.NONE, f"{UNIFORM_ONLY}; {PIECEWISE_END}"),
        ("FULL_DECODE_ONLY", BatchSpec(2, 2), Mode.NONE, UNIFORM_ONLY),
        ("PIECEWISE", BatchSpec(5, 2), Mode.NONE, PIECEWISE_END),
        (
            "FULL_AND_PIECEWISE",
            BatchSpec(2, 2, 1, 1),
            Mode.NONE,
            "no FULL key is for that many adapters; no PIECEWISE key is for that many adapters",
        ),
        ("NONE", BatchSpec(2, 2), Mode.NONE, "no key exists"),
        (
            "FULL",
            BatchSpec(4, 4),
            Mode.NONE,
            "no key of its kind and size holds so many requests",
        ),
        ("FULL", BatchSpec(5, 1), Mode.NONE, "FULL keys for such batches end at 4 tokens"),
    ],
)
def test_reasons(modes, spec, mode, reason):
    answer = dispatch(table(modes), spec)
    assert (answer.mode, answer.reason) == (mode, reason)
    assert dispatch(table(modes), spec, {"FULL", "PIECEWISE", "NONE"}) == answer


def test_several_query_lengths_are_all_named():
    answer = dispatch(table("FULL_DECODE_ONLY", (4, 1, 2)), BatchSpec(3, 2))
    assert answer.reason == "FULL keys are for uniform batches of query_len 1 or 2 or 4"


@pytest.mark.parametrize(
    ("allowed", "mode", "reason"),
    [
        ({"PIECEWISE", "NONE"}, Mode.PIECEWISE, "FULL not allowed"),
        ({"NONE"}, Mode.NONE, "FULL and PIECEWISE not allowed"),
        ({"FULL"}, Mode.FULL, "least FULL key"),
    ],
)
def test_what_was_not_allowed(allowed, mode, reason):
    answer = dispatch(table("FULL_AND_PIECEWISE"), BatchSpec(2, 2, 1), allowed)
    assert (answer.mode, answer.reason) == (mode, reason)


def test_a_mode_that_would_not_have_helped_is_not_blamed():
    answer = dispatch(table("FULL_AND_PIECEWISE"), BatchSpec(2, 2), {"PIECEWISE"})
    assert answer == (Mode.PIECEWISE, BatchDescriptor(2), UNIFORM_ONLY)


@pytest.mark.parametrize(
    ("spec", "allowed", "message"),
    [
        (
            BatchSpec(2, 2),
            ["FULL"],
            (
                "BatchSpec(num_tokens=2, num_reqs=2) cannot run as FULL: PIECEWISE not allowed. "
                'Add "NONE" to allowed=, or capture a key that covers it.'
            ),
        ),
        (
            BatchSpec(5, 1),
            ["PIECEWISE", "FULL"],
            (
                "BatchSpec(num_tokens=5, num_reqs=1) cannot run as FULL, PIECEWISE: "
                f"{UNIFORM_ONLY}; {PIECEWISE_END}. "
                'Add "NONE" to allowed=, or capture a key that covers it.'
            ),
        ),
    ],
)
def test_no_cover_and_none_not_allowed(spec, allowed, message):
    with pytest.raises(ModesError) as info:
        dispatch(table("FULL_AND_PIECEWISE"), spec, allowed)
    assert str(info.value) == message


def test_fewer_requests_than_a_batch_brings():
    one = build_table("FULL", ladders((8,), (2,), 3), Limits(64, 3), own_uniform=True)
    crowded = "no key of its kind and size holds so many requests"
    assert dispatch(one, BatchSpec(8, 4)) == (Mode.NONE, BatchDescriptor(8, 4), crowded)
    assert dispatch(one, BatchSpec(8, 4, 2))[:2] == (Mode.NONE, BatchDescriptor(8, 4, 2))


def test_a_full_key_of_too_few_requests_leaves_piecewise_ones():
    made = table("FULL_AND_PIECEWISE")
    full = (BatchDescriptor(4, 2),)  # a key by hand; `build_table` gives it every request
    crowded = dataclasses.replace(made, full=full)
    assert dispatch(crowded, BatchSpec(4, 2)) == (Mode.FULL, full[0], "least FULL key")
    for allowed in (None, {"FULL", "PIECEWISE"}):
        assert dispatch(crowded, BatchSpec(4, 3), allowed) == (
            Mode.PIECEWISE,
            BatchDescriptor(4),
            "no key of its kind and size holds so many requests",
        )
