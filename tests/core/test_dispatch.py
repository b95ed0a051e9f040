"""`fngraph.core.dispatch`: chosen examples. test_dispatch_properties.py enumerates the rest."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Limits,
    Mode,
    build_table,
    default_sizes,
    dispatch,
    ladders,
)
from fngraph.errors import ModesError, SpecError

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
    assert dispatch(BOTH, spec)[:2] == (mode, key)


def test_two_requests_of_three_tokens_go_to_nine_not_to_piecewise_eight():
    table = table_of("FULL_AND_PIECEWISE", [1, 8, 16], query_lens=(1, 2, 3, 4))
    assert dispatch(table, BatchSpec(6, 2, query_len=3))[:2] == (
        Mode.FULL,
        BatchDescriptor(9, 3, query_len=3),
    )


def test_allowed_narrows_and_names_are_enough():
    spec = BatchSpec(37, 37, query_len=1)
    assert dispatch(BOTH, spec, ["PIECEWISE", "NONE"]).mode is Mode.PIECEWISE
    assert dispatch(BOTH, spec, {Mode.NONE})[:2] == (Mode.NONE, spec.descriptor())
    with pytest.raises(ModesError, match="cannot run as FULL"):
        dispatch(BOTH, BatchSpec(37, 5), ["FULL"])


def test_unknown_field_is_refused():
    with pytest.raises(SpecError, match="'ubatches'"):
        dispatch(BOTH, BatchSpec(4, 4, extra={"ubatches": 2}))
