"""`fngraph.core.build`: which keys exist."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Ladders,
    Limits,
    Mode,
    RoundedTo,
    adapter_counts,
    build_table,
    dispatch,
    ladders,
    resolve,
)
from fngraph.errors import SizesError, SpecError

LIMITS = Limits(64, 6)
STEPS = ladders((1, 4, 8), (1, 3), 6)
UNIFORM = [(6, 6, 1), (6, 2, 3), (4, 4, 1), (3, 1, 3), (1, 1, 1)]
MIXED = [(8, 6, None), (4, 4, None), (1, 1, None)]
ANY = [(8, None, None), (4, None, None), (1, None, None)]


def counts(keys):
    return [key[:3] for key in keys]


@pytest.mark.parametrize(
    ("modes", "own_uniform", "full", "piecewise"),
    [
        ("NONE", False, [], []),
        ("PIECEWISE", False, [], ANY),
        ("PIECEWISE", True, [], ANY),
        ("FULL", False, MIXED, []),
        ("FULL", True, [MIXED[0], *UNIFORM[:3], MIXED[1], *UNIFORM[3:], MIXED[2]], []),
        ("FULL_DECODE_ONLY", False, UNIFORM, []),
        ("FULL_AND_PIECEWISE", False, UNIFORM, ANY),
        ("FULL_AND_PIECEWISE", True, UNIFORM, ANY),
    ],
)
def test_kinds_of_keys(modes, own_uniform, full, piecewise):
    table = build_table(modes, STEPS, LIMITS, own_uniform=own_uniform)
    assert sorted(counts(table.keys("FULL")), key=str) == sorted(full, key=str)
    assert counts(table.keys(Mode.PIECEWISE)) == piecewise
    assert table.keys(Mode.NONE) == ()
    assert all(key[3:] == (0, False, False, ()) for key in table.full)
    assert all(key[3:] == (0, None, None, ()) for key in table.piecewise)
    assert len(table) == len(full) + len(piecewise)
    assert list(table) == [(Mode.PIECEWISE, key) for key in table.piecewise] + [
        (Mode.FULL, key) for key in table.full
    ]
    assert table.top == max([0, *(key.num_tokens for _, key in table)])


def test_keys_of_mixed_batches_may_hold_fewer_requests_than_come():
    for modes, kept in (("FULL", [(8, 3, None), (4, 3, None), (1, 1, None)]), ("PIECEWISE", None)):
        table = build_table(modes, STEPS, LIMITS, key_reqs=3)
        assert counts(table.keys(modes)) == (kept or [(8, 3, None), (4, 3, None), (1, 1, None)])
        assert dispatch(table, BatchSpec(6, 3)).mode is Mode.parse(modes)
        assert dispatch(table, BatchSpec(6, 4)).mode is Mode.NONE
        assert all(key[3:] == table.keys(modes)[0][3:] for _, key in table)
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, key_reqs=99)
    assert counts(table.full) == UNIFORM and counts(table.piecewise)[0] == (8, 6, None)
    assert dispatch(table, BatchSpec(6, 6, cascade=True)).mode is Mode.PIECEWISE
    with pytest.raises(SizesError, match=r"key_reqs=0 holds no request\. Pass key_reqs=1"):
        build_table("FULL", STEPS, LIMITS, key_reqs=0)


def test_mixed_batches_may_have_keys_for_several_numbers_of_requests():
    for modes in ("FULL", "PIECEWISE"):
        table = build_table(modes, STEPS, LIMITS, key_reqs=(1, 3, 5))
        assert counts(table.keys(modes)) == [
            (8, 5, None), (8, 3, None), (8, 1, None), (4, 4, None), (4, 3, None), (4, 1, None),
            (1, 1, None),
        ]  # fmt: skip
        for reqs, held in ((1, 1), (2, 3), (3, 3), (4, 5), (5, 5)):
            assert dispatch(table, BatchSpec(6, reqs)).descriptor[:2] == (8, held)
        assert dispatch(table, BatchSpec(6, 6)).mode is Mode.NONE
    assert (
        build_table("FULL", STEPS, LIMITS, key_reqs=[99]).full
        == build_table("FULL", STEPS, LIMITS).full
    )
    for wrong in ((), (3, 0)):
        with pytest.raises(SizesError, match="holds no request"):
            build_table("FULL", STEPS, LIMITS, key_reqs=wrong)


def test_capture_order_is_tokens_then_adapters_falling():
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, adapters=(0, 2, 3))
    for keys in (table.full, table.piecewise):
        order = [(key.num_tokens, key.adapters) for key in keys]
        assert order == sorted(order, reverse=True)
    assert len(table.full) == 15 and len(table.piecewise) == 9


def test_limits_are_kept():
    assert build_table("FULL", STEPS, LIMITS).limits is LIMITS


def test_one_number_of_adapters_is_the_most_that_a_batch_uses():
    table = build_table("FULL", STEPS, LIMITS, adapters=4)
    assert table.adapters.captured == (0, 1, 2, 4, 5)
    assert build_table("FULL", STEPS, LIMITS, adapters=0) == build_table("FULL", STEPS, LIMITS)


def test_bad_adapters():
    with pytest.raises(SpecError, match="needs ascending, distinct counts"):
        build_table("FULL", STEPS, LIMITS, adapters=(1, 0))
    with pytest.raises(SpecError, match="overflow='x' is unknown"):
        build_table("FULL", STEPS, LIMITS, overflow="x")


@pytest.mark.parametrize(
    ("steps", "message"),
    [
        (Ladders((1, 65)), "Size 65 is beyond Limits(max_tokens=64)"),
        (Ladders(()), "The ladder is empty."),
        (
            Ladders((1,), ((3, (3, 4)),)),
            (
                "Uniform size 4 is not a multiple of query_len=3. "
                "Make the ladders with ladders(sizes, query_lens, limits.max_reqs)."
            ),
        ),
        (Ladders((1,), ((1, (7,)),)), "Uniform size 7 is above 6 times query_len=1."),
        (Ladders((1,), ((1, (4, 2)),)), "The ladder is not ascending"),
        (Ladders((1,), ((30, (90,)),)), "Size 90 is beyond Limits(max_tokens=64)"),
    ],
)
def test_bad_ladders(steps, message):
    with pytest.raises(SizesError) as info:
        build_table("FULL_AND_PIECEWISE", steps, LIMITS)
    assert message in str(info.value)


def test_uniform_sizes_reach_exactly_max_reqs():
    table = build_table("FULL_DECODE_ONLY", Ladders((18,), ((3, (18,)), (5, ()))), LIMITS)
    assert table.full == (BatchDescriptor(18, 6, 3),)


def test_nothing_captured_needs_no_ladder():
    table = build_table("NONE", Ladders(), LIMITS)
    assert dispatch(table, BatchSpec(1, 1)) == (
        Mode.NONE,
        BatchSpec(1, 1).descriptor(),
        "no key exists",
    )
    assert repr(table) == "DispatchTable(NONE: no keys)"


@pytest.mark.parametrize(
    ("most", "powers", "without", "counts"),
    [
        (0, False, True, (0,)),
        (0, True, False, (0,)),
        (1, True, True, (0, 1, 2)),
        (4, False, True, (0, 5)),
        (4, True, True, (0, 1, 2, 4, 5)),
        (5, True, True, (0, 1, 2, 4, 6)),
        (3, True, True, (0, 1, 2, 4)),
        (4, False, False, (5,)),
        (4, True, False, (1, 2, 4, 5)),
    ],
)
def test_adapter_counts(most, powers, without, counts):
    assert adapter_counts(most, powers=powers, without=without) == counts
    RoundedTo(counts)


@pytest.mark.parametrize("modes", Mode)
def test_a_table_of_what_was_resolved(modes):
    resolution = resolve(modes, limits=LIMITS, query_lens=(1, 3))
    want = build_table(resolution.modes, resolution.sizes, LIMITS)
    for table in (build_table(resolution, LIMITS), build_table(resolution, limits=LIMITS)):
        assert list(table) == list(want) and table.limits == LIMITS and table.modes is modes
    options = {"adapters": (0, 2)}
    assert list(build_table(resolution, LIMITS, **options)) == list(
        build_table(resolution.modes, resolution.sizes, LIMITS, **options)
    )


@pytest.mark.parametrize("args", [("FULL", LIMITS), ("FULL", STEPS), (resolve("FULL"),)])
def test_a_table_of_what_is_no_ladder(args):
    with pytest.raises(SizesError, match=r"build_table\(resolution, limits\)"):
        build_table(*args)


def test_adapter_counts_by_default():
    assert adapter_counts(4) == (0, 5)


def test_adapter_counts_are_not_negative():
    with pytest.raises(SpecError) as info:
        adapter_counts(-1)
    assert str(info.value) == "max_adapters=-1 is negative. Pass 0 where there are none."
