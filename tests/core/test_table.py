"""`fngraph.core.table`, `build` and `arrange`: which keys exist, and how they are shown."""

import pickle
from dataclasses import replace

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    DispatchTable,
    Equal,
    Field,
    Ladders,
    Limits,
    Mode,
    build_table,
    dispatch,
    dispatch_by_definition,
    ladders,
)
from fngraph.errors import ModesError, SizesError, SpecError

LIMITS = Limits(64, 6)
STEPS = ladders((1, 4, 8), (1, 3), 6)
FULL_UNIFORM = [(8, 3), (6, 1), (6, 3), (4, 1), (3, 3), (1, 1)]  # (tokens, query_len)


def counts(keys):
    return [key[:3] for key in keys]


UNIFORM = [(6, 6, 1), (6, 2, 3), (4, 4, 1), (3, 1, 3), (1, 1, 1)]
MIXED = [(8, 6, None), (4, 4, None), (1, 1, None)]
ANY = [(8, None, None), (4, None, None), (1, None, None)]


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


def test_capture_order_is_tokens_then_adapters_falling():
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, adapters=(0, 2, 3))
    for keys in (table.full, table.piecewise):
        order = [(key.num_tokens, key.adapters) for key in keys]
        assert order == sorted(order, reverse=True)
    assert len(table.full) == 15 and len(table.piecewise) == 9


def test_order_knows_the_users_fields():
    table = build_table("FULL", STEPS, LIMITS, fields=[Field("b", Equal()), Field("a", Equal())])
    keys = [
        BatchDescriptor(4, 4, extra=extra)
        for extra in ({"b": 1, "a": 2}, {"b": 1}, {"b": 2, "a": 1}, {"a": 1}, {})
    ]
    assert sorted(keys[::-1], key=table.order) == keys  # b was declared first; any comes last


def test_limits_are_kept():
    assert build_table("FULL", STEPS, LIMITS).limits is LIMITS


def test_one_number_of_adapters_is_the_most_that_a_batch_uses():
    table = build_table("FULL", STEPS, LIMITS, adapters=4)
    assert table.adapters.captured == (0, 1, 2, 4, 5)
    assert build_table("FULL", STEPS, LIMITS, adapters=0) == build_table("FULL", STEPS, LIMITS)


def test_dual_modes_have_no_keys_of_their_own():
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS)
    with pytest.raises(ModesError) as info:
        table.keys("FULL_AND_PIECEWISE")
    assert str(info.value) == (
        "FULL_AND_PIECEWISE is two modes. Ask table.keys('FULL') and table.keys('PIECEWISE')."
    )


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


def test_bad_adapters():
    with pytest.raises(SpecError, match="needs ascending, distinct counts"):
        build_table("FULL", STEPS, LIMITS, adapters=(1, 0))
    with pytest.raises(SpecError, match="overflow='x' is unknown"):
        build_table("FULL", STEPS, LIMITS, overflow="x")


def test_repr_and_text():
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, adapters=iter((0, 2)))
    assert repr(table) == (
        "DispatchTable(FULL_AND_PIECEWISE: 6 PIECEWISE keys of 1..8, 10 FULL keys of 1..6)"
    )
    assert (
        table.as_text()
        == f"""{table!r}

| mode      | batches         | adapters | keys | tokens  |
|-----------|-----------------|---------:|-----:|---------|
| PIECEWISE | mixed           |        2 |    3 | 1, 4, 8 |
| PIECEWISE | mixed           |        0 |    3 | 1, 4, 8 |
| FULL      | uniform, 1 each |        2 |    3 | 1, 4, 6 |
| FULL      | uniform, 3 each |        2 |    2 | 3, 6    |
| FULL      | uniform, 1 each |        0 |    3 | 1, 4, 6 |
| FULL      | uniform, 3 each |        0 |    2 | 3, 6    |"""
    )
    assert str(table) == repr(table)


def test_text_shows_user_defined_fields():
    fields = [Field("b", Equal(), full=(1, 2)), Field("a", Equal(), full=(3,))]
    table = build_table("FULL_DECODE_ONLY", ladders((2,), (1,), 6), LIMITS, fields=fields)
    assert table.as_text().splitlines()[2:] == [
        "| mode | batches         | adapters | extra    | keys | tokens |",
        "|------|-----------------|---------:|----------|-----:|-------:|",
        "| FULL | uniform, 1 each |        0 | a=3, b=1 |    1 |      2 |",
        "| FULL | uniform, 1 each |        0 | a=3, b=2 |    1 |      2 |",
    ]


def test_one_key():
    table = build_table("FULL_DECODE_ONLY", ladders((2,), (1,), 6), LIMITS)
    assert repr(table) == "DispatchTable(FULL_DECODE_ONLY: 1 FULL key of 2..2)"


def test_tables_are_values():
    one = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, adapters=(0, 1))
    two = build_table("full_and_piecewise", STEPS, Limits(64, 6), adapters=[0, 1])
    assert one == two == pickle.loads(pickle.dumps(one)) and hash(one) == hash(two)
    assert one.plan_hash == two.plan_hash == pickle.loads(pickle.dumps(one)).plan_hash
    for value, name in (
        (one, "modes"),
        (one.lookup, "top"),
        (STEPS, "mixed"),
        (one.adapters, "captured"),
    ):
        with pytest.raises(AttributeError):
            setattr(value, name, None)


def test_values_take_no_other_attributes():
    table = build_table("FULL", STEPS, LIMITS)
    for value in (
        table,
        table.lookup,
        table.adapters,
        LIMITS,
        STEPS,
        BatchSpec(1, 1),
        table.full[0],
    ):
        assert not hasattr(value, "__dict__"), type(value)


def test_plan_hash_tells_tables_apart_that_decide_differently():
    def table(modes="FULL_AND_PIECEWISE", sizes=(1, 4, 8), limits=LIMITS, **options):
        return build_table(modes, ladders(sizes, (1,), 6), limits, **options)

    tables = [
        table(),
        table("FULL"),
        table("PIECEWISE"),
        table(sizes=(1, 4)),
        table(adapters=(0, 1)),
        table(adapters=(0, 1), overflow="clamp"),
        table(fields=[Field("a", Equal())]),
        table(fields=[Field("a", Equal(), default=1)]),
        table(fields=[Field("b", Equal())]),
        table(cost=lambda key: key.num_tokens),
        table(cost=lambda key: -key.num_tokens),
    ]
    hashes = [one.plan_hash for one in tables]
    assert len(set(hashes)) == len(hashes)
    assert all(len(one) == 16 and int(one, 16) >= 0 for one in hashes)
    assert table(limits=Limits(4096, 6)).plan_hash == hashes[0]  # dispatch knows no limits


def test_order_is_cost_tokens_then_fields_constrained_first():
    table = build_table("FULL", STEPS, LIMITS, own_uniform=True)
    keys = [
        BatchDescriptor(4, 2, 2),
        BatchDescriptor(4, 4, 1),
        BatchDescriptor(4, 4, 1, 2),
        BatchDescriptor(4, 4, None),
        BatchDescriptor(4, 4, None, 0, True),
        BatchDescriptor(4, 4, None, 0, None),
        BatchDescriptor(4, None, 1),
        BatchDescriptor(4),
        BatchDescriptor(5, 1, 5),
    ]
    assert sorted(keys[::-1], key=table.order) == keys
    costly = replace(table, cost=lambda key: -key.num_tokens)
    assert min(keys, key=costly.order) == keys[-1]


@pytest.mark.parametrize("captured", [(0, 3, 70, 200), (65,), (64,), (0,)])
@pytest.mark.parametrize("overflow", ["eager", "clamp"])
def test_large_adapter_counts_are_rounded_like_small_ones(captured, overflow):
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS, captured, overflow=overflow)
    assert table.adapters.captured == captured
    for count in (0, 1, 3, 4, 63, 64, 65, 66, 70, 71, 199, 200, 201, 1000):
        for counts in ((4, 4, 1), (4, 2, None), (4, 2, 2), (9, 9, 1)):
            spec = BatchSpec(*counts, adapters=count)
            assert dispatch(table, spec)[:2] == dispatch_by_definition(table, spec)


def test_reasons_of_a_table_by_hand():
    fields = build_table("FULL", STEPS, LIMITS, adapters=(0, 1)).fields
    full = (BatchDescriptor(4, 4, 1), BatchDescriptor(4, 4, adapters=1))
    table = DispatchTable(Mode.FULL, full, (), LIMITS, fields)
    answer = dispatch(table, BatchSpec(3, 2))
    assert answer.reason == "FULL keys are for uniform batches of query_len 1"


def test_keys_may_be_any_not_only_what_build_table_makes():
    fields = build_table("FULL", STEPS, LIMITS).fields
    full = (BatchDescriptor(8, 2), BatchDescriptor(6, 4), BatchDescriptor(4, 1))
    table = DispatchTable(Mode.FULL, full, (), LIMITS, fields)
    for tokens in range(1, 10):
        for reqs in range(1, tokens + 1):
            spec = BatchSpec(tokens, reqs)
            assert dispatch(table, spec)[:2] == dispatch_by_definition(table, spec)
    assert dispatch(table, BatchSpec(3, 2)).descriptor == BatchDescriptor(6, 4)
    assert dispatch(table, BatchSpec(8, 3)) == (
        Mode.NONE,
        BatchSpec(8, 3).descriptor(),
        "no key of its kind and size holds so many requests",
    )
