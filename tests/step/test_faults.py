"""A capture that fails at any moment is as if it had not happened: state, pool, ring, next one."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import steps
import torch
import toys
from toys import FULL, NONE, PIECEWISE

import fngraph as fg
from fngraph.errors import CaptureError

MIXED, UNIFORM = toys.batch(3, 2, seed=1), toys.decode(3, 2, seed=2)
MOMENTS = [
    ("unpack", 0), ("unpack", 1), ("warm-up", 0), ("piece", 0), ("piece", 2), ("piece", 4),
    ("piece", 1), ("record", 0), ("record", 1), ("record", 2),
]  # fmt: skip
ERRORS: dict[str, Any] = {
    "error": ValueError,
    "interrupt": KeyboardInterrupt,
    "out of memory": torch.OutOfMemoryError,
}


def used(made: steps.Made) -> int:
    """Bytes of the pool, or of the device, in use."""
    if made.step.recorder.name == "tape":
        return sum(made.step.recorder.arena.live.values())
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(made.device)


@pytest.mark.sampled(15)
@pytest.mark.parametrize("what", ERRORS)
@pytest.mark.parametrize("moment", MOMENTS, ids=lambda m: f"{m[0]}-{m[1]}")
@pytest.mark.parametrize("fn", [toys.attend, steps.bump])
@pytest.mark.parametrize("batch", [MIXED, UNIFORM], ids=["PIECEWISE", "FULL"])
def test_nothing_is_lost(recorder_name, device, monkeypatch, fn, moment, what, batch):
    made = steps.make(recorder_name, device, fn)
    made.check(toys.batch(9, seed=3))  # a key of another size
    mode = made.step.dispatch(batch.spec).mode
    with steps.faulty_unpack(monkeypatch, made.fault):
        keys, state = made.keys, toys.clone(made.state)
        outputs = [x.clone() for x in made.step.main.outputs]
        before = used(made)
        made.fault.arm(*moment, ERRORS[what]("boom"))
        wanted = KeyboardInterrupt if what == "interrupt" else CaptureError
        try:
            made.step(made.state, toys.on(batch, device))
        except wanted as error:
            assert "boom" in str(error)
            del error
        else:
            records = {FULL: 1, PIECEWISE: 3 if fn is toys.attend else 1}[mode]
            beyond = {"piece": len(made.step.main.executable.fns), "record": records}
            cut = moment[0] == "piece" and mode is PIECEWISE and moment[1] % 2 == 1
            assert made.fault.hits == 0 and (cut or moment[1] >= beyond[moment[0]])
            return
        assert made.fault.hits == 1
        made.fault.error = None  # it holds frames, and they hold tensors
        toys.assert_trees((made.state, outputs), (state, list(made.step.main.outputs)))
        assert made.keys == keys and used(made) == before
        assert not made.step.failed and made.step.stats.steps == 1
        assert {row[:2] for row in made.step.memory.rows if row.measured} == set(keys)
        for again in (toys.batch(9, seed=4), batch, MIXED, UNIFORM):
            made.check(again)


@pytest.mark.parametrize("at", [0, 3])
def test_capture_all_that_is_interrupted_keeps_what_it_has_and_goes_on(recorder_name, device, at):
    made = steps.make(recorder_name, device)
    made.fault.arm("record", 3 * at + 1, KeyboardInterrupt("boom"))
    state = toys.clone(made.state)
    with pytest.raises(KeyboardInterrupt):
        made.step.capture_all()
    toys.assert_trees(made.state, state)
    assert len(made.step) == at
    made.step.capture_all()
    assert len(made.step) == len(made.step.table)
    for batch in (MIXED, UNIFORM):
        made.check(batch)


@pytest.mark.parametrize("batch", [MIXED, UNIFORM], ids=["PIECEWISE", "FULL"])
@pytest.mark.parametrize("at", [0, 1])
def test_a_step_that_is_interrupted_is_not_what_the_next_one_computes(
    recorder_name, device, batch, at
):
    """Before its first replay, when the device has not read the batch, or after it."""
    made = steps.make(recorder_name, device)
    made.check(batch)
    (prepared,) = made.step.main.prepared.values()
    calls = list(prepared.calls)

    def interrupt(host: Any = None) -> None:
        raise KeyboardInterrupt

    prepared.calls = [*calls[:at], (interrupt, False), *calls[at:]]
    with pytest.raises(KeyboardInterrupt):
        made.step(made.state, toys.on(batch, device))
    prepared.calls = calls
    for seed in range(5):
        made.check(toys.batch(3, 2, seed=seed))
        made.check(toys.decode(3, seed=seed))


def sync(x: torch.Tensor) -> None:
    """What no graph can hold."""
    x.sum().item()


def test_an_op_that_syncs_is_named_and_the_next_capture_works(recorder_name, device):
    made = steps.make(recorder_name, device)
    x = torch.ones(3, device=device)
    made.check(UNIFORM)
    made.fault.arm("piece", 2, lambda: sync(x), times=2)
    with pytest.raises(CaptureError):
        made.step(made.state, toys.on(MIXED, device))
    assert made.fault.hits >= 1
    made.fault.times = 0
    for batch in (MIXED, UNIFORM, MIXED):
        made.check(batch)


# --- on_failure="eager" ---------------------------------------------------------------------------


def test_a_failed_key_is_served_eagerly_and_counted(recorder_name, device):
    made = steps.make(recorder_name, device, on_failure="eager")
    made.fault.arm("piece", 2, ValueError("boom"), times=10**6)
    for batch in (MIXED, MIXED, toys.batch(3, 3, seed=5)):
        made.check(batch)
    (failed,) = made.step.failed
    assert failed == (PIECEWISE, fg.BatchDescriptor(8)) and "boom" in made.step.failed[failed]
    ((reason, times),) = made.step.stats.reasons.items()
    assert reason.startswith("capture failed: ") and "boom" in reason and times == 3
    assert {mode for _, _, mode in made.step.stats.counts} == {NONE}
    assert made.step.runs_as(MIXED.spec) == (NONE, MIXED.spec.descriptor(), reason)
    assert made.fault.hits <= 2, "it was tried again at each step"
    made.fault.times = 0
    made.step.recapture(fg.BatchDescriptor(8))
    assert not made.step.failed and made.keys == [failed]
    made.check(MIXED)
    assert made.step.stats.counts[5, 8, PIECEWISE] == 1
    assert made.step.runs_as(MIXED.spec) == made.step.dispatch(MIXED.spec)


def test_a_key_that_failed_is_tried_again_with_other_weights(recorder_name, device):
    made = steps.make(recorder_name, device, on_failure="eager")
    made.fault.arm("piece", 2, ValueError("boom"), times=10**6)
    made.check(MIXED)
    assert made.step.failed
    made.fault.times = 0
    made.step.rebind(params=toys.trees.map_leaves(torch.Tensor.double, made.params))
    assert not made.step.failed
    made.step(made.state, toys.on(MIXED, device))
    assert made.keys == [(PIECEWISE, fg.BatchDescriptor(8))]


def test_capture_all_goes_on_past_a_failed_key(recorder_name, device):
    made = steps.make(recorder_name, device, on_failure="eager")
    made.fault.arm("record", 0, ValueError("boom"), times=1)
    made.step.capture_all()
    assert len(made.step) + len(made.step.failed) == len(made.step.table)
    assert list(made.step.failed) == [(PIECEWISE, fg.BatchDescriptor(16))]
    with pytest.raises(TypeError):
        made.step.failed["x"] = "y"
    for batch in (toys.batch(9, 2), UNIFORM):
        made.check(batch)


def test_on_failure_is_checked_where_it_is_written(recorder_name, device):
    with pytest.raises(CaptureError, match=r"on_failure='ignore'.*raise.*eager"):
        fg.graphify(toys.attend, donate="cache", stage="batch", on_failure="ignore")
    made = steps.make(recorder_name, device, on_failure="raise")
    made.fault.arm("piece", 2, ValueError("boom"))
    with pytest.raises(CaptureError, match=r"PIECEWISE BatchDescriptor\(8\): .*boom"):
        made.step(made.state, toys.on(MIXED, device))
    assert not made.step.failed


def test_graphify_says_what_every_step_does(recorder_name, device):
    fast = fg.graphify(
        toys.tally_, donate="state", stage="batch", limits=toys.LIMITS, sizes=(4,),
        on_failure="eager", memory_budget=1, recorder=recorder_name,
    )  # fmt: skip
    params, state = toys.tally_params(device), toys.tally_state(device)
    want, _ = toys.bare(toys.tally_, params, state, toys.on(toys.batch(3), device))
    got, _ = fast(params, state, toys.on(toys.batch(3), device))
    torch.testing.assert_close(got, want)
    assert ["memory_budget=1" in reason for reason in fast.stats.reasons] == [True]


# --- donated leaves over a warm-up ----------------------------------------------------------------


def test_no_memory_for_the_copies_is_an_error_before_any_write(
    recorder_name, device, monkeypatch, caplog
):
    made = steps.make(recorder_name, device, steps.bump)
    state, clone = toys.clone(made.state), torch.Tensor.clone

    def too_much(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if any(x is leaf for leaf in toys.leaves(made.state)) and x.dim() == 2:
            raise torch.OutOfMemoryError("no memory")
        return clone(x, **kwargs)

    nbytes = sum(x.numel() * x.itemsize for x in toys.leaves(state))
    with monkeypatch.context() as patch, caplog.at_level("INFO", "fngraph"):
        patch.setattr(torch.Tensor, "clone", too_much)
        made.fault.arm("warm-up", 0, AssertionError("written before it was saved"))
        with pytest.raises(CaptureError, match=f"copies of 2 donated leaves, {nbytes} bytes"):
            made.step.capture_all()
    assert made.fault.hits == 0 and f"{nbytes} bytes" in caplog.text
    toys.assert_trees(made.state, state)
    made.fault.where = None
    made.step.capture_all()
    toys.assert_trees(made.state, state)
    made.check(MIXED)


def test_no_memory_for_the_copies_leaves_every_key_to_be_served_eagerly(
    recorder_name, device, monkeypatch
):
    made = steps.make(recorder_name, device, steps.bump, on_failure="eager")

    def too_much(x: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", too_much)
        made.step.capture_all()
    assert set(made.step.failed) == set(made.step.table) and not made.keys
    made.check(MIXED)
    assert "no memory for copies" in next(iter(made.step.stats.reasons))
    made.step.recapture()
    assert made.keys == list(made.step.table)


def test_donated_leaves_are_saved_once_and_one_key_of_a_kind_is_warmed(
    recorder_name, device, monkeypatch, caplog
):
    made = steps.make(recorder_name, device, steps.bump, modes="FULL", sizes=(1, 2, 3, 4, 8, 16))
    ran: list[int] = []
    warm_up = made.step.recorder.warm_up
    made.step.recorder.warm_up = lambda fn: (ran.append(made.step.main.ring.taken), warm_up(fn))
    state = toys.clone(made.state)
    with caplog.at_level("INFO", "fngraph"):
        made.step.capture_all()
    assert len(made.step) == 6
    assert len(ran) == 3  # tokens are 1, divisible by 16, neither
    assert caplog.text.count("donated leaves") == 1
    toys.assert_trees(made.state, state)
    made.step.release()
    made.step.capture_all()
    assert len(ran) == 3 and len(made.step) == 6
    for batch in (MIXED, toys.batch(16), toys.batch(1), UNIFORM):
        made.check(batch)


def test_a_key_that_only_a_warm_up_can_save_is_warmed_and_captured(recorder_name, device):
    made = steps.make(recorder_name, device, toys.attend, modes="PIECEWISE")
    made.step.recorder.lazy_kernels = True  # as on CUDA
    made.check(toys.batch(2, seed=1))
    x = torch.ones(3, device=device)
    made.fault.arm("piece", 2, lambda: sync(x), times=1)  # as an autotuner does, when first run
    made.check(MIXED)
    assert made.fault.hits == 1 and not made.step.failed
    made.fault.arm("piece", 2, lambda: sync(x), times=2)
    with pytest.raises(CaptureError):
        made.step.recapture(fg.BatchDescriptor(8))  # it has been warmed itself: no second try
    assert made.fault.hits == 1
