"""`record=`: what `step.log` has of the last steps, and that recording changes nothing."""

from __future__ import annotations

from typing import Any

import planted
import pytest
import toys

import fngraph as fg

pytestmark = pytest.mark.usefixtures("one_thread")


def made(recorder: str, device: Any, **options: Any) -> Any:
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(toys.attend, donate="cache", stage="batch", sizes=toys.SIZES)
    step = fast.bind(params).capture(
        cache, toys.LIMITS, progress=False, lazy=True, recorder=recorder, **options
    )
    return step, cache


def test_the_log_has_the_last_steps_with_what_each_was(recorder_name: str, device: Any):
    step, cache = made(recorder_name, device, record=6, verify=0.5)
    batches = [toys.on(batch, device) for batch in planted.traffic(8)]
    for batch in batches:
        step(cache, batch)
    step(cache, batches[0], allowed=["NONE"])
    log = step.log
    assert [one.spec for one in log.steps[:-1]] == [batch.spec for batch in batches[3:]]
    for one in log.steps[:-1]:
        ran = step.dispatch(one.spec)
        assert (one.mode, one.padded, one.reason) == (ran.mode, ran.descriptor[0], ran.reason)
        assert one.key.split()[:1] == [ran.mode.name] and one.host > 0
        assert (one.device is not None) == (recorder_name == "cuda")
    assert (log.steps[-1].mode, log.steps[-1].key) == (toys.NONE, "")
    assert [one.at for one in log.steps] == sorted(one.at for one in log.steps)
    assert log.steps[0].at == 0 and sum(n for *_, n in log.counted) == 9
    assert log.verified == (step.stats.verified, 0) and step.stats.verified >= 4
    taken = [key for key in log.keys if key.measured is not None]
    assert len(taken) == len(step) and all(key.captured > 0 and key.in_step for key in taken)


def test_parts_of_a_key_come_with_its_times(recorder_name: str, device: Any):
    step, cache = made(recorder_name, device, record=2)
    step(cache, toys.on(toys.batch(5), device))
    (descriptor,) = step
    times = step.times(descriptor, repeats=2)
    assert len(times.paced) == len(times.rows)
    (key,) = [key for key in step.log.keys if key.parts]
    assert [part.name for part in key.parts] == [name for name, _ in times.rows]
    eager = [part.name for part in key.parts if part.is_eager]
    assert eager == ["attention 0", "attention 1"] and all(part.gap >= 0 for part in key.parts)
    assert fg.core.Log.loads(step.log.dumps()) == step.log


def test_results_are_as_without(recorder_name: str, device: Any):
    step, cache = made(recorder_name, device, record=3)
    plain, other = made(recorder_name, device)
    for batch in planted.traffic(6):
        batch = toys.on(batch, device)
        toys.assert_trees(step(cache, batch), plain(other, batch))
    with pytest.raises(fg.errors.TreeError, match=r"capture\(\.\.\., record=1000\)"):
        plain.log  # noqa: B018


@pytest.mark.parametrize("record", [-1, "all", True, 1.5])
def test_what_is_no_number_of_steps_is_refused(record: Any):
    with pytest.raises(TypeError, match="how many of the last steps"):
        fg.graphify(toys.attend, donate="cache", stage="batch", record=record)


def test_an_argument_of_forwards_own_may_be_named_as_the_steps():
    """So `allowed=` is what `forward` takes, and says nothing of modes."""
    own = lambda p, allowed, b: toys.tally(p, allowed, b)  # noqa: E731
    fast = fg.graphify(own, donate="allowed", stage="b", modes="FULL", sizes=toys.SIZES)
    params, state = toys.tally_params(), toys.tally_state()
    lowered = fast.trace(params, state, batch=toys.batch(3), limits=toys.LIMITS).split().lower()
    step = lowered.compile().capture(
        params, state, recorder="tape", lazy=True, record=3, verify=1.0
    )
    for n in (1, 3):
        step(b=toys.batch(n), allowed=state)
    assert (step.stats.verified, step.differences) == (2, ())
    assert [one.mode for one in step.log.steps] == [toys.FULL, toys.FULL]
