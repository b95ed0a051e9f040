"""`fngraph.core.stats`: counts, shares, and the table."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Limits,
    Mode,
    Stats,
    build_table,
    dispatch,
    ladders,
)

TABLE = build_table("FULL_AND_PIECEWISE", ladders((2, 4), (1,), 4), Limits(64, 4))
SPECS = [BatchSpec(3, 3, 1)] * 3 + [BatchSpec(3, 2)] * 2 + [BatchSpec(9, 1), BatchSpec(8, 2)]
EAGER = (
    "FULL keys are for uniform batches of query_len 1; "
    "PIECEWISE keys for such batches end at 4 tokens"
)


def observed(specs=SPECS):
    stats = Stats()
    for spec in specs:
        stats.observe(spec.num_tokens, dispatch(TABLE, spec))
    return stats


def test_counts_and_shares():
    stats = observed()
    assert stats.counts == {
        (3, 4, Mode.FULL): 3,
        (3, 4, Mode.PIECEWISE): 2,
        (9, 9, Mode.NONE): 1,
        (8, 8, Mode.NONE): 1,
    }
    assert stats.reasons == {EAGER: 2}
    assert (stats.steps, stats.tokens, stats.padding) == (7, 32, 5)
    shares = [stats.share(mode) for mode in (Mode.FULL, "piecewise", "NONE")]
    assert shares == pytest.approx([3 / 7, 2 / 7, 2 / 7])
    assert repr(stats) == "Stats(7 steps: FULL 43%, PIECEWISE 29%, NONE 29%)"


def test_nothing_observed():
    assert Stats().share("FULL") == 0.0
    assert (Stats().steps, Stats().tokens, Stats().padding, Stats().rows()) == (0, 0, 0, ())
    assert repr(Stats()) == "Stats(0 steps: FULL 0%, PIECEWISE 0%, NONE 0%)"
    assert Stats().as_text() == (
        "| tokens | padded | padding | mode | count |\n|--------|--------|---------|------|-------|"
    )


def test_rows_by_falling_count_then_tokens():
    assert observed().rows() == (
        (3, 4, Mode.FULL, 3),
        (3, 4, Mode.PIECEWISE, 2),
        (8, 8, Mode.NONE, 1),
        (9, 9, Mode.NONE, 1),
    )
    stats = Stats({(2, 8, Mode.FULL): 1, (2, 4, Mode.FULL): 1, (1, 8, Mode.FULL): 1})
    assert [row[:2] for row in stats.rows()] == [(1, 8), (2, 4), (2, 8)]


def test_text_has_a_header_and_reasons():
    assert (
        observed().as_text("FULL_AND_PIECEWISE", (1, 2, 4))
        == f"""modes: FULL_AND_PIECEWISE
sizes: 1, 2, 4

| tokens | padded | padding | mode      | count |
|-------:|-------:|--------:|-----------|------:|
|      3 |      4 |       1 | FULL      |     3 |
|      3 |      4 |       1 | PIECEWISE |     2 |
|      8 |      8 |       0 | NONE      |     1 |
|      9 |      9 |       0 | NONE      |     1 |

| eager because {" " * 83} | count |
|{"-" * 99}|------:|
| {EAGER} |     2 |"""
    )
    assert observed(SPECS[:1]).as_text(modes=Mode.FULL).startswith("modes: FULL\n\n| tokens")
    assert observed(SPECS[:1]).as_text(sizes=(1, 2)).startswith("sizes: 1, 2\n\n| tokens")


def test_reasons_by_falling_count_then_by_name():
    text = Stats(reasons={"b": 1, "a": 1, "c": 2}).as_text()
    assert [line.split()[1] for line in text.splitlines()[-3:]] == ["c", "a", "b"]


def test_arithmetic_makes_new_values():
    before = observed()
    snapshot = before.copy()
    assert snapshot == before
    before.observe(3, dispatch(TABLE, BatchSpec(3, 2)))
    before.observe(7, dispatch(TABLE, BatchSpec(7, 2)))
    assert snapshot != before and snapshot == observed()
    assert (before - snapshot).counts == {(3, 4, Mode.PIECEWISE): 1, (7, 7, Mode.NONE): 1}
    assert (before - snapshot).reasons == {EAGER: 1}
    both = snapshot + (before - snapshot)
    assert both == before and both.steps == 9 and both.reasons == {EAGER: 3}
    assert snapshot == observed(), "operands stay as they were"
    assert Stats(reasons={"a": 1}) != Stats() != 3
    with pytest.raises(TypeError, match="unhashable"):
        hash(before)


def test_a_copy_shares_nothing():
    counts = {(1, 1, Mode.FULL): 1}
    stats = Stats(counts)
    counts.clear()
    assert stats.steps == 1


def test_stats_with_captures_add_and_subtract():
    a, b = Stats(), Stats()
    key = BatchDescriptor(8)
    a.observe_capture(Mode.FULL, key, 1500)
    a.observe_capture(Mode.FULL, key, 500, in_step=True)
    b.observe_capture(Mode.FULL, key, 700)
    both = a + b
    assert both.captures == {(Mode.FULL, key, False): (2, 2200), (Mode.FULL, key, True): (1, 500)}
    assert both - a == b and both - b == a and both != a
    assert Stats() + a == a == a - Stats()
    assert (both - both) == Stats() and both.captures[Mode.FULL, key, False].ms == 2.2
    kept = a.copy()
    a.observe_capture(Mode.FULL, key, 1)
    assert kept != a and kept.captures[Mode.FULL, key, False].times == 1


def test_captures_slowest_first():
    stats = Stats()
    stats.observe_capture(Mode.FULL, BatchDescriptor(8, 8, 1), 1500)
    stats.observe_capture(Mode.PIECEWISE, BatchDescriptor(8), 2000, in_step=True)
    stats.observe_capture(Mode.PIECEWISE, BatchDescriptor(8), 149, in_step=True)
    assert (
        stats.as_text().partition("\n\n")[2]
        == """\
| captured  | key                                | when      | times |  ms |
|-----------|------------------------------------|-----------|------:|----:|
| PIECEWISE | BatchDescriptor(8)                 | in a step |     2 | 2.1 |
| FULL      | BatchDescriptor(8, 8, query_len=1) | ahead     |     1 | 1.5 |"""
    )
