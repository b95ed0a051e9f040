"""Each planted fault is found by 1% of 500 steps, and bisect names its op and the user's line."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import planted
import pytest
import toys

import fngraph as fg

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.sampled(3)
@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda fault: fault.__name__)
def test_a_fault_is_found_within_500_steps_and_its_line_is_named(
    fault: Callable[..., planted.Planted], recorder_name: str, device: Any
):
    made = fault(recorder_name, device, verify=0.01)
    made.spoil()
    calls = 0
    with pytest.warns(UserWarning, match="and bare .* differ") as told:
        for batch in planted.traffic(500):
            made.step(made.cache, toys.on(batch, device))
            calls += 1
            if made.step.stats.differences:
                break
    assert calls <= 500 and made.step.stats.verified <= 5
    assert len(told) == 1 and "fg.bisect(step, step.differences[0])" in str(told[0].message)
    (difference,) = made.step.differences
    assert difference.call == calls and difference.leaves
    found = fg.bisect(made.step, difference)
    assert (found.kind, found.op, found.line) == (made.kind, made.op, made.line)
    assert made.says in found.what
    text = str(found)
    assert made.op in text and made.line in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it looks, and says nothing else
        assert str(fg.bisect(made.step, difference)) == text  # and leaves all as it was
