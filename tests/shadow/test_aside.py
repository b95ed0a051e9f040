"""Verified steps compare beside those that follow: what goes on meanwhile, what waits, who is told,
and which are compared in their call."""

from __future__ import annotations

import contextvars
import gc
import os
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import planted
import pytest
import torch
import toys
from torch.overrides import TorchFunctionMode

import fngraph as fg
from fngraph.ops.triton import launching
from fngraph.shadow.verifying.aside import Aside
from fngraph.shadow.verifying.moment import SWITCHED, WRITTEN

pytestmark = pytest.mark.usefixtures("one_thread")


class Gate:
    """Bare `forward` in another thread waits here."""

    def __init__(self) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        self.look: Callable[[], Any] = lambda: None
        self.seen: list[Any] = []

    def __call__(self) -> None:
        if threading.current_thread().name == "fngraph verify":
            self.reached.set()
            assert self.opened.wait(20)
            self.seen.append(self.look())

    def opens_soon(self) -> None:
        threading.Timer(0.2, self.opened.set).start()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.opened.set()


def made(gate: Gate, verify: Any = 1.0, forward: Any = toys.tally, **options: Any) -> Any:
    """A step whose bare `forward` waits at the gate; its arguments."""

    def gated(params: Any, state: Any, batch: toys.Batch) -> Any:
        gate()
        return forward(params, state, batch)

    params, state = toys.tally_params(), toys.tally_state()
    fast = fg.graphify(
        gated, donate="state", stage="batch", sizes=(4, 8), verify=verify, recorder="tape"
    )
    options.setdefault("lazy", True)
    step = fast.bind(params).capture(state, toys.LIMITS, progress=False, **options)
    return step, params, state


def counted(step: Any) -> tuple[int, int, dict[str, int]]:
    """What has been told, without waiting for more."""
    stats = step.shared.stats
    return stats.verified, stats.differences, stats.unverified


def test_a_call_returns_before_it_is_compared(gate: Gate):
    step, _, state = made(gate)
    step(state, toys.batch(4))
    assert gate.reached.wait(20) and counted(step) == (0, 0, {})
    gate.opened.set()
    assert (step.stats.verified, step.stats.differences) == (1, 0)


def test_steps_that_are_not_due_go_on_and_the_next_one_that_is_waits(gate: Gate):
    step, _, state = made(gate, 0.2)
    while not gate.reached.wait(0.05):
        step(state, toys.batch(4))
    steps = step.shared.stats.steps
    while next(iter_calls(step)) + 1 < step._due:
        step(state, toys.batch(4))
    assert step.shared.stats.steps > steps and counted(step) == (0, 0, {})
    gate.opens_soon()
    step(state, toys.batch(4))
    assert gate.opened.is_set() and counted(step) == (1, 0, {})
    assert step.stats.verified == 2 and step.differences == ()


def iter_calls(step: Any) -> Iterator[int]:
    """How many calls there were."""
    yield int(repr(step._calls).removeprefix("count(").removesuffix(")")) - 1


def test_what_is_copied_is_nobodys_else(gate: Gate):
    """Results, state and batch change before it is compared."""
    step, _, state = made(gate)
    batch = toys.batch(4)
    out, _ = step(state, batch)
    assert gate.reached.wait(20)
    for x in (out, *state.values()):
        x.fill_(7)
    batch.token_ids.zero_()
    gate.opened.set()
    assert (step.stats.verified, step.stats.differences) == (1, 0)
    borrowing, _, state = made(gate, outputs="borrow")
    gate.opened.clear()
    borrowing(state, toys.batch(4))
    fg.Step.__call__(borrowing, state, toys.batch(4, seed=9))  # into the same outputs
    gate.opened.set()
    assert (borrowing.stats.verified, borrowing.stats.differences) == (1, 0)


# who is told


@pytest.mark.parametrize("who", ["call", "stats", "differences"])
def test_the_next_call_tells_of_a_difference_or_who_reads_it(who: str):
    fault = planted.stale_weight("tape", "cpu", verify=0.1, lazy=True)
    fault.spoil()
    step: Any = fault.step
    asked = {"call": lambda: step(fault.cache, toys.decode(2)), "stats": lambda: step.stats,
             "differences": lambda: step.differences}  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        while step._window == 0:
            step(fault.cache, toys.decode(2))
        due = next(iter_calls(step))
        step._aside.wait()
    with pytest.warns(UserWarning, match=f"call {due}, ") as told:
        asked[who]()
    assert len(told) == 1 and told[0].filename == __file__
    assert counted(step) == (1, 1, {}) and step.differences[0].call == due
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(fault.cache, toys.decode(2))


def test_what_is_an_error_is_one_of_the_very_call():
    rule = fg.Verify(1.0, on_difference="raise")
    fault = planted.stale_weight("tape", "cpu", verify=rule, lazy=True)
    fault.spoil()
    with pytest.raises(fg.errors.DifferenceError, match="call 1, "):
        fault.step(fault.cache, toys.decode(2))
    step: Any = fault.step
    assert step._aside._thread is None


def test_what_bare_forward_raises_there_is_a_reason(gate: Gate):
    step, _, state = made(gate)
    gate.opened.set()
    gate.look = lambda: 1 / 0
    step(state, toys.batch(4))
    with pytest.warns(UserWarning, match="bare forward raised ZeroDivisionError"):
        assert step.stats.verified == 0


# what it runs under

SEES: contextvars.ContextVar[int] = contextvars.ContextVar("SEES", default=0)


def surroundings() -> tuple[Any, ...]:
    """What torch keeps for this thread, and for all."""
    on = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if on else None
    inference = torch.is_inference_mode_enabled()
    return torch.is_grad_enabled(), inference, dtype, torch.get_default_dtype(), SEES.get()


@pytest.mark.parametrize(
    "under",
    [torch.enable_grad, torch.no_grad, torch.inference_mode,
     lambda: torch.autocast("cpu", torch.bfloat16)],
    ids=["grad", "no grad", "inference", "autocast"],
)  # fmt: skip
def test_bare_forward_runs_under_what_the_call_came_under(gate: Gate, under: Any):
    step, _, state = made(gate)
    gate.opened.set()
    gate.look = surroundings
    token = SEES.set(3)
    with under():
        want = surroundings()
        step(state, toys.batch(4))
    SEES.reset(token)
    assert (step.stats.verified, step.stats.differences, step.stats.unverified) == (1, 0, {})
    grad = False if "grad" not in step.main.executable.asked else want[0]
    assert gate.seen == [(grad, *want[1:])] and surroundings()[-1] == 0


def put_other(params: Any) -> None:
    params["w"] = params["w"] * 2


def write(params: Any) -> None:
    params["w"].mul_(2)


def move(params: Any) -> None:
    params["w"].data = params["w"] * 2


@pytest.mark.parametrize("change", [put_other, write, move])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_run_that_has_met_other_weights_says_nothing_and_later_ones_stay(
    gate: Gate, change: Any, when: str
):
    step, params, state = made(gate)
    step(state, toys.batch(4))
    assert gate.reached.wait(20)
    if when == "before":
        change(params)  # as the gate is within forward, it reads the new ones
    gate.opened.set()
    if when == "after":
        assert step.stats.verified == 1
        return
    with pytest.warns(UserWarning, match="held leaves were written or replaced"):
        assert step.stats.verified == 0
    assert step.stats.unverified == {WRITTEN: 1} and step.differences == ()
    if change is write:
        step(state, toys.batch(4))
        assert step._aside._thread is None and counted(step) == (1, 0, {WRITTEN: 1})


def test_so_does_one_that_has_met_another_state_of_torch(gate: Gate):
    step, _, state = made(gate)
    step(state, toys.batch(4))
    assert gate.reached.wait(20)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if before != "medium" else "high")
    gate.opened.set()
    try:
        with pytest.warns(UserWarning, match="another state of torch was set"):
            assert step.stats.unverified == {SWITCHED: 1}
    finally:
        torch.set_float32_matmul_precision(before)


class Watching(TorchFunctionMode):
    """Changes nothing."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return fn(*args, **(kwargs or {}))


def test_what_cannot_be_met_again_is_compared_in_the_call(gate: Gate):
    step, _, state = made(gate)  # the gate stays shut
    with Watching():
        step(state, toys.batch(4))
    assert counted(step) == (1, 0, {}) and not gate.reached.is_set()
    with torch.inference_mode():
        params = toys.tally_params()
    fast = fg.graphify(toys.tally, donate="state", stage="batch", sizes=(4,), verify=1.0)
    other = fast.bind(params).capture(state, toys.LIMITS, progress=False, lazy=True)
    other(state, toys.batch(4))
    assert counted(other) == (1, 0, {}) and other._aside._thread is None
    generator = torch.Generator()
    drawn = fg.graphify(lambda x: x + torch.rand(x.shape, generator=generator), stage="x",
                        generators=(generator,), verify=1.0)  # fmt: skip
    drawn(torch.zeros(3))
    noisy: Any = drawn.steps[0]
    assert counted(noisy) == (1, 0, {}) and noisy._aside._thread is None


def test_what_is_graphified_within_runs_bare_there():
    ran: list[str] = []

    def doubled(x: torch.Tensor) -> torch.Tensor:
        ran.append(threading.current_thread().name)
        return x * 2

    inner = fg.graphify(doubled, stage="x")

    def forward(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return inner(x) + w

    fast = fg.graphify(forward, stage="x", verify=1.0)
    fast(torch.ones(3), torch.ones(3))
    assert (fast.stats.verified, fast.stats.differences) == (1, 0)
    assert inner.steps == () and ran[1:] == ["fngraph verify"]


# what waits

WAITS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "rebind": lambda step, params, state: step.rebind(params=toys.tally_params()),
    "load_slot": lambda step, params, state: step.load_slot(
        0, params={name: x[0] for name, x in params.items()}
    ),
    "sleep": lambda step, params, state: step.sleep(cache=True),
    "capture_all": lambda step, params, state: step.capture_all(),
    "capture_some": lambda step, params, state: step.capture_some(0.1),
    "recapture": lambda step, params, state: step.recapture(),
    "release": lambda step, params, state: step.release(),
    "times": lambda step, params, state: step.times(next(iter(step)), 1),
    "bisect": lambda step, params, state: fg.bisect(step, toys.batch(4)),
    "log": lambda step, params, state: step.log,
    "a key's capture": lambda step, params, state: fg.Step.__call__(step, state, toys.batch(8)),
}


@pytest.mark.parametrize("what", WAITS)
def test_what_changes_what_it_reads_waits_for_it(gate: Gate, what: str):
    step, params, state = made(gate, record=3)
    step(state, toys.batch(4))
    thread = step._aside._thread
    assert gate.reached.wait(20) and thread.is_alive()
    gate.opens_soon()
    WAITS[what](step, params, state)
    assert not thread.is_alive()
    assert (step.stats.verified, step.stats.differences, step.stats.unverified) == (1, 0, {})


# how it ends


def test_a_step_that_goes_ends_its_thread(gate: Gate):
    step, _, state = made(gate)
    step(state, toys.batch(4))
    gate.reached.wait(20)
    thread, gone = step._aside._thread, weakref.ref(step)
    del step
    gc.collect()
    assert gone() is None and thread.is_alive()
    gate.opened.set()
    thread.join(20)
    assert not thread.is_alive()


SCRIPT = """
import time, threading, torch, fngraph as fg

def forward(w, x):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.5)
        print("ran to its end", flush=True)
    return x @ w

fast = fg.graphify(forward, stage="x", verify=1.0)
fast(torch.ones(3, 3), torch.ones(3, 3))
print("the call is back", flush=True)
"""


def test_an_interpreter_that_ends_waits_for_it():
    began = time.monotonic()
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=120, check=True
    )
    assert ran.stdout.split("\n")[:2] == ["the call is back", "ran to its end"], ran.stderr
    assert not ran.stderr and time.monotonic() - began < 100


ASKS = """
import torch, fngraph as fg
from fngraph.torch_facts.tracing import ONE_AT_A_TIME

def forward(w, x):
    asked.append(steps[0].stats if steps else None)
    return x @ w

asked, steps, w = [], [], torch.ones(3, 3)
fast = fg.graphify(forward, stage="x", verify=1.0)
fast(w, torch.ones(3, 3))
steps += fast.steps
assert steps[0].stats.verified == 1
with ONE_AT_A_TIME:  # as a trace has it
    fast(w, torch.ones(3, 3))
    fg.graphify(forward, stage="x").trace(w, batch=torch.ones(3, 3))
assert len(asked) >= 3 and steps[0].stats.verified == 2, (asked, steps[0].stats)
"""


def test_forward_may_ask_for_what_waits_for_it():
    ran = subprocess.run([sys.executable, "-c", ASKS], timeout=60, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


LOGGED = """
import torch, fngraph as fg
from fngraph.torch_facts.tracing import ONE_AT_A_TIME

steps = []

def plain(w, x):
    return x * w

def logged(w, x):
    return x * w + 0 * sum(step.stats.verified for step in steps)

one = fg.graphify(plain, stage="x", verify=1.0)
two = fg.graphify(logged, stage="x", verify=fg.Verify(1.0, on_difference="raise"))
w = torch.ones(3)
one(w, w), two(w, w)
steps.append(one)
with ONE_AT_A_TIME:  # so that its thread has to wait
    one(w, w), two(w, w)
print(one.stats.verified, two.stats.verified)
"""


def test_forward_may_ask_for_another_step_that_is_compared():
    """Both want to be the one `forward` that runs."""
    done = subprocess.run(
        [sys.executable, "-c", LOGGED], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "2 2\n", done.stderr


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_waits_for_bare_forward_and_its_child_can_trace(gate: Gate):
    step, _, state = made(gate)
    step(state, toys.batch(4))
    assert gate.reached.wait(20)
    gate.opens_soon()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert gate.opened.is_set()
            fg.graphify(lambda x: x + 1, stage="x")(torch.ones(2))
            code = 0 if step.stats.verified in (0, 1) else 1
        finally:
            os._exit(code)
    for _ in range(400):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            break
        time.sleep(0.05)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child waits for ever")
    assert status == 0 and step.stats.verified == 1


def test_where_no_thread_can_be_started_it_is_done_at_once(monkeypatch: pytest.MonkeyPatch):
    def start(self: Any) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", start)
    aside: Aside[int] = Aside(torch.device("cpu"))
    told: list[int] = []
    aside.begin(lambda: 3, told.append)
    assert told == [3] and aside.take() == [3] and aside.take() == []


def test_one_thread_at_a_time_interprets_kernels(monkeypatch: pytest.MonkeyPatch):
    within: list[int] = []
    most: list[int] = []

    class Kernel:
        def __getitem__(self, grid: Any) -> Any:
            return self.run

        def run(self, *args: Any) -> None:
            within.append(1)
            time.sleep(0.02)
            most.append(len(within))
            within.pop()

    module = type(sys)("kernels_of_a_test")
    module.one = Kernel()  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    call = lambda: launching._interpret(module.__name__, "one", [1], [], [], [], [], [])  # noqa: E731
    threads = [threading.Thread(target=call) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1, 1]


# on a GPU


@pytest.mark.gpu
def test_on_a_gpu_a_call_that_is_due_costs_copies_and_not_forward():
    """Bare `forward` holds the device for a second; the call, and steps behind it, do not wait."""
    params, cache = toys.attention_params(device="cuda"), toys.attention_cache(device="cuda")
    held: list[int] = []

    def forward(params: Any, cache: Any, batch: toys.Batch) -> Any:
        if threading.current_thread().name == "fngraph verify":
            torch.cuda._sleep(int(2e9))
            time.sleep(0.3)
            held.append(1)
        return toys.attend(params, cache, batch)

    fast = fg.graphify(forward, donate="cache", stage="batch", sizes=toys.SIZES)
    stage = fast.bind(params)
    step: Any = stage.capture(cache, toys.LIMITS, progress=False, verify=0.05)
    batch = toys.on(toys.decode(4), "cuda")
    for _ in range(3):  # copies and kernels have run before
        while step._aside._thread is None:
            step(cache, batch)
        assert step.stats.verified
    torch.cuda.synchronize()
    times = []
    ran = len(held)
    while step._aside._thread is None:
        began = time.perf_counter()
        step(cache, batch)
        times.append(time.perf_counter() - began)
    began = time.perf_counter()
    step(cache, batch)
    torch.cuda.current_stream().synchronize()
    behind = time.perf_counter() - began
    assert len(held) == ran and times[-1] < 0.1 and behind < 0.1, (times, behind)
    before = step.shared.stats.verified
    assert step.stats.verified == before + 1 and step.stats.differences == 0
    assert len(held) == ran + 1
