"""`verify=`: which steps run twice, what that leaves as it was, what it counts, and what it costs a
step that is not asked for it: nothing."""

from __future__ import annotations

import dataclasses
import dis
import itertools
import sys
import threading
import time
import warnings
from typing import Any

import planted
import pytest
import torch
import toys
from torch import Tensor

import fngraph as fg
from fngraph.core import Stats
from fngraph.shadow.compared import compare
from fngraph.shadow.verifying import comparing
from fngraph.shadow.verifying.share import verified_in
from fngraph.step import call
from fngraph.step.step import Step

pytestmark = pytest.mark.usefixtures("one_thread")


def made(forward: Any = toys.attend, recorder: str = "tape", device: Any = "cpu", **options: Any):
    """A step of attention, and its cache."""
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(forward, donate="cache", stage="batch", sizes=toys.SIZES, recorder=recorder)
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False, lazy=True, **options)
    return step, cache


# which steps


@pytest.mark.parametrize("share", [1.0, 0.5, 0.3, 0.01, 1e-3, 7 / 9])
def test_each_window_has_one_step_and_all_windows_have_every_step(share: float):
    last = 0
    for window in range(2000):
        start, stop = int(window / share), int((window + 1) / share)
        assert start == last and start < verified_in(window, share) <= stop
        last = stop
    found = [verified_in(window, share) for window in range(2000)]
    assert found == sorted(set(found)) == [verified_in(window, share) for window in range(2000)]
    assert max(b - a for a, b in itertools.pairwise(found)) < 2 / share + 1


def test_no_phase_of_periodic_traffic_is_left_out():
    phases = {verified_in(window, 0.01) % 100 for window in range(1000)}
    assert len(phases) > 95


def test_the_share_of_the_calls_is_verified_and_the_same_ones_again():
    ran = []
    for _ in range(2):
        step, cache = made(verify=0.1)
        for batch in planted.traffic(100):
            step(cache, batch)
        ran.append((step.stats.verified, step.stats.differences, step.stats.steps))
    assert ran == [(10, 0, 100)] * 2


def test_calls_of_several_threads_have_their_turns_and_later_ones_too():
    """Calls are due while another thread has the pool, and get it in any order: none is left out,
    nor are later ones."""
    step, cache = made(verify=1.0)
    batch = toys.decode(2)
    with step.turn.lock:
        waiting = [threading.Thread(target=step, args=(cache, batch)) for _ in range(3)]
        for thread in waiting:
            thread.start()
        while repr(step._calls) != "count(4)":  # each has its number
            time.sleep(0.001)
    for thread in waiting:
        thread.join()
    for _ in range(3):
        step(cache, batch)
    assert (step.stats.steps, step.stats.verified) == (6, 6)


# what a step that is not verified has to do with it


def frames(fn: Any) -> list[str]:
    """The Python functions that a call runs through."""
    found: list[str] = []
    sys.setprofile(lambda frame, event, arg: event == "call" and found.append(
        f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}"
    ))  # fmt: skip
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


def test_a_step_without_it_has_no_frame_of_it_and_no_code():
    step, cache = made()
    assert type(step) is Step and step.differences == ()
    batch = toys.decode(4)
    step(cache, batch)
    plain = frames(lambda: step(cache, batch))
    assert "fngraph.step.step.__call__" in plain
    assert not [name for name in plain if "shadow" in name]
    words = ("verif", "shadow", "differ")
    for fn in (Step.__call__, call.spec_of, call.leaves_of, call.results_of):
        names = {one.argval for one in dis.get_instructions(fn) if isinstance(one.argval, str)}
        assert not [name for name in names if any(word in name for word in words)]


def test_a_step_whose_turn_it_is_not_has_one_frame_more():
    plain, cache = made()
    asked, other = made(verify=1e-9)
    batch = toys.decode(4)
    plain(cache, batch), asked(other, batch)
    extra = frames(lambda: asked(other, batch))
    assert extra[1:].count("fngraph.shadow.verified.__call__") == 1
    extra.remove("fngraph.shadow.verified.__call__")
    assert extra[1:] == frames(lambda: plain(cache, batch))[1:]


# what it leaves as it was


def test_results_and_state_are_those_of_a_step_that_is_not_verified(
    recorder_name: str, device: Any
):
    plain, cache = made(recorder=recorder_name, device=device)
    asked, other = made(recorder=recorder_name, device=device, verify=1.0)
    for batch in planted.traffic(8):
        batch = toys.on(batch, device)
        toys.assert_trees(asked(other, batch), plain(cache, batch))
    assert asked.stats.verified == 8 and asked.stats.differences == 0
    assert asked.stats.counts == plain.stats.counts


def test_borrowed_and_guarded_results_are_the_callers_still(recorder_name: str, device: Any):
    asked, cache = made(
        recorder=recorder_name, device=device, verify=1.0, outputs="borrow", guards=True
    )
    one = toys.on(toys.decode(3), device)
    first, _ = asked(cache, one)
    kept = first.clone()
    second, _ = asked(cache, one)
    assert torch.equal(kept, second + 0)
    with pytest.raises(fg.errors.StaleError):
        first + 1
    assert asked.stats.verified == 2 and asked.stats.differences == 0


def test_a_batch_in_the_ring_is_read_before_the_slot_is_another_ones(
    recorder_name: str, device: Any
):
    asked, cache = made(recorder=recorder_name, device=device, verify=1.0)
    for i in range(12):
        like = toys.decode(3, seed=i)
        asked(cache, toys.fill(asked.host_batch(like.spec), like))
    assert asked.stats.verified == 12 and asked.stats.differences == 0


@fg.struct
class Changed(toys.Batch):
    """Block tables that come by changed rows."""

    token_ids: Tensor = fg.buffer("T", "int64")
    slot_mapping: Tensor = fg.buffer("T", "int64", pad=-1)
    seq_lens: Tensor = fg.buffer("R", "int32", pad=0)
    query_start_loc: Tensor = fg.buffer("R + 1", "int32", pad="stride")
    block_tables: Tensor = fg.buffer("R B", "int32", pad=0, rows="changed")
    spec: fg.BatchSpec = fg.host()


def changed_rows(params: Any, cache: Any, batch: Changed) -> Any:
    """`attend`."""
    return toys.attend(params, cache, batch)


def test_changed_rows_are_read_as_the_whole_leaf_that_they_make(recorder_name: str, device: Any):
    asked, cache = made(changed_rows, recorder=recorder_name, device=device, verify=1.0)
    like = toys.decode(3)
    fields = {name: getattr(like, name) for name in fg.core.buffers_of(toys.Batch)}
    asked(cache, Changed(**fields, spec=like.spec))
    fields["block_tables"] = fg.ChangedRows(
        torch.tensor([1]), torch.tensor([[9, 10, 11]], dtype=torch.int32)
    )
    fields["slot_mapping"] = torch.tensor([3, 39, 27])
    fields["token_ids"] = (like.token_ids + 1) % toys.V  # or the old row would hold the same
    asked(cache, Changed(**fields, spec=like.spec))
    assert asked.stats.verified == 2 and asked.stats.differences == 0


def test_generators_go_on_as_without_it_and_draw_the_same_twice(recorder_name: str, device: Any):
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        return x * w + torch.rand(x.shape, generator=generator, device=x.device)

    drawn = []
    for share in (0.0, 1.0):
        generator = torch.Generator(device).manual_seed(3)
        fast = fg.graphify(noisy, stage="x", generators=(generator,), verify=share)
        w = torch.ones(3, device=device)
        drawn.append([fast(w, torch.zeros(2, 3, device=device)) for _ in range(3)])
    assert fast.stats.verified == 3 and fast.stats.differences == 0
    toys.assert_trees(drawn[1], drawn[0])


def test_generators_go_on_where_bare_forward_fails_before_a_draw():
    def noisy(w: Tensor, x: Tensor) -> Tensor:
        if fails and len(drawn):
            raise ValueError("no more")
        return x * w + torch.rand(x.shape, generator=generator)

    states, w = [], torch.ones(3)
    for fails in (False, True):
        generator, drawn = torch.Generator().manual_seed(3), []  # type: ignore[var-annotated]
        fast = fg.graphify(noisy, stage="x", generators=(generator,), verify=1.0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for _ in range(3):
                drawn.append(fast(w, torch.zeros(2, 3)))
                generator.set_state(generator.get_state())
        states.append((generator.get_state(), torch.cat(drawn)))
        assert bool(fast.stats.unverified) is fails
    toys.assert_trees(states[1], states[0])


def test_draws_of_a_padded_key_are_refused_with_the_reason(recorder_name: str, device: Any):
    def noisy(params: Any, cache: Any, batch: toys.Batch) -> Any:
        x = params["embed"][batch.token_ids]
        return x + torch.rand(x.shape, generator=generator, device=x.device), cache

    generator = torch.Generator(device).manual_seed(3)
    params, cache = toys.attention_params(device=device), toys.attention_cache(device=device)
    fast = fg.graphify(
        noisy, donate="cache", stage="batch", generators=(generator,), sizes=(4,), verify=1.0
    )
    step = fast.bind(params).capture(cache, toys.LIMITS, progress=False, recorder=recorder_name)
    with pytest.warns(UserWarning, match="a key draws for its padding too") as told:
        for _ in range(2):
            step(cache, toys.on(toys.batch(3), device))
    assert len(told) == 1 and sum(step.stats.unverified.values()) == 2
    step(cache, toys.on(toys.decode(4), device))
    assert (step.stats.verified, step.stats.differences) == (1, 0)


# what it counts and says


def test_what_bare_forward_raises_is_counted_and_said_once():
    step, cache = made(verify=1.0)
    step(cache, toys.decode(2))
    assert step.stats.verified == 1  # it has been compared
    raised = dataclasses.replace(step.main.executable.args.signature, fn=broken)
    args = dataclasses.replace(step.main.executable.args, signature=raised)
    step.main.executable = dataclasses.replace(step.main.executable, args=args)
    with pytest.warns(UserWarning, match="bare forward raised ValueError: no more") as told:
        step(cache, toys.decode(2)), step(cache, toys.decode(2))
        assert step.stats.verified == 1
    assert len(told) == 1
    assert step.stats.unverified == {"bare forward raised ValueError: no more": 2}
    assert step.stats.verified == 1
    assert "not run: bare forward raised ValueError: no more" in step.stats.as_text()


def broken(params: Any, cache: Any, batch: toys.Batch) -> Any:
    """Of another kind than it was."""
    raise ValueError("no more")


def test_a_difference_can_be_an_error_that_has_it():
    fault = planted.stale_weight(
        "tape", "cpu", verify=fg.Verify(1.0, on_difference="raise", keep=1), lazy=True
    )
    fault.step(fault.cache, toys.decode(2))
    fault.spoil()
    for _ in range(2):
        with pytest.raises(fg.errors.DifferenceError, match=r"output\[0\]\[") as caught:
            fault.step(fault.cache, toys.decode(2))
        assert isinstance(caught.value.difference, fg.Difference)
    assert len(fault.step.differences) == 1 and fault.step.stats.differences == 2


def test_tolerances_are_the_callers():
    cases = ((1.0, 0), ({torch.float32: 1.0}, 0), ({torch.float16: 1.0}, 1), (1e-9, 1))
    for within, found in cases:
        fault = planted.stale_weight("tape", "cpu", verify=fg.Verify(1.0, within), lazy=True)
        fault.spoil()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fault.step(fault.cache, toys.decode(2))
            assert fault.step.stats.differences == found, within


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mask", ["inf", "least", -1e4, 1e4])
@pytest.mark.parametrize("whole_rows", [False, True])
def test_a_wrong_number_beside_what_a_mask_has_written_is_wrong(
    dtype: torch.dtype, mask: Any, whole_rows: bool
):
    want = torch.linspace(-2, 2, 4 * 32).view(4, 32).to(dtype)
    fill = {"inf": -torch.inf, "least": torch.finfo(dtype).min}.get(mask, mask)
    want[:, 20:] = fill
    if whole_rows:
        want[2:] = fill
    got = want.clone()
    assert not compare([("x", got, want)], {}, exact=False)
    got[1, 3] += 1
    (found,) = compare([("x", got, want)], {}, exact=False)
    assert found.at == (1, 3) and 0.3 < found.error < 2
    got = want.clone()
    got[3, 30] = 1.0  # not masked
    (found,) = compare([("x", got, want)], {}, exact=False)
    assert found.at == (3, 30) and found.error > 0.4


def test_dtypes_of_a_byte_are_a_step_apart_and_integers_are_not():
    want = torch.tensor([[1.0, 2.0, 3.0, 4.0]]).to(torch.float8_e4m3fn)
    near, far = (torch.tensor([[1.0, 2.0, 3.0, x]]).to(want.dtype) for x in (4.5, 5.0))
    assert not compare([("x", near, want)], {}, exact=False)
    (found,) = compare([("x", far, want)], {}, exact=False)
    assert (found.at, found.error) == ((0, 3), 0.25)
    (found,) = compare([("n", torch.tensor([1, 2]), torch.tensor([1, 3]))], {}, exact=False)
    assert (found.at, found.error, found.elements) == ((1,), float("inf"), 1)


def rewritten(params: Any, state: Any, batch: toys.Batch) -> Any:
    x_TE = params["w"][batch.token_ids]
    return torch.nn.functional.silu(x_TE) * (x_TE + 1), {"n": state["n"] + 1}


@pytest.mark.parametrize(("passes", "bits"), [((), True), (("silu_mul",), False)])
def test_no_bits_are_claimed_of_what_a_pass_has_rewritten(passes: Any, bits: bool):
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    fast = fg.graphify(
        rewritten, donate="state", stage="batch", sizes=(4,), passes=passes, verify=1.0
    )
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False)
    step(state, toys.decode(4))
    assert any(step.main.executable.matches.values()) is not bits
    (prepared,) = step.main.prepared.values()
    assert comparing.claims_bits(step.main, prepared) is bits


def graded(params: Any, state: Any, batch: toys.Batch) -> Any:
    """What asks for gradients has them or not."""
    by = 2 if torch.is_grad_enabled() else 3
    return params["w"][batch.token_ids] * by, {"n": state["n"] + 1}


def test_what_asks_whether_gradients_are_on_is_asked_under_the_callers_mode():
    params, state = toys.tally_params(), {"n": torch.zeros(1)}
    fast = fg.graphify(graded, donate="state", stage="batch", sizes=(4,), verify=1.0)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False, lazy=True)
    for mode in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with mode():
            step(state, toys.batch(3))
    assert (step.stats.verified, step.stats.differences) == (3, 0)


def test_one_bit_is_a_difference_where_bits_are_claimed(recorder_name: str, device: Any):
    """No padding, no primitive, nothing compiled: the lowest bit counts; in a padded key it is
    within the tolerance."""
    params, state = toys.tally_params(device), toys.tally_state(device)
    fast = fg.graphify(toys.tally, donate="state", stage="batch", sizes=(4,))
    stage = fast.trace(params, state, limits=toys.LIMITS).split().lower().compile()
    fns = (planted.flipped(stage.executable.fns[0], 0, element=9), *stage.executable.fns[1:])
    step = planted.with_executable(stage, fns=fns).capture(
        params, state, recorder=recorder_name, verify=1.0, lazy=True
    )
    step(state, toys.on(toys.batch(3), device))
    assert step.stats.differences == 0
    with pytest.warns(UserWarning, match="asked: every bit"):
        step(state, toys.on(toys.decode(4), device))
        assert step.differences
    found = fg.bisect(step, step.differences[0])
    assert found.kind == "program"
    assert found.line == planted.line('x_TE = params["w"][batch.token_ids] * seen_V')


@fg.struct
class Ids:
    """Padding has row 0."""

    ids: Tensor = fg.buffer("T", "int64", pad=0)
    spec: fg.BatchSpec = fg.host()


def test_rows_that_are_kept_for_padding_are_not_compared(recorder_name: str, device: Any):
    def forward(w: Tensor, seen: Tensor, batch: Ids) -> Any:
        return w[batch.ids].tanh(), seen.index_put((batch.ids,), batch.ids + 7)

    w, seen = torch.randn(5, 3, device=device), torch.zeros(5, dtype=torch.int64, device=device)
    fast = fg.graphify(forward, donate="seen", stage="batch", sizes=(4,), verify=1.0)
    step = fast.bind(w).capture(seen, fg.Limits(8, 4), progress=False, recorder=recorder_name)
    step(seen, Ids(ids=torch.tensor([1, 2, 3], device=device), spec=fg.BatchSpec(3, 1)))
    assert seen.tolist() == [7, 8, 9, 10, 0]  # row 0 is padding's
    assert (step.stats.verified, step.stats.differences) == (1, 0)


@pytest.mark.parametrize(
    "given, said",
    [(2, "a share of the steps is 0 to 1"), (-1e-3, "0 to 1"), ("all", "0 to 1"), (True, "0 to 1"),
     (dict(share=0.1, on_difference="print"), '"warn" or "raise"'),
     (dict(share=0.1, within={torch.float32: -1}), "numbers from 0 on"),
     (dict(share=0.1, within={"float32": 1e-2}), "by dtype, {torch.bfloat16"),
     (dict(share=0.1, keep=None), "a number of differences"),
     (dict(share=0.1, keep=True), "a number of differences")],
)  # fmt: skip
def test_what_means_nothing_is_refused(given: Any, said: str):
    with pytest.raises(TypeError, match=said):
        fg.graphify(
            toys.attend, donate="cache", stage="batch",
            verify=fg.Verify(**given) if isinstance(given, dict) else given,
        )  # fmt: skip


def test_tolerances_are_as_they_were_given():
    within = {torch.float32: 1e-3}
    verify = fg.Verify(0.1, within)
    within.clear()
    assert verify.by_dtype == {torch.float32: 1e-3}


def test_stats_of_verified_steps_add_up():
    one = Stats(verified=3, differences=1, unverified={"a": 2})
    other = Stats(verified=2, unverified={"a": 1, "b": 1})
    both = one + other
    assert (both.verified, both.differences, both.unverified) == (5, 1, {"a": 3, "b": 1})
    assert both - other == one and one.copy() == one
    text = both.as_text()
    assert "| the same                       |     4 |" in text and "| not run: b" in text


def test_the_difference_is_kept_with_what_it_takes_to_run_it_again():
    fault = planted.one_bit("tape", "cpu", verify=fg.Verify(1.0, keep=3), lazy=True)
    batch = toys.decode(2)
    with pytest.warns(UserWarning, match="differ"):
        fault.step(fault.cache, batch)
        (kept,) = fault.step.differences
    was = batch.token_ids.clone()
    batch.token_ids.zero_()  # the caller's to refill
    assert was.any() and torch.equal(kept.saved.leaves[0], was)
    assert kept.saved.spec == toys.decode(2).spec and kept.ran.mode is toys.FULL
    assert kept.saved.nbytes < 10_000 and "call 1, BatchSpec" in repr(kept)
    assert comparing.is_padded(fault.step.main, fault.step.main.prepare(kept.saved.spec)) is False
