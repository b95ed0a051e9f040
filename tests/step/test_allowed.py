"""`step(..., allowed=)`: the modes that one call may run as; options of `capture` that are none."""

from __future__ import annotations

from typing import Any

import pytest
import steps
import torch
import toys

import fngraph as fg
from fngraph import core
from fngraph.errors import CaptureError, ModesError, SleepError, TreeError
from fngraph.graphs.staging.ring import Ring

MIXED, UNIFORM = toys.batch(3, 2, seed=1), toys.decode(2, 3, seed=2)


@pytest.mark.parametrize("allowed", ["FULL", "PIECEWISE", "NONE", ("PIECEWISE", "NONE"), None])
@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_runs_as_what_is_allowed(recorder_name, device, allowed: Any, in_place: bool):
    made = steps.make(recorder_name, device)
    step, like = made.step, toys.on(UNIFORM, device)
    mode = step.dispatch(like.spec, allowed).mode
    assert str(mode) == {None: "FULL", ("PIECEWISE", "NONE"): "PIECEWISE"}.get(allowed, allowed)
    want, _ = toys.bare(made.fn, made.params, toys.clone(made.state), like)
    batch = toys.fill(step.host_batch(like.spec), like) if in_place else like
    got, _ = step(made.state, batch, allowed=allowed)
    torch.testing.assert_close(got, want, **toys.CLOSE)
    assert step.stats.share(mode) == 1


def test_a_mode_that_covers_nothing_is_refused_and_the_batch_is_not_lost(recorder_name, device):
    made = steps.make(recorder_name, device)
    batch = toys.fill(made.step.host_batch(MIXED.spec), MIXED)
    with pytest.raises(ModesError, match="cannot run as FULL"):
        made.step(made.state, batch, allowed="FULL")
    made.step(made.state, batch)
    with pytest.raises(ModesError, match="allowed=5"):
        made.step(made.state, toys.on(MIXED, device), allowed=5)
    assert made.step.stats.share("PIECEWISE") == 1


def test_a_key_that_failed_is_not_run_eagerly_where_that_is_not_allowed(recorder_name, device):
    made = steps.make(recorder_name, device, memory_budget=1000, on_failure="eager")
    for _ in range(2):
        with pytest.raises(ModesError, match="capture failed"):
            made.step(made.state, toys.on(MIXED, device), allowed="PIECEWISE")
    with pytest.raises(ModesError, match="capture failed"):
        made.step.runs_as(MIXED.spec, "PIECEWISE")
    made.check(MIXED)
    assert made.step.stats.share("NONE") == 1


@pytest.mark.parametrize("in_place", [False, True])
def test_a_batch_runs_as_what_was_decided(recorder_name, device, in_place: bool):
    """Though a lesser key, or a graph at all, covers it as well: ranks must run alike."""
    made = steps.make(recorder_name, device)
    step, like = made.step, toys.on(UNIFORM, device)
    larger = step.dispatch(fg.BatchSpec(4, 4, query_len=1))
    assert larger.descriptor != step.dispatch(like.spec).descriptor
    joint = core.settle(
        step.table, like.spec, core.agree([core.propose(step.table, s) for s in (
            like.spec, fg.BatchSpec(4, 4, query_len=1))])[0],
    )  # fmt: skip
    eager = step.dispatch(like.spec, "NONE")
    for decision in (larger, joint, eager, larger):
        want, _ = toys.bare(made.fn, made.params, toys.clone(made.state), like)
        batch = toys.fill(step.host_batch(like.spec), like) if in_place else like
        got, _ = step(made.state, batch, allowed=decision)
        torch.testing.assert_close(got, want, **toys.CLOSE)
        assert step.dispatch(like.spec, decision) == step.runs_as(like.spec, decision) == decision
    ran = {(padded, str(mode)): n for (_, padded, mode), n in step.stats.counts.items()}
    assert ran == {(4, "FULL"): 3, (2, "NONE"): 1}
    assert "was decided beforehand" in step.explain(like.spec, larger).as_text()


@pytest.mark.parametrize("decided", ["runs_as", "larger", "FULL", "PIECEWISE", "NONE"])
def test_a_host_batch_is_read_where_it_is_if_the_key_reads_it_so(
    recorder_name, device, decided: str, monkeypatch
):
    """Padding offsets of a uniform key go on in its steps, others stay."""
    made = steps.make(recorder_name, device)
    step = made.step
    step.capture_all()
    larger = step.dispatch(fg.BatchSpec(4, 4, query_len=1))
    allowed = {"runs_as": step.runs_as(UNIFORM.spec), "larger": larger}.get(decided, decided)
    copied = []
    put = Ring.put
    monkeypatch.setattr(Ring, "put", lambda *args: copied.append(1) or put(*args))
    for _ in range(6):
        want, after = toys.bare(
            made.fn, made.params, toys.clone(made.state), toys.on(UNIFORM, device)
        )
        got, made.state = step(
            made.state, toys.fill(step.host_batch(UNIFORM.spec), UNIFORM), allowed=allowed
        )
        toys.assert_trees((got, made.state), (want, after), **toys.CLOSE)
    assert len(copied) == (6 if decided == "PIECEWISE" else 0)


def test_a_decision_that_the_step_cannot_keep_is_refused(recorder_name, device):
    made = steps.make(recorder_name, device)
    step, two = made.step, toys.on(UNIFORM, device)
    foreign = step.dispatch(two.spec)._replace(descriptor=fg.BatchDescriptor(3, 3, query_len=1))
    for decision, says in (
        (foreign, r"as FULL BatchDescriptor\(3, 3, query_len=1\), which is no key of Dispatch"),
        (step.dispatch(fg.BatchSpec(1, 1, query_len=1)), "num_tokens is 1 there and 2 here"),
        (step.dispatch(MIXED.spec, "NONE"), "eagerly by a decision for other counts"),
    ):
        with pytest.raises(ModesError, match=f"{says}.*step.dispatch\\(spec\\)"):
            step(made.state, two, allowed=decision)
    assert not step.stats.steps
    made = steps.make(recorder_name, device, memory_budget=1000, on_failure="eager")
    with pytest.raises(ModesError, match=r"capture failed: .*Decide for step\.runs_as"):
        made.step(made.state, two, allowed=made.step.dispatch(two.spec))


def test_an_argument_of_forwards_own_may_have_that_name():
    step = fg.graphify(lambda w, allowed: allowed @ w, stage="allowed", recorder="tape")
    x, w = torch.ones(2, 3), torch.ones(3, 3)
    made = step.bind(w).capture(batch=x, progress=False)
    assert made(allowed=x).tolist() == made(x).tolist() == (x @ w).tolist()


@pytest.mark.parametrize(
    "options, error, says",
    [
        ({"output": "borrow"}, TypeError, "no option 'output'. Did you mean 'outputs'"),
        ({"memory_budgt": 1}, TypeError, "Did you mean 'memory_budget'"),
        ({"outputs": "borow"}, TreeError, "outputs='borow'"),
        ({"outputs": ""}, TreeError, "outputs=''"),
        ({"recorder": ""}, CaptureError, "recorder=''"),
    ],
)
def test_options_of_capture_that_mean_nothing(options: Any, error: Any, says: str):
    fast = fg.graphify(lambda w, x: x @ w, stage="x", recorder="tape")
    with pytest.raises(error, match=says.replace(".", r"\.")):
        fast.bind(torch.ones(3, 3)).capture(batch=torch.ones(2, 3), progress=False, **options)


def test_a_leaf_that_takes_another_shape_asleep_wakes_nothing():
    """It would be a step with new buffers, over a cache that has no memory."""

    def widened(params: Any, cache: Any, batch: toys.Batch) -> Any:
        out, cache = toys.attend(params, cache, batch)
        return out * float(params["head"].shape[1]), cache

    params, cache = toys.attention_params(), toys.attention_cache()
    fast = fg.graphify(widened, donate="cache", stage="batch", sizes=toys.SIZES, recorder="tape")
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False)
    keys, head = len(step), params["head"].data
    step.sleep(cache=True)
    params["head"].data = torch.randn(toys.E, toys.V + 1)
    with pytest.raises(SleepError):
        step.rebind(params=params)
    params["head"].data = head
    step.wake()
    assert len(step) == keys and cache[0][0].untyped_storage().nbytes()
    step(cache, MIXED)
