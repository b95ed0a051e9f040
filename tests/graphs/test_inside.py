"""Looking inside a captured key: counts by hand, DOT, times that change nothing, ranges."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toys
from torch.autograd import DeviceType
from toys import FULL, PIECEWISE

import fngraph as fg
from fngraph.core import BatchDescriptor
from fngraph.errors import PackageError
from fngraph.graphs.cuda import nodes as cuda_nodes
from fngraph.graphs.cuda.recorder import CudaRecording
from fngraph.graphs.inside import Counts, Node, key_name
from fngraph.graphs.replay import Replay
from fngraph.step import times as timing
from fngraph.torch_facts.schemas import out_twins


def toy(params: Any, state: Any, batch: toys.Batch) -> Any:
    """Four kernels: a gather, two elementwise ones, and an update of the state."""
    x_TE = params["w"][batch.token_ids]
    return x_TE * 2 + 1, state + 1


def doubling(params: Any, state: Any, batch: toys.Batch) -> Any:
    """A gather, a cut (whose output is made before it), and one kernel after it."""
    return toys.double(params["w"][batch.token_ids]) + 1, state + 1


def captured(device: Any, fn: Any = toy, modes: str = "FULL", state: Any = None) -> Any:
    """A step over T = 4 and 8, and its state."""
    params = toys.clone({"w": toys.tally_params()["w"].to(device)})
    state = torch.zeros(3, device=device) if state is None else state
    options = {"donate": 1, "stage": "batch", "limits": toys.LIMITS, "sizes": (4, 8)}
    fast = fg.graphify(fn, modes=modes, **options)
    example = toys.on(toys.batch(3, 2), device)
    return fast.bind(params).capture(state, batch=example, progress=False), state


def key_of(step: Any, tokens: int) -> BatchDescriptor:
    """The key of that many tokens."""
    (key,) = (k for k in step if k.num_tokens == tokens)
    return key


def replay_of(device: Any, tokens: int = 8, *toy: Any) -> Replay:
    """What is captured under the key of that many tokens."""
    step, _ = captured(device, *toy)
    return step[key_of(step, tokens)]


def wanted(device: Any, batch: toys.Batch) -> torch.Tensor:
    """What both toys put out."""
    return toys.tally_params()["w"].to(device)[batch.token_ids] * 2 + 1


def right(step: Any, state: Any, device: Any, *rows: int) -> bool:
    """Whether one more step computes what it should, and updates the state."""
    before = state.clone()
    batch = toys.on(toys.batch(*rows), device)
    out, after = step(state, batch)
    return torch.equal(out, wanted(device, batch)) and torch.equal(after, before + 1)


# --- counts ---------------------------------------------------------------------------------------


def taking(device: Any) -> int:
    """Kernels that take a batch in: on CUDA one reads the slot and one the leaves."""
    return 2 if device.type == "cuda" else 1


def test_a_full_key_has_the_kernels_that_one_counts_by_hand(device: Any):
    counts = replay_of(device).counts
    assert counts.kernels == taking(device) + 4  # gather, mul, add, the state's add
    assert counts.memcpys == 1  # the result goes to its static buffer
    assert (counts.nodes, counts.memsets, counts.others) == (taking(device) + 5, 0, 0)


def test_a_piecewise_key_counts_each_graph_and_no_eager_call(device: Any):
    replay = replay_of(device, 8, doubling, "PIECEWISE")
    first, second = replay.graph_counts
    assert [len(replay.graphs), len(replay.calls)] == [2, 3]
    total = replay.counts
    assert total.nodes == first.nodes + second.nodes
    assert total.kernels == first.kernels + second.kernels
    assert second.memcpys == 1 and first.memcpys == 0
    wanted = taking(device) + 4  # gather, zeros for the cut; add, add
    assert first.kernels + second.kernels == wanted


def test_names_of_kernels_are_those_of_the_operators(device: Any):
    names = dict(replay_of(device, 4).counts.names)
    if device.type == "cpu":
        assert names == {"fngraph::unpack": 1, "aten::index": 1, "aten::mul": 1, "aten::add": 1,
                         "aten::add_": 1}  # fmt: skip
        return
    assert names["_read_slot"] == names["_unpack"] == 1  # Triton's
    assert sum(n for name, n in names.items() if "elementwise" in name) >= 3
    assert not any(name.startswith("_Z") or name == "kernel" for name in names)


def test_counts_print_what_there_is():
    nodes = [Node("kernel", "a")] * 2 + [Node("kernel", "b"), Node("memcpy", "memcpy")]
    counts = Counts.of([*nodes, Node("other", "empty")])
    assert repr(counts) == "Counts(5 nodes (3 kernels, 1 memcpy, 1 other))"
    assert counts.as_text() == ("5 nodes (3 kernels, 1 memcpy, 1 other)\n     2 x a\n     1 x b")
    assert str(Counts.of([])) == "0 nodes" and Counts.of([]) == Counts()


def test_a_replay_prints_its_counts_once_they_are_known(device: Any):
    replay = replay_of(device)
    assert "1 graph, 0 eager calls" in repr(replay)
    assert replay.counts is replay.counts
    n = taking(device)
    assert f"1 graph of {n + 5} nodes ({n + 4} kernels, 1 memcpy), 0 eager calls" in repr(replay)


# --- kinds of nodes, and the tape's edges ---------------------------------------------------------


def test_a_copy_is_a_memcpy_where_bytes_only_move(kit: Any):
    a, b = (torch.zeros(4, 6, device=kit.device) for _ in "ab")
    long = torch.zeros(4, 6, dtype=torch.int64, device=kit.device)
    square = torch.zeros(6, 4, device=kit.device).T
    for kind, copy in [
        ("memcpy", lambda: a.copy_(b)), ("memcpy", lambda: a[1:3].copy_(b[:2])),
        ("memcpy", lambda: a.clone()), ("kernel", lambda: a.copy_(long)),
        ("kernel", lambda: a.copy_(square)), ("kernel", lambda: a[:, :2].copy_(b[:, :2])),
        ("kernel", lambda: a.half()), ("kernel", lambda: a.zero_()),
    ]:  # fmt: skip
        assert [node.kind for node in kit.recorder.record(copy)[0].nodes] == [kind]


def test_edges_go_from_the_last_writer_of_the_bytes_to_their_reader(tape):
    x, y, z = (torch.zeros(8) for _ in "xyz")

    def fn() -> None:
        x.fill_(1)  # 0, all overwritten by 1 and 2
        x[:4].fill_(2)  # 1
        x[4:].fill_(3)  # 2
        y.fill_(4)  # 3
        z.copy_(x)  # 4 reads 1 and 2
        z.add_(y)  # 5 reads 4 and 3
        torch.mul(z, x[:1], out=y)  # 6 reads 5 and 1, writes y
        x.add_(y)  # 7 reads 1, 2 and 6

    want = {(1, 4), (2, 4), (4, 5), (3, 5), (5, 6), (1, 6), (1, 7), (2, 7), (6, 7)}
    assert set(tape.record(fn)[0].edges) == want


def test_a_writer_with_holes_does_not_hide_the_one_before(tape):
    x, y = torch.zeros(8), torch.zeros(8)

    def fn() -> None:
        x.fill_(1)
        x[::7].fill_(2)  # from the first byte to the last
        y.copy_(x)

    assert set(tape.record(fn)[0].edges) == {(0, 2), (1, 2)}


def test_an_op_without_an_out_variant_is_named_and_tied_as_itself(tape):
    functional = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    assert out_twins(functional) == ()
    q = torch.zeros(1, 2, 3, 4)

    def fn() -> torch.Tensor:
        return functional(q.add_(1), q, q)[0].add_(1)

    recording = tape.record(fn)[0]
    names = [node.name for node in recording.nodes]
    assert names == ["aten::add_", functional._schema.name, "aten::add_"]
    assert recording.edges == ((0, 1), (1, 2))
    nothing = tape.record(lambda: None)[0]
    assert nothing.nodes == () == nothing.edges


# --- DOT ------------------------------------------------------------------------------------------


def test_dot_names_nodes_by_kernel_and_ties_them(device: Any):
    text = replay_of(device).dot()
    assert text.startswith('digraph "fngraph FULL 8x4" {') and text.endswith("}\n")
    assert text.count("{") == text.count("}") == 2
    assert text.count("[label=") == taking(device) + 5
    assert text.count(" -> ") >= 4
    if device.type == "cpu":
        assert 'c0n0 [label="fngraph::unpack"];' in text and "c0n0 -> c0n1;" in text
        assert text.count("style=dashed") == 1  # the copy
    else:
        assert 'label="_unpack"' in text


def test_dot_shows_eager_calls_between_their_graphs(device: Any):
    replay = replay_of(device, 8, doubling, "PIECEWISE")
    text = replay.dot()
    assert text.count("subgraph cluster_") == 2
    assert f'c1 [label="{replay.calls[1].name}", shape=ellipse];' in text
    assert "-> c1 [style=dotted];" in text and "c1 -> c2n0 [style=dotted];" in text


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "key", "want"),
    [(FULL, BatchDescriptor(8, 8, 1), "8x8 q1"), (FULL, BatchDescriptor(8, 4), "8x4"),
     (PIECEWISE, BatchDescriptor(16), "16"),
     (FULL, BatchDescriptor(8, 8, 1, adapters=2), "8x8 q1 a2"),
     (FULL, BatchDescriptor(8, 8, cascade=True), "8x8 cascade"),
     (PIECEWISE, BatchDescriptor(8, extra={"b": 1}), "8 b=1")],
)  # fmt: skip
def test_the_name_of_a_key(mode: fg.Mode, key: BatchDescriptor, want: str):
    assert key_name(mode, key) == f"fngraph {mode.name} {want}"


@pytest.mark.parametrize(
    ("mangled", "want"),
    [("_unpack", "_unpack"), ("_ZN2at6native4copyEv", "copy"),
     ("_ZN2at6native12_GLOBAL__N_13fooIfEEvPT_i", "foo<float>"),
     ("_ZN3abc3defIiEEvNS_1XEPFviE", "abc::def<int>"), ("_Znonsense", "_Znonsense")],
)  # fmt: skip
def test_names_of_kernels_are_made_readable(mangled: str, want: str):
    assert cuda_nodes.readable(mangled) == want


# --- cuda.bindings --------------------------------------------------------------------------------


def test_without_cuda_bindings_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    recording = CudaRecording(SimpleNamespace(raw_cuda_graph=lambda: 1))  # type: ignore[arg-type]
    with pytest.raises(PackageError, match="pip install cuda-bindings"):
        recording.nodes  # noqa: B018
    with pytest.raises(ImportError):
        recording.edges  # noqa: B018


KINDS = ("KERNEL", "MEMCPY", "MEMSET", "HOST", "GRAPH", "EMPTY")
TYPES = {f"CU_GRAPH_NODE_TYPE_{kind}": i for i, kind in enumerate(KINDS)}


def node_type(kind: int) -> Any:
    return SimpleNamespace(name=list(TYPES)[kind])


vars(node_type).update(TYPES)


def driver(graphs: Any, children: Any) -> Any:
    """`cuda.bindings.driver` over graphs written down: {graph: ([(node, type)], [(from, to)])}."""

    def edges(graph: int, number: int = 0) -> Any:
        found = graphs[graph][1]
        return 0, [a for a, _ in found][:number], [b for _, b in found][:number], [], len(found)

    types = {node: kind for nodes, _ in graphs.values() for node, kind in nodes}
    nodes = {graph: [node for node, _ in nodes] for graph, (nodes, _) in graphs.items()}
    return SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUgraph=lambda init_value: init_value,
        CUgraphNodeType=node_type,
        cuGraphGetNodes=lambda graph, n=0: (0, nodes[graph][:n], len(nodes[graph])),
        cuGraphNodeGetType=lambda node: (0, types[node]),
        cuGraphGetEdges=edges,
        cuGraphChildGraphNodeGetGraph=lambda node: (0, children[node]),
        cuGraphKernelNodeGetParams=lambda node: (
            0, SimpleNamespace(func=0 if node % 2 else node, kern=node)),
        cuFuncGetName=lambda function: (0, f"f{function}".encode()),
        cuKernelGetName=lambda kernel: (0, f"k{kernel}".encode()) if kernel < 90 else (1, None),
    )  # fmt: skip


def test_nodes_of_a_cuda_graph_with_a_child(monkeypatch: pytest.MonkeyPatch):
    main = [(10, 0), (11, 1), (12, 4), (13, 2), (15, 5)], [(10, 11), (11, 12), (12, 13), (13, 15)]
    child = [(21, 0), (99, 0)], [(21, 99)]
    written = driver({1: main, 2: child, 3: ([], [])}, {12: 2})
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=written))
    nodes, edges = cuda_nodes.read(1)
    assert nodes == (
        Node("kernel", "f10"), Node("memcpy", "memcpy"), Node("other", "graph"),
        Node("kernel", "k21"), Node("kernel", "kernel"), Node("memset", "memset"),
        Node("other", "empty"),
    )  # fmt: skip
    assert edges == ((0, 1), (1, 2), (2, 5), (3, 4), (5, 6))
    assert cuda_nodes.read(3) == ((), ())


# --- times ----------------------------------------------------------------------------------------


def test_times_have_a_row_for_each_graph_and_eager_call(device: Any):
    step, _ = captured(device, doubling, "PIECEWISE")
    times = step.times(key_of(step, 8), repeats=3)
    name = step[key_of(step, 8)].calls[1].name
    assert [row for row, _ in times.rows] == ["graph 0", name, "graph 2"]
    assert all(us > 0 for _, us in times.rows) and times.total > 0
    if device.type == "cuda":
        assert times.total < 1000  # of the device: three tiny kernels, not the host's launches
    lines = repr(times).splitlines()
    assert len(lines) == 6 and lines[0].startswith("| fngraph PIECEWISE 8 ")
    assert lines[-1].startswith("| all ")


def test_times_are_medians_of_all_rounds_but_the_first(monkeypatch: pytest.MonkeyPatch):
    step, _ = captured(torch.device("cpu"), doubling, "PIECEWISE")
    rounds = iter([[900.0, 900, 900], [1.0, 20, 100], [3.0, 10, 200], [2.0, 60, 300]])
    lags = []

    def timed(replay: Any, sizes: Any, host: Any, lag: float) -> Any:
        lags.append(lag)
        replay(sizes, host)
        return next(rounds), 0.5

    monkeypatch.setattr(timing, "_on_cpu", timed)
    times = step.times(key_of(step, 8), repeats=3)
    assert [us for _, us in times.rows] == [2, 20, 200]
    assert times.total == 213
    assert lags == [0, 0.5, 0.5, 0.5]  # what each round says is the next one's
    assert "| all                 | 213.0 |" in repr(times)


@pytest.mark.parametrize("modes", ["FULL", "PIECEWISE"])
def test_times_leave_state_and_ring_as_they_were(device: Any, modes: str):
    state = torch.tensor([1.5, -2.0, 7.0], device=device)
    step, state = captured(device, modes=modes, state=state)
    for repeats in (1, 6):
        before = state.clone()
        step.times(key_of(step, 4), repeats)
        assert torch.equal(state, before)
        assert right(step, state, device, 2, 1)  # the ring's next slot is this batch's


def test_times_leave_a_cache_as_it_was(device: Any):
    params = toys.attention_params(device=device)
    cache = toys.attention_cache(device=device)
    options = {"donate": 1, "stage": "batch", "limits": toys.LIMITS, "sizes": (4, 8)}
    fast = fg.graphify(toys.attend, modes="PIECEWISE", **options)
    batch = toys.on(toys.batch(3, 2), device)
    step = fast.bind(params).capture(cache, batch=batch, progress=False)
    step(cache, batch)
    before = toys.clone(cache)
    assert any(x.any() for x in toys.leaves(before))
    step.times(key_of(step, 8), repeats=2)
    toys.assert_trees(cache, before)


@pytest.mark.parametrize("at", [0, 1])
def test_times_that_fail_leave_all_as_it_was(device: Any, monkeypatch: Any, at: int):
    step, state = captured(device, doubling, "PIECEWISE")
    before = state.clone()

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("broken backend")

    bind = Replay.bind

    def broken(replay: Replay, true: Any) -> Any:
        calls = list(bind(replay, true))
        calls[at] = fail, False
        return calls

    monkeypatch.setattr(Replay, "bind", broken)
    with pytest.raises(RuntimeError, match="broken backend"):
        step.times(key_of(step, 8))
    monkeypatch.undo()
    assert torch.equal(state, before)
    batch = toys.on(toys.batch(2, 1), device)
    assert torch.equal(step(state, batch)[0], wanted(device, batch))


def test_times_of_what_is_not_there(device: Any):
    step, _ = captured(device)
    with pytest.raises(KeyError, match="not captured"):
        step.times(BatchDescriptor(3))
    with pytest.raises(ValueError, match="at least 1"):
        step.times(key_of(step, 8), repeats=0)


# --- ranges and profilers -------------------------------------------------------------------------


@contextlib.contextmanager
def profile(device: Any) -> Iterator[Any]:
    """torch.profiler over what the device does too, which is waited for."""
    kinds = ["CPU", "CUDA"] if device.type == "cuda" else ["CPU"]
    activities = [getattr(torch.profiler.ProfilerActivity, kind) for kind in kinds]
    with torch.profiler.profile(activities=activities, acc_events=True) as made:  # else torch warns
        yield made
        if device.type == "cuda":
            torch.cuda.synchronize()


def seen(profiler: Any) -> set[str]:
    """Names in a profile."""
    return {event.key for event in profiler.key_averages()}


def test_capture_and_replay_work_under_a_profiler(device: Any):
    with profile(device) as profiler:
        step, state = captured(device)
        assert right(step, state, device, 3, 2)
    names = seen(profiler)
    assert {"capture fngraph FULL 8x4", "capture fngraph FULL 4x4"} <= names
    assert right(step, state, device, 3, 2)
    with profile(device) as profiler:
        assert right(step, state, device, 2, 1)
    names = seen(profiler)
    if device.type == "cuda":
        assert "_unpack" in names and any("elementwise" in name for name in names)
    else:
        assert {"fngraph::unpack", "aten::mul"} <= names
    assert not any(name.startswith("fngraph FULL") for name in names)  # nobody asked for ranges


def test_ranges_name_the_key_of_each_replay(device: Any):
    step, state = captured(device)
    assert right(step, state, device, 2, 1)
    with profile(device) as profiler:
        assert right(step, state, device, 2, 1)
        step.show_ranges()
        assert right(step, state, device, 3, 2)
        step.show_ranges()  # once more changes nothing
        assert right(step, state, device, 2, 1)
        step.show_ranges(False)
        assert right(step, state, device, 2, 1)
    on_host = [e for e in profiler.key_averages() if e.device_type == DeviceType.CPU]
    found = {e.key: e.count for e in on_host if e.key.startswith("fngraph FULL")}
    assert found == {"fngraph FULL 8x4": 1, "fngraph FULL 4x4": 1}


def test_ranges_name_each_part_of_a_piecewise_key(device: Any):
    step, state = captured(device, doubling, "PIECEWISE")
    batch = toys.on(toys.batch(3, 2), device)
    plain = step[key_of(step, 8)]
    want = step(state, batch)[0].clone()
    step.show_ranges()
    with profile(device) as profiler:
        assert torch.equal(step(state, batch)[0], want)
    name = step[key_of(step, 8)].calls[1].name
    parts = [f"fngraph PIECEWISE 8 [{part}" for part in ("0]", f"1] {name}", "2]")]
    assert sorted(k for k in seen(profiler) if k.startswith("fngraph PIECEWISE")) == parts
    replay = step[key_of(step, 8)]
    assert replay.counts == plain.counts and replay.dot() == plain.dot()
    assert replay.graphs == plain.graphs
    assert replay.without_ranges().calls == plain.calls


def test_nvtx_ranges_are_balanced_also_when_a_replay_fails(monkeypatch: pytest.MonkeyPatch):
    from fngraph.graphs.ranges import in_range, named_range

    said: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", said.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: said.append("pop"))
    with named_range("outer"), pytest.raises(ZeroDivisionError):
        in_range("inner", lambda host: 1 / 0, host=None)
    assert said == ["outer", "inner", "pop", "pop"]


@pytest.mark.gpu
def test_the_raw_graph_is_kept_and_can_be_dumped_by_cuda(tmp_path: Any):
    from cuda.bindings import driver

    replay = replay_of(torch.device("cuda", 0))
    graph = driver.CUgraph(init_value=replay.graph.raw_cuda_graph())
    path = tmp_path / "graph.dot"
    (error,) = driver.cuGraphDebugDotPrint(graph, str(path).encode(), 1)  # verbose
    assert error == driver.CUresult.CUDA_SUCCESS
    assert "digraph" in path.read_text()
