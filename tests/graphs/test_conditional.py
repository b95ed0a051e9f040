"""WHILE and IF nodes: what they compute, what their bodies may hold, and what is left behind."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph.errors import CaptureError
from fngraph.graphs.control import recording_control
from fngraph.graphs.cuda import conditional, setter
from fngraph.graphs.cuda.conditional import if_node, while_node
from fngraph.graphs.inside import Counts

gpu = pytest.mark.gpu
CUDA = torch.device("cuda", 0)


class Counting:
    """A loop: `n` counts its turns up to `limit`, both (1,) on the device."""

    def __init__(self) -> None:
        self.n = torch.zeros(1, dtype=torch.int64, device=CUDA)
        self.limit = torch.zeros(1, dtype=torch.int64, device=CUDA)
        self.pred = torch.zeros((), dtype=torch.bool, device=CUDA)

    def ask(self) -> None:
        self.pred.copy_((self.n < self.limit)[0])

    def turn(self, then: Callable[[], object] = lambda: None) -> None:
        self.n += 1
        then()
        self.ask()

    def loop(self, then: Callable[[], object] = lambda: None) -> None:
        self.n.zero_()
        self.ask()
        while_node(self.pred, lambda: self.turn(then))

    def counted(self, replay: Callable[[], None], limit: int) -> int:
        self.limit.fill_(limit)
        replay()
        return int(self.n)


@pytest.fixture
def recorder() -> Any:
    """A recorder of this test's own."""
    from fngraph.graphs.cuda.recorder import CudaRecorder

    return CudaRecorder(CUDA)


def plainly(fn: Callable[[], object], **options: Any) -> torch.cuda.CUDAGraph:
    """`fn` captured by torch alone."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, **options):
        fn()
    return graph


# --- turns ----------------------------------------------------------------------------------------


@gpu
def test_a_while_node_runs_as_often_as_the_device_says(recorder: Any):
    loop = Counting()
    recording, _ = recorder.record(loop.loop)
    for limit in (5, 0, 1, 0, 1000, 3):
        assert loop.counted(recording.replay, limit) == limit


@gpu
@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_in_a_capture_by_torch_alone(mode: str):
    loop = Counting()
    graph = plainly(loop.loop, capture_error_mode=mode)
    assert [loop.counted(graph.replay, limit) for limit in (3, 0, 7)] == [3, 0, 7]


@gpu
@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_an_if_node_runs_once_or_not(recorder: Any, dtype: torch.dtype):
    pred = torch.zeros((), dtype=dtype, device=CUDA)
    n = torch.zeros(1, device=CUDA)
    recording, _ = recorder.record(lambda: if_node(pred, lambda: n.add_(1)))
    seen = []
    for value in (0, 1, 0, 1, 1):
        pred.fill_(value)
        recording.replay()
        seen.append(int(n))
    assert seen == [0, 1, 1, 2, 3]


@gpu
def test_nodes_in_nodes_and_one_after_the_other(recorder: Any):
    outer, inner, last = Counting(), Counting(), Counting()
    turns = torch.zeros(2, dtype=torch.int64, device=CUDA)
    even = torch.zeros((), dtype=torch.bool, device=CUDA)

    def odd_or_even() -> None:
        turns[0:1].add_(1)
        even.copy_((inner.n % 2 == 0)[0])
        if_node(even, lambda: turns[1:2].add_(1))

    def work() -> None:
        outer.loop(lambda: inner.loop(odd_or_even))
        last.loop()

    recording, _ = recorder.record(work)
    inner.limit.fill_(5)
    last.limit.fill_(2)
    for limit in (0, 3):
        turns.zero_()
        assert outer.counted(recording.replay, limit) == limit
        assert turns.tolist() == [5 * limit, 2 * limit] and int(last.n) == 2


@gpu
def test_128_turns_in_one_launch(recorder: Any):
    loop = Counting()
    recording, _ = recorder.record(loop.loop)
    loop.limit.fill_(128)
    times = []
    for _ in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        recording.replay()
        times.append(time.perf_counter() - start)
    assert int(loop.n) == 128
    print(f"host {sorted(times)[10] * 1e6:.1f} us a launch")
    assert sorted(times)[10] < 100e-6  # 17 us were seen


# --- memory ---------------------------------------------------------------------------------------


def pools_of(tensors: list[torch.Tensor]) -> set[Any]:
    """Pools that these are in."""
    segments = torch.cuda.memory_snapshot()
    return {
        tuple(s["segment_pool_id"])
        for x in tensors
        for s in segments
        if s["address"] <= x.data_ptr() < s["address"] + s["total_size"]
    }


@gpu
def test_memory_of_a_body_is_of_the_graphs_own_pool(recorder: Any):
    loop, made = Counting(), []
    total = torch.zeros(1 << 20, device=CUDA)

    def body() -> None:
        one = torch.ones_like(total)  # 4 MB, and dead at the end of the turn
        small = one[:8] * 2
        made.append([one, small])
        total.add_(one * 3)
        total[:8].sub_(small)

    def work() -> None:
        loop.loop(body)
        made.append([total * 2])  # after the node

    recording, _ = recorder.record(work)
    found = [pools_of(tensors) for tensors in made]
    assert len(found) >= 2 and found == [{tuple(recorder.pool)}] * len(found)
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()
    others = [torch.full((1 << 20,), float("nan"), device=CUDA) for _ in range(64)]
    assert loop.counted(recording.replay, 9) == 9
    assert torch.equal(total[8:], torch.full_like(total[8:], 27)) and int(total[0]) == 9
    assert all(x.isnan().all() for x in others)  # nobody else's memory was written


@gpu
def test_a_body_of_matrix_products_is_right_beside_eager_ones(recorder: Any):
    loop = Counting()
    w = torch.randn(256, 256, device=CUDA) / 16
    x, out = torch.randn(64, 256, device=CUDA), torch.zeros(64, 256, device=CUDA)
    recorder.warm_up(lambda: torch.tanh(out @ w))

    def work() -> None:
        out.copy_(x)
        loop.loop(lambda: out.copy_(torch.tanh(out @ w)))

    recording, _ = recorder.record(work)
    want = x
    for _ in range(6):
        want = torch.tanh(want @ w)
    for _ in range(3):
        loop.counted(recording.replay, 6)
        torch.randn(512, 512, device=CUDA) @ torch.randn(512, 512, device=CUDA)
        torch.testing.assert_close(out, want)


@gpu
def test_captures_leave_nothing_behind(recorder: Any, held: Any):
    loop, inner = Counting(), Counting()
    inner.limit.fill_(2)

    def work() -> None:
        loop.loop(lambda: (torch.ones(1 << 20, device=CUDA), inner.loop()))

    def cycle(times: int) -> None:
        for _ in range(times):
            recording, _ = recorder.record(work)
            assert loop.counted(recording.replay, 2) == 2

    cycle(50)
    before = held()
    start = time.perf_counter()
    cycle(2000)
    print(f"{(time.perf_counter() - start) / 2:.2f} ms a capture of two nodes")
    held().check_flat(before)
    assert not conditional._OPEN and len(conditional._BODIES) < 10


@gpu
def test_a_pool_that_is_renewed_gives_its_bodies_memory_back(recorder: Any):
    loop = Counting()

    def work() -> None:
        loop.loop(lambda: torch.ones(64 << 20, device=CUDA))  # 256 MB

    for _ in range(3):
        gc.collect()
        recorder.renew()
        before = torch.cuda.memory_reserved()
        recording, _ = recorder.record(work)
        assert torch.cuda.memory_reserved() - before >= 256 << 20
        assert loop.counted(recording.replay, 4) == 4
        del recording
        gc.collect()
        recorder.renew()
        assert torch.cuda.memory_reserved() - before <= 8 << 20


@torch.library.custom_op("fngraph_test::doubled", mutates_args=())
def doubled(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """x * 2 ** times; times: (1,), on the device."""
    out, left = x.clone(), times.clone()
    pred = (left > 0)[0].clone()

    def turn() -> None:
        out.mul_(2)
        left.sub_(1)
        pred.copy_((left > 0)[0])

    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        while_node(pred, turn)
    else:
        while pred:
            turn()
    return out


@doubled.register_fake
def _(x: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def grow(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Rows of the weights; and a state that is doubled as often as the device says."""
    return params["w"][batch.token_ids] * 2, doubled(state, params["times"])


@gpu
def test_a_step_with_a_loop_sleeps_and_wakes():
    params = {"w": torch.ones(16, 2, device=CUDA), "times": torch.tensor([3], device=CUDA)}
    state = torch.ones(3, device=CUDA)
    example = toys.on(toys.batch(3, 2), CUDA)
    options = {"donate": 1, "stage": "batch", "limits": toys.LIMITS, "sizes": (4, 8)}
    fast = fg.graphify(grow, modes="FULL", **options)
    step = fast.bind(params).capture(state, batch=example, progress=False)
    assert "conditional" in {node.name for node in step[next(iter(step))].calls[0].nodes}
    want = 1.0
    for _ in range(3):
        for times in (3, 0, 1):
            params["times"].fill_(times)
            want *= 2.0**times
            out, state = step(state, example)
            assert torch.equal(out, torch.full_like(out, 2)) and state.tolist() == [want] * 3
        step.sleep()
        step.wake()


# --- failures -------------------------------------------------------------------------------------


def usable(recorder: Any) -> None:
    """A capture, an eager op and a replay go on as before."""
    assert not torch.cuda.is_current_stream_capturing() and not conditional._OPEN
    loop = Counting()
    recording, _ = recorder.record(loop.loop)
    assert loop.counted(recording.replay, 3) == 3
    assert int(torch.ones(3, device=CUDA).sum()) == 3


@gpu
@pytest.mark.parametrize("deep", [False, True], ids=["body", "body in body"])
def test_a_body_that_raises(recorder: Any, deep: bool):
    loop, outer = Counting(), Counting()

    def fails() -> None:
        torch.ones(1 << 20, device=CUDA)
        raise ZeroDivisionError("mine")

    def work() -> None:
        outer.loop(lambda: loop.loop(fails)) if deep else loop.loop(fails)

    for _ in range(3):
        with pytest.raises(CaptureError, match="mine") as raised:
            recorder.record(work)
        assert isinstance(raised.value.__cause__, ZeroDivisionError)
        usable(recorder)


@gpu
@pytest.mark.parametrize("deep", [False, True], ids=["body", "body in body"])
@pytest.mark.parametrize("wait", ["item", "synchronize"])
def test_a_body_that_waits_for_the_device(recorder: Any, wait: str, deep: bool):
    """Behind which the driver destroyed a node's graph twice: collected, it ended the process."""
    loop, outer = Counting(), Counting()

    def waits() -> None:
        loop.n.item() if wait == "item" else torch.cuda.synchronize()

    def work() -> None:
        outer.loop(lambda: loop.loop(waits)) if deep else loop.loop(waits)

    for watched in (True, False):
        with pytest.raises(CaptureError):
            recorder.record(work, watched=watched)
        gc.collect()
        usable(recorder)


@gpu
def test_a_body_that_breaks_what_torch_alone_captures():
    loop = Counting()
    for _ in range(3):
        with pytest.raises(RuntimeError):
            plainly(lambda: loop.loop(lambda: loop.n.item()), capture_error_mode="thread_local")
        gc.collect()
    assert loop.counted(plainly(loop.loop).replay, 3) == 3


@gpu
def test_a_body_that_forks_and_does_not_join(recorder: Any):
    loop, side = Counting(), torch.cuda.Stream()

    def forks() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            loop.n.add_(0)

    for _ in range(3):
        with pytest.raises(CaptureError, match="forked"):
            recorder.record(lambda: loop.loop(forks))
        gc.collect()
        usable(recorder)


@gpu
def test_a_body_that_forks_and_joins(recorder: Any):
    loop, side = Counting(), torch.cuda.Stream()
    twice = torch.zeros(1, dtype=torch.int64, device=CUDA)

    def forks() -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            twice.add_(loop.n * 2)
        torch.cuda.current_stream().wait_stream(side)

    recording, _ = recorder.record(lambda: (twice.zero_(), loop.loop(forks)))
    assert loop.counted(recording.replay, 4) == 4 and int(twice) == 20


@gpu
def test_a_predicate_that_is_none(recorder: Any):
    good = torch.zeros((), dtype=torch.bool, device=CUDA)
    for pred in (good.reshape(1), good.float()):
        with pytest.raises(CaptureError, match=r"must be \(\), bool or uint8"):
            recorder.record(functools.partial(while_node, pred, int))
    with pytest.raises(CaptureError, match="outside of a capture"):
        while_node(good, int)
    usable(recorder)


# --- looking inside -------------------------------------------------------------------------------


@gpu
def test_nodes_of_a_body_are_seen(recorder: Any):
    x = torch.zeros(4, device=CUDA)
    pred = torch.ones((), dtype=torch.bool, device=CUDA)

    def turn() -> None:
        x.add_(1)
        if_node(pred, lambda: x.mul_(2))

    recording, _ = recorder.record(lambda: (x.sub_(1), while_node(pred, turn), x.exp_()))
    nodes, edges = recording.nodes, recording.edges
    counts = Counts.of(nodes)
    assert counts.others == 2 and [n.name for n in nodes].count("conditional") == 2
    assert [n.name for n in nodes].count(setter.NAME) == 3  # before each, and a WHILE's last
    assert counts.kernels == 3 + 4
    inside = [i for i, node in enumerate(nodes) if node.name == "conditional"]
    assert len(edges) == len(nodes) - 3  # three graphs, each a chain
    assert all(a < b for a, b in edges) and inside[0] > 0


@gpu
def test_kernels_of_a_body_that_padding_never_runs_are_warmed_up(recorder: Any):
    loop = Counting()  # no turn until `limit` says so
    ran = []

    def work() -> None:
        control = recording_control(CUDA)
        loop.ask()
        control.while_node(loop.pred, lambda: (loop.turn(), ran.append(1)))

    recorder.warm_up(work)
    assert len(ran) == 1
    recording, _ = recorder.record(work)
    assert len(ran) in (2, 3)  # up to torch 2.13 it is tried first
    loop.n.zero_()
    assert loop.counted(recording.replay, 3) == 3
