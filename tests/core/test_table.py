"""`fngraph.core.table`: keys as a value, in order, and how they are shown."""

import pickle
from dataclasses import replace

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Equal,
    Field,
    Limits,
    build_table,
    ladders,
)
from fngraph.errors import ModesError

LIMITS = Limits(64, 6)
STEPS = ladders((1, 4, 8), (1, 3), 6)


def test_dual_modes_have_no_keys_of_their_own():
    table = build_table("FULL_AND_PIECEWISE", STEPS, LIMITS)
    with pytest.raises(ModesError) as info:
        table.keys("FULL_AND_PIECEWISE")
    assert str(info.value) == (
        "FULL_AND_PIECEWISE is two modes. Ask table.keys('FULL') and table.keys('PIECEWISE')."
    )


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


def test_order_knows_the_users_fields():
    table = build_table("FULL", STEPS, LIMITS, fields=[Field("b", Equal()), Field("a", Equal())])
    keys = [
        BatchDescriptor(4, 4, extra=extra)
        for extra in ({"b": 1, "a": 2}, {"b": 1}, {"b": 2, "a": 1}, {"a": 1}, {})
    ]
    assert sorted(keys[::-1], key=table.order) == keys  # b was declared first; any comes last


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
