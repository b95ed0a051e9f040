"""`fngraph.core.explanation`: every other key, and what ruled it out."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Equal,
    Field,
    Limits,
    Mode,
    build_table,
    dispatch,
    explain,
    ladders,
)
from fngraph.errors import ModesError


def table(modes="FULL_AND_PIECEWISE", **options):
    return build_table(modes, ladders((2, 4), (1,), 4), Limits(64, 4), **options)


def reasons(explanation):
    return {
        (str(other.mode), *other.descriptor[:2]): (other.field, other.why)
        for other in explanation.others
    }


def test_each_field_says_what_ruled_a_key_out():
    found = explain(table(adapters=(0, 1)), BatchSpec(3, 3, 1))
    assert found.chosen == dispatch(table(adapters=(0, 1)), BatchSpec(3, 3, 1))
    lines = [(*other[:2], other.field, other.why) for other in found.others]
    assert lines == [
        (Mode.FULL, BatchDescriptor(2, 2, 1), "num_tokens", "num_tokens: 2 is less than 3"),
        (
            Mode.FULL,
            BatchDescriptor(2, 2, 1, 1),
            "num_tokens",
            "num_tokens: 2 is less than 3",
        ),
        (
            Mode.FULL,
            BatchDescriptor(4, 4, 1, 1),
            "adapters",
            "adapters: 0 is rounded to 0, not 1",
        ),
        (Mode.PIECEWISE, BatchDescriptor(2), "num_tokens", "num_tokens: 2 is less than 3"),
        (
            Mode.PIECEWISE,
            BatchDescriptor(2, adapters=1),
            "num_tokens",
            "num_tokens: 2 is less than 3",
        ),
        (Mode.PIECEWISE, BatchDescriptor(4), None, "covers it, but FULL is stronger"),
        (
            Mode.PIECEWISE,
            BatchDescriptor(4, adapters=1),
            "adapters",
            "adapters: 0 is rounded to 0, not 1",
        ),
    ]


@pytest.mark.parametrize(
    ("spec", "key", "field", "why"),
    [
        (BatchSpec(3, 2), ("FULL", 4, 4), "query_len", "query_len: 1 is not None"),
        (BatchSpec(4, 2, 2), ("FULL", 4, 4), "query_len", "query_len: 1 is not 2"),
        (BatchSpec(2, 2, 1, 0, True), ("FULL", 2, 2), "cascade", "cascade: False is not True"),
        (
            BatchSpec(2, 2, 1, 0, False, True),
            ("FULL", 2, 2),
            "encoder_outputs",
            "encoder_outputs: False is not True",
        ),
        (
            BatchSpec(2, 2, 1, 3),
            ("FULL", 2, 2),
            "adapters",
            "adapters: 3 is rounded to None, not 0",
        ),
        (
            BatchSpec(1, 1, 1),
            ("FULL", 4, 4),
            None,
            "covers it, but BatchDescriptor(2, 2, query_len=1) is less",
        ),
    ],
)
def test_one_reason(spec, key, field, why):
    assert reasons(explain(table(), spec))[key] == (field, why)


def test_requests_and_users_fields():
    full = build_table("FULL", ladders((2, 8), (1,), 4), Limits(64, 4))
    assert reasons(explain(full, BatchSpec(7, 5)))["FULL", 8, 4] == (
        "num_reqs",
        "num_reqs: 4 is less than 5",
    )
    added = table("FULL_DECODE_ONLY", fields=[Field("ubatches", Equal(), 1, full=(1, 2))])
    assert [other[2:] for other in explain(added, BatchSpec(4, 4, 1)).others[-1:]] == [
        ("ubatches", "ubatches: 2 is not 1")
    ]


def test_what_is_not_allowed():
    found = explain(table(), BatchSpec(2, 2, 1), allowed=["PIECEWISE", "NONE"])
    assert found.chosen.mode is Mode.PIECEWISE
    assert reasons(found)["FULL", 2, 2] == (None, "covers it, but FULL is not allowed")
    eager = explain(table(), BatchSpec(2, 2, 1), allowed=["NONE"])
    assert len(eager.others) == 4
    with pytest.raises(ModesError):
        explain(table(), BatchSpec(9, 9), allowed=["FULL"])
    larger = dispatch(table(), BatchSpec(4, 4, 1))
    decided = explain(table(), BatchSpec(2, 2, 1), allowed=larger)
    assert decided.chosen == larger
    assert reasons(decided)["PIECEWISE", 4, None] == reasons(decided)["FULL", 2, 2] == (
        None, "covers it, but FULL BatchDescriptor(4, 4, query_len=1) was decided beforehand"
    )  # fmt: skip


def test_text():
    assert str(explain(table(), BatchSpec(3, 2))) == (
        """BatchSpec(num_tokens=3, num_reqs=2)
-> PIECEWISE BatchDescriptor(4), 1 padding token: FULL keys are for uniform batches of query_len 1

| mode      | not this key                       | because                      |
|-----------|------------------------------------|------------------------------|
| FULL      | BatchDescriptor(2, 2, query_len=1) | num_tokens: 2 is less than 3 |
| FULL      | BatchDescriptor(4, 4, query_len=1) | query_len: 1 is not None     |
| PIECEWISE | BatchDescriptor(2)                 | num_tokens: 2 is less than 3 |"""
    )
    found = explain(table("NONE"), BatchSpec(3, 2))
    assert (
        str(found)
        == found.as_text()
        == ("BatchSpec(num_tokens=3, num_reqs=2)\n-> NONE BatchDescriptor(3, 2): no key exists")
    )


def test_every_key_is_chosen_or_explained():
    one = table(adapters=(0, 1))
    for tokens in range(1, 6):
        for adapters in range(3):
            found = explain(one, BatchSpec(tokens, tokens, 1, adapters))
            hit = found.chosen.mode is not Mode.NONE
            assert len(found.others) + hit == len(one)
            assert len({other[:2] for other in found.others}) == len(found.others)


def test_runs_of_keys_that_are_out_for_one_reason_are_one_line():
    many = build_table("FULL_AND_PIECEWISE", ladders(range(1, 33), (1,), 4), Limits(64, 4))
    found = explain(many, BatchSpec(30, 3))
    lines = found.folded()
    assert (
        "PIECEWISE", "BatchDescriptor(1) to BatchDescriptor(29), 29 keys",
        "num_tokens: 1..29 is less than 30",
    ) in lines  # fmt: skip
    assert ("PIECEWISE", "BatchDescriptor(31)", "covers it, but BatchDescriptor(30) is less") in (
        lines
    )  # a run of two is told one by one
    assert len(lines) < 10 < len(found.others) == 35
    assert "29 keys" in str(found) and "<td" in found._repr_html_()
