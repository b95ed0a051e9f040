"""`fngraph.core.flights.flight`: specs, written, read, and replayed against other tables."""

import pytest

from fngraph.core import (
    BatchDescriptor,
    BatchSpec,
    Flight,
    HostBounds,
    Limits,
    Log,
    Mode,
    Stats,
    build_table,
    ladders,
    plan_sizes,
)
from fngraph.errors import SpecError

FLIGHT = Flight(
    (
        BatchSpec(3, 3, 1),
        BatchSpec(3, 3, 1),
        BatchSpec(1, 1, 1),
        BatchSpec(5, 2),
        BatchSpec(9, 2, adapters=1, cascade=True, extra={"u": 2}, host=HostBounds(7)),
    )
)


def table(sizes, modes="FULL_AND_PIECEWISE"):
    return build_table(modes, ladders(sizes, (1,), 8), Limits(64, 8))


def test_replayed():
    flight = Flight((*FLIGHT.specs[:4], BatchSpec(9, 2)))
    found = flight.replay(table((2, 4, 8)))
    assert found.used == {
        (Mode.FULL, BatchDescriptor(4, 4, 1)): 2,
        (Mode.FULL, BatchDescriptor(2, 2, 1)): 1,
        (Mode.PIECEWISE, BatchDescriptor(8)): 1,
    }
    assert [(mode, key.num_tokens) for mode, key in found.unused] == [
        (Mode.PIECEWISE, 4),
        (Mode.PIECEWISE, 2),
        (Mode.FULL, 8),
    ]
    assert found.hit_rate == pytest.approx(0.8)
    assert found.stats.counts[3, 4, Mode.FULL] == 2
    assert (found.stats.padding, found.stats.tokens) == (6, 21)
    assert found.as_text() == (
        """| over the whole stream   | value  |
|-------------------------|--------|
| steps                   | 5      |
| hit rate                | 80.0%  |
| share FULL              | 60.0%  |
| share PIECEWISE         | 20.0%  |
| padded rows             | 6      |
| padded rows / true rows | 28.6%  |
| graphs used             | 3 of 6 |"""
    )


def test_allowed_holds_for_every_step():
    found = Flight(FLIGHT.specs[:4]).replay(table((2, 4, 8)), ["PIECEWISE", "NONE"])
    assert {mode for mode, _ in found.used} == {Mode.PIECEWISE} and found.hit_rate == 1.0


def test_an_empty_flight():
    found = Flight(()).replay(table((2,)))
    assert (found.hit_rate, found.stats, found.used) == (0.0, Stats(), {})
    assert len(found.unused) == 2 and "0 of 2" in found.as_text() and "0.0%" in found.as_text()
    assert Flight(()).dumps() == "" and Flight.loads("\n") == Flight(())


def test_one_token():
    text = Flight((BatchSpec(1, 1, 1),)).replay(table((2,))).as_text()
    assert "| padded rows / true rows | 100.0% |" in text


def test_histogram_feeds_the_planner():
    assert FLIGHT.histogram(1) == {3: 2, 1: 1}
    assert FLIGHT.histogram() == {5: 1, 9: 1}
    assert plan_sizes(FLIGHT.histogram(1), 2) == (1, 3)


def test_written_and_read():
    text = FLIGHT.dumps()
    assert text.splitlines() == [
        '{"num_tokens": 3, "num_reqs": 3, "query_len": 1}',
        '{"num_tokens": 3, "num_reqs": 3, "query_len": 1}',
        '{"num_tokens": 1, "num_reqs": 1, "query_len": 1}',
        '{"num_tokens": 5, "num_reqs": 2}',
        (
            '{"num_tokens": 9, "num_reqs": 2, "adapters": 1, "cascade": true, "extra": {"u": 2}, '
            '"host": [7, null]}'
        ),
    ]
    assert Flight.loads(text) == FLIGHT and type(Flight.loads(text).specs[4]) is BatchSpec
    assert type(Flight.loads(text).specs[4].host) is HostBounds
    assert Flight.loads(f"\n{text}\n\n") == FLIGHT
    assert repr(FLIGHT) == "Flight(5 steps)" and repr(Flight(FLIGHT.specs[:1])) == "Flight(1 step)"


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "Expecting property name"),
        ('{"num_tokens": 3}', "missing 1 required positional argument"),
        ('{"num_tokens": 3, "num_reqs": 4}', "has more requests than tokens"),
        ('{"num_tokens": 3, "num_reqs": 1, "tokens": 4}', "unexpected keyword argument"),
        ("[3, 1]", "list"),
    ],
)
def test_a_line_that_is_not_a_spec(line, cause):
    with pytest.raises(SpecError) as info:
        Flight.loads('{"num_tokens": 3, "num_reqs": 3}\n' + line)
    assert str(info.value).startswith(f"Line 2 of the flight is not a spec: {line!r} (")
    assert cause in str(info.value)


def test_what_is_no_table_and_no_flight_is_refused_in_a_line():
    with pytest.raises(TypeError, match="expected a DispatchTable, such as lowered"):
        FLIGHT.replay([BatchSpec(3, 3).descriptor()])  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"Log\.loads\(text\)\.flight") as info:
        Flight.loads(Log("r" * 999, ()).dumps())
    assert len(str(info.value)) < 400
