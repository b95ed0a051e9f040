"""Memory of keys: estimated before capture, measured after, kept under a budget."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import steps
import torch
import toys
from torch import Tensor
from toys import FULL, NONE, PIECEWISE

import fngraph as fg
from fngraph import stages
from fngraph.core import BatchDescriptor
from fngraph.core.memory import GRAPH_BYTES, NODE_BYTES, Bytes
from fngraph.errors import CaptureError
from fngraph.graphs.cuda.recorder import CudaRecorder
from fngraph.graphs.recorder import CHUNK, Usage

MB = 1 << 20
LIMITS = fg.Limits(max_tokens=64, max_reqs=8)


@fg.struct
class Ids:
    ids: Tensor = fg.buffer("T", "int64")
    spec: fg.BatchSpec = fg.host()


def batch(n: int, device: Any = "cpu") -> Ids:
    """n tokens of one request."""
    return Ids(ids=torch.arange(n, device=device) % 5, spec=fg.BatchSpec(n, 1))


def wide(params: Any, batch: Ids) -> Tensor:
    """Four intermediates of 64 KB a token, two of them alive at once, and a small result."""
    x = params[batch.ids]
    for _ in range(3):
        x = x * 2
    return x.sum(1)


def lowered(fn: Any = wide, width: int = 1 << 14, sizes: Any = (1, 16, 64)) -> Any:
    params = torch.ones(5, width)
    made = fg.graphify(fn, stage="batch", modes="FULL", sizes=sizes, limits=LIMITS)
    return made.trace(params).split().lower(), params


def capture(recorder_name: str, device: Any, **options: Any) -> Any:
    low, params = lowered()
    if recorder_name == "cuda":
        made = fg.graphify(wide, stage="batch", modes="FULL", sizes=(1, 16, 64), limits=LIMITS)
        params = params.to(device)
        low = made.trace(params).split().lower()
    return low.compile().capture(params, recorder=recorder_name, **options)


def key(n: int) -> BatchDescriptor:
    return BatchDescriptor(n, min(n, 8))


# --- the estimate ---------------------------------------------------------------------------------


def test_the_estimate_is_the_peak_of_live_intermediates():
    low, _ = lowered()
    for n in (1, 16, 64):
        pool, graph = low.estimate(FULL, key(n))
        assert pool == 2 * n * 4 * (1 << 14)
        assert graph == GRAPH_BYTES + NODE_BYTES * (5 + 1 + 1)  # ops, unpack, one result


def test_views_take_nothing_and_results_live_on():
    def viewed(params: Any, batch: Ids) -> tuple[Tensor, Tensor]:
        x = params[batch.ids]
        y = x.view(-1, 2).t()[0].unsqueeze(0)
        x.mul_(2)
        return x, y + 1

    low, _ = lowered(viewed)
    assert low.estimate(FULL, key(16)).pool == 16 * 4 * (1 << 14) * 3 // 2


def test_the_estimate_goes_across_cuts():
    params, cache = toys.attention_params(), toys.attention_cache()
    fast = fg.graphify(
        toys.attend, modes="FULL_AND_PIECEWISE", donate="cache", stage="batch",
        sizes=toys.SIZES, limits=toys.LIMITS,
    )  # fmt: skip
    low = fast.trace(fg.like(params), fg.like(cache)).split().lower()
    piecewise = low.estimate(PIECEWISE, BatchDescriptor(16))
    full = low.estimate(FULL, BatchDescriptor(4, 4, 1))
    assert piecewise.graph - full.graph == 2 * GRAPH_BYTES - 2 * NODE_BYTES
    # (T, 16) of q, k, v; (T, 8) of attention's output and of the rows that go around it
    assert 16 * (16 + 8 + 8) * 4 <= piecewise.pool <= 16 * (16 + 8 + 8 + 16) * 4 + 512
    assert low.memory.estimated == max(r.estimated.pool for r in low.memory.rows) + sum(
        r.estimated.graph for r in low.memory.rows
    )


def test_the_tape_takes_what_was_estimated():
    step = capture("tape", "cpu")
    biggest = step.memory.rows[0].estimated.pool
    first, *rest = step.memory.rows
    assert biggest <= first.measured.pool <= biggest + 2 * MB
    assert all(row.measured.pool == 0 for row in rest)
    for row in step.memory.rows:
        assert abs(row.measured.graph - row.estimated.graph) <= 2 * NODE_BYTES


@pytest.mark.gpu
def test_the_device_takes_what_was_estimated():
    step = capture("cuda", "cuda")
    biggest = step.memory.rows[0].estimated.pool
    first, *rest = step.memory.rows
    assert biggest <= first.measured.pool <= 2 * biggest + 24 * MB
    assert sum(row.measured.pool for row in rest) <= 4 * MB
    graphs = [row.measured.graph for row in step.memory.rows]
    assert all(0 <= nbytes <= CHUNK for nbytes in graphs)
    assert step.memory.total - step.memory.pool == sum(graphs)


def test_the_table_prints_and_adds_up(recorder_name, device):
    step = capture(recorder_name, device, lazy=True)
    step(batch(3, device))
    step(batch(3, device))
    table = step.memory
    assert [row.last_used for row in table.rows] == [None, 2, None]
    (row,) = [r for r in table.rows if r.measured]
    assert row.key == key(16) and table.total == table.pool + row.measured.graph
    text = table.as_text()
    assert "| FULL | BatchDescriptor(64, 8) |" in text and "1 of 3 keys" in text


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_last_used_counts_calls_alone(recorder_name, device, modes):
    """Neither captures, with their warm-ups, nor measurements; steps without graphs too."""
    made = steps.make(recorder_name, device, modes=modes, sizes=(2, 4, 8), lazy=False)
    step, used = made.step, lambda: {r.key.num_tokens: r.last_used for r in made.step.memory.rows}
    assert set(used().values()) == {0}
    made.check(toys.batch(2))
    largest = step.memory.rows[0].key
    step.times(largest)
    step(made.state, toys.on(toys.batch(2), device), allowed=("NONE",))
    step.recapture(largest)
    assert used() == {8: 0, 4: 0, 2: 1}
    made.check(toys.batch(3, 1))
    assert used() == {8: 0, 4: 3, 2: 1}


# --- the budget -----------------------------------------------------------------------------------


def attended(recorder_name: str, device: Any, keys: float, **options: Any) -> steps.Made:
    """A step of small keys, mixed ones of 1 to 16 tokens, whose budget holds so many."""
    probe = steps.make(recorder_name, device, modes="PIECEWISE", lazy=False)
    one = probe.step.memory.rows[0]
    pool, graph = probe.step.memory.pool, max(one.measured.graph, one.estimated.graph)
    budget = pool + int(keys * graph)
    return steps.make(
        recorder_name, device, modes="PIECEWISE", memory_budget=budget, **options
    )  # fmt: skip


def sizes(made: steps.Made) -> set[int]:
    return {d.num_tokens for _, d in made.keys}


def test_the_least_recently_used_key_goes():
    made = attended("tape", torch.device("cpu"), 3.5)
    for n in (1, 2, 4, 1, 2, 1):
        made.check(toys.batch(n))
    assert sizes(made) == {1, 2, 4}
    made.check(toys.batch(8))
    assert sizes(made) == {1, 2, 8}
    made.check(toys.batch(4))
    assert sizes(made) == {1, 8, 4}
    made.check(toys.batch(1))  # in use: not captured again
    assert made.step.memory.total <= made.step.memory.budget
    times = {k.num_tokens: took.times for (_, k, _), took in made.step.stats.captures.items()}
    assert times == {1: 1, 2: 1, 4: 2, 8: 1}


def test_ahead_of_time_nothing_is_evicted_and_the_rest_is_left_for_later():
    made = attended("tape", torch.device("cpu"), 3.5)
    made.step.capture_all()
    assert sizes(made) == {16, 8, 4}
    assert made.step.capture_some(1e6) == 2 and sizes(made) == {16, 8, 4}
    for n in (9, 3, 5, 2, 1, 9):
        made.check(toys.batch(n))
        assert made.step.memory.total <= made.step.memory.budget
    assert not made.step.stats.reasons


@pytest.mark.parametrize("on_failure", ["raise", "eager"])
def test_a_budget_that_holds_no_key(recorder_name, device, on_failure: str):
    made = steps.make(recorder_name, device, memory_budget=1000, on_failure=on_failure)
    if on_failure == "raise":
        with pytest.raises(CaptureError, match="memory_budget=1000 bytes cannot hold this key"):
            made.step(made.state, toys.on(toys.batch(3), device))
        with pytest.raises(CaptureError, match="memory_budget=1000"):
            made.step.capture_all()
        return
    made.check(toys.batch(3))
    ((reason, times),) = made.step.stats.reasons.items()
    assert "memory_budget=1000 bytes cannot hold this key" in reason and times == 1
    assert [mode for _, _, mode in made.step.stats.counts] == [NONE]
    assert not made.keys


def counted(step: Any) -> list[Any]:
    """What its recorder records from now on."""
    record, made = step.recorder.record, []
    step.recorder.record = lambda fn, **options: made.append(fn) or record(fn, **options)
    return made


def test_a_pool_that_is_over_the_budget_is_begun_again():
    low, params = lowered()
    budget = low.estimate(FULL, key(64)).pool + GRAPH_BYTES + 20 * NODE_BYTES
    step = low.compile().capture(params, recorder="tape", lazy=True, memory_budget=budget)
    step(batch(16))
    step(batch(64))  # the small key's part of the pool is no use to it, and both are too much
    assert [d.num_tokens for d in step] == [64] and step.memory.total <= budget
    assert step.recorder.arena.nbytes == step.memory.pool == 8 * MB
    assert step(batch(16)).tolist() == wide(params, batch(16)).tolist()  # within the large pool
    assert [d.num_tokens for d in step] == [16] and step.memory.pool == 8 * MB
    step.main.pool = budget  # as if it had grown by something else
    made = counted(step)
    assert step(batch(1)).tolist() == wide(params, batch(1)).tolist()
    assert len(made) == 1  # not captured in vain before
    assert [d.num_tokens for d in step] == [1] and step.memory.pool == MB
    assert step(batch(64)).tolist() == wide(params, batch(64)).tolist()


def test_what_the_pool_would_grow_by_counts_before_a_key_is_captured():
    low, params = lowered()
    budget = low.estimate(FULL, key(64)).pool + GRAPH_BYTES + 20 * NODE_BYTES
    step = low.compile().capture(params, recorder="tape", lazy=True, memory_budget=budget)
    step(batch(16))
    made = counted(step)
    step.capture_all()  # for 64 beside 16 there is no room, for 1 there is
    assert [d.num_tokens for d in step] == [16, 1] and len(made) == 1
    small = low.compile().capture(params, recorder="tape", lazy=True, memory_budget=4 * MB)
    made = counted(small)
    with pytest.raises(CaptureError, match=f"its intermediates {8 * MB}"):
        small(batch(64))
    assert not made


def test_a_pool_that_grew_beyond_the_budget_ahead_of_time_is_given_back(monkeypatch):
    low, params = lowered()
    monkeypatch.setattr(stages, "estimate", lambda *args: Bytes(0, 0))
    step = low.compile().capture(params, recorder="tape", lazy=True, memory_budget=4 * MB)
    step(batch(16))
    step.capture_all()
    assert step.recorder.arena.nbytes == step.memory.pool <= step.memory.total <= 4 * MB
    assert step(batch(16)).tolist() == wide(params, batch(16)).tolist()


def test_the_pool_goes_on_after_weights_of_another_dtype():
    step, params = capture("tape", "cpu"), torch.ones(5, 1 << 14, dtype=torch.float64)
    for _ in range(2):
        assert step.memory.pool == step.recorder.arena.nbytes
        step.rebind(params=params)


def test_what_was_measured_counts_though_it_was_estimated_lower(monkeypatch):
    made = attended("tape", torch.device("cpu"), 3.5)
    monkeypatch.setattr(stages, "estimate", lambda *args: Bytes(0, 0))
    for n in (1, 2, 4, 8, 9, 1):
        made.check(toys.batch(n))
        assert made.step.memory.total <= made.step.memory.budget
    made.step.release()
    made.step.capture_all()
    assert made.step.memory.total <= made.step.memory.budget and len(made.keys) == 3
    alone = attended("tape", torch.device("cpu"), 0.5)
    with pytest.raises(CaptureError, match="graphs took"):
        alone.step(alone.state, toys.batch(3))
    assert not alone.keys and alone.step.memory.total == 0
    eager = attended("tape", torch.device("cpu"), 0.5, on_failure="eager")
    eager.check(toys.batch(3))
    assert "graphs took" in next(iter(eager.step.stats.reasons))


def test_what_other_processes_take_meanwhile_is_not_the_keys():
    made = attended("tape", torch.device("cpu"), 3.5)
    usage, looks = made.step.recorder.usage, itertools.count()

    def busy() -> Usage:
        """A device of which others take a GB between any two looks."""
        pool, other = usage()
        return Usage(pool, other + (next(looks) << 30))

    made.step.recorder.usage = busy
    for n in (1, 2, 4, 1, 2, 1, 8):
        made.check(toys.batch(n))
    assert sizes(made) == {1, 2, 8} and not made.step.stats.reasons
    rows = [row for row in made.step.memory.rows if row.measured]
    assert [row.measured.graph for row in rows] == [row.estimated.graph for row in rows]


def test_what_graphs_took_since_another_look():
    def since(given: int, estimate: int | None = None) -> int:
        return Usage(0, given).graphs_since(Usage(7, 100), lambda: estimate)  # type: ignore

    assert since(150) == 50 and since(60) == 0  # others gave memory back
    assert since(100 + CHUNK) == CHUNK  # the driver takes more than it needs; nobody asks
    assert since(101 + CHUNK, estimate=CHUNK // 4) == CHUNK // 4
    assert since(100 + 4 * CHUNK, estimate=CHUNK) == 4 * CHUNK
    assert since(101 + 4 * CHUNK, estimate=CHUNK) == CHUNK


@pytest.mark.gpu
def test_random_dispatch_under_a_budget_stays_under_it(held, monkeypatch):
    def own(recorder: Any) -> Usage:
        """This process's part alone, or the budget would be used up by others."""
        now = held()
        return Usage(now.reserved, now.graphs * GRAPH_BYTES)

    monkeypatch.setattr(CudaRecorder, "usage", own)
    made = attended("cuda", "cuda", 8.5, sizes=tuple(range(1, 13)), on_failure="eager")
    before = made.step.recorder.usage()
    most = toys.B * toys.S + 1  # of one request
    order = torch.randint(1, most, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    for n in order:
        made.check(toys.batch(n))
        assert made.step.memory.total <= made.step.memory.budget
    after = made.step.recorder.usage()
    assert made.step.stats.share("NONE") < 0.1, made.step.failed
    taken = sum(after) - sum(before)
    assert taken <= made.step.memory.budget + 64 * MB  # segments of what is eager


@pytest.mark.parametrize("budget", [-1, 1.5, "1 MB", True])
def test_a_budget_is_bytes(budget: Any):
    with pytest.raises(CaptureError, match=r"memory_budget=.*bytes"):
        fg.graphify(wide, stage="batch", memory_budget=budget)
