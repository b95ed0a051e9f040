"""WHILE and IF nodes on any machine: which way is taken, what the driver is asked for, what is
found, and what is said of what is missing."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from fngraph.errors import CaptureError, PackageError
from fngraph.graphs.control import recording_control
from fngraph.graphs.cuda import conditional, setter
from fngraph.graphs.cuda.conditional import bodies_of, if_node, while_node
from fngraph.graphs.cuda.nodes import read
from fngraph.graphs.inside import Node
from fngraph.torch_facts.driver import newest

CUDA = torch.device("cuda", 0)


@pytest.mark.parametrize("has", [True, False])
def test_torchs_own_calls_are_taken_where_it_has_them(monkeypatch: pytest.MonkeyPatch, has: bool):
    taken = []
    graph = type("CUDAGraph", (), {"begin_capture_to_while_node": None} if has else {})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graph)
    monkeypatch.setattr(conditional, "_check", lambda *_: None)
    monkeypatch.setattr(conditional, "_by_torch", lambda kind, *_: taken.append(("torch", kind)))
    monkeypatch.setattr(conditional, "_by_driver", lambda kind, *_: taken.append(("driver", kind)))
    while_node(torch.tensor(True), int)
    if_node(torch.tensor(True), int)
    way = "torch" if has else "driver"
    assert taken == [(way, "WHILE"), (way, "IF")]


class Torchs:
    """`torch.cuda.CUDAGraph` of 2.14, told what is done."""

    done: ClassVar[list[Any]] = []
    refuses = False

    @classmethod
    def get_currently_capturing_graph(cls) -> Torchs:
        return cls()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> None:
            self.done.append((name, *(str(x.dtype) for x in args)))
            if self.refuses and name.startswith("end"):
                raise RuntimeError("unjoined")

        return call


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    Torchs.done, Torchs.refuses = [], False
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Torchs)
    monkeypatch.setattr(conditional, "current_device", lambda: 0)
    monkeypatch.setattr(conditional, "current_stream", lambda index: 7 + len(Torchs.done))
    monkeypatch.setattr(conditional, "_check", lambda *_: None)
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # without cuda.bindings, too
    yield Torchs
    assert not conditional._OPEN


def test_by_torchs_own_calls(torchs: Any):
    pred = torch.tensor(1, dtype=torch.uint8)
    conditional._by_torch("WHILE", pred, lambda: torchs.done.append(conditional.is_body(8)))
    conditional._by_torch("IF", pred, lambda: torchs.done.append("run"))
    assert torchs.done == [
        ("begin_capture_to_while_node", "torch.bool"), True,
        ("set_conditional_handle_for_current_node", "torch.bool"),
        ("end_capture_to_conditional_node",),
        ("begin_capture_to_if_node", "torch.bool"), "run", ("end_capture_to_conditional_node",),
    ]  # fmt: skip


@pytest.mark.parametrize("refuses", [False, True])
def test_torchs_node_is_ended_when_the_body_raises(torchs: Any, refuses: bool):
    torchs.refuses = refuses

    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        conditional._by_torch("WHILE", torch.tensor(True), fails)
    assert [name for name, *_ in torchs.done][1:] == ["end_capture_to_conditional_node"]
    if refuses:
        with pytest.raises(CaptureError, match=r"forked and not joined.*unjoined"):
            conditional._by_torch("IF", torch.tensor(True), int)


def test_a_predicate_is_looked_at_before_anything_else():
    for pred in (torch.zeros(1, dtype=torch.bool), torch.zeros(()), torch.tensor(True)):
        with pytest.raises(CaptureError, match=r"WHILE node is \(.*must be \(\), bool or uint8"):
            while_node(pred, int)


def test_without_cuda_bindings_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    monkeypatch.setattr(conditional, "current_device", lambda: 0)
    monkeypatch.setattr(conditional, "current_stream", lambda index: 7)
    with pytest.raises(PackageError, match=r"conditional node.*pip install cuda-bindings"):
        conditional._by_driver("WHILE", torch.tensor(True), int)


class Drivers:
    """`cuda.bindings.driver` of CUDA 12, told what is done; what `fails` answers with an error.

    Stream 7 is being captured into graph 1, stream 8 is the one beside it; nodes are 100 and more.
    """

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.fails: set[str] = set()
        self.CUresult = SimpleNamespace(CUDA_SUCCESS=0)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU"):  # an enumeration or a struct: its names stand for themselves
            return Named(name)
        versions = {"cuGraphAddNode_v2", "cuStreamGetCaptureInfo_v3"}
        if "_v" in name and name not in versions:
            raise AttributeError(name)

        def call(*args: Any) -> Any:
            if name == "cuStreamGetCaptureInfo_v3":
                return (
                    0,
                    "CU_STREAM_CAPTURE_STATUS_ACTIVE",
                    5,
                    {7: 1, 8: 2}[args[0]],
                    [99],
                    [None],
                    1,
                )
            self.done.append((name, *args))
            made = {"cuGraphAddNode_v2": 100 + len(self.done), "cuGraphConditionalHandleCreate": 50}
            if name == "cuGraphAddNode_v2":
                args[-1].conditional.phGraph_out = [2]
            return int(name in self.fails), made.get(name)

        return call


class Named(SimpleNamespace):
    """A struct, or an enumeration whose names stand for themselves."""

    def __init__(self, name: str) -> None:
        super().__init__(name=name)

    def __call__(self, init_value: int | None = None) -> Any:
        return init_value if init_value is not None else SimpleNamespace(conditional=Named(""))

    def __getattr__(self, name: str) -> Any:
        return 1 if "SET_CAPTURE" in name else name


@pytest.fixture
def drivers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drivers]:
    written = Drivers()
    monkeypatch.setattr(conditional, "driver_for", lambda what: written)
    monkeypatch.setattr(conditional, "_BODIES", {})
    streams = iter([7])
    monkeypatch.setattr(conditional, "current_device", lambda: 0)
    monkeypatch.setattr(conditional, "current_stream", lambda index: next(streams, 8))
    monkeypatch.setattr(conditional, "_let_thread_allocate", lambda *_: written.done.append("pool"))
    beside = SimpleNamespace(cuda_stream=8)
    monkeypatch.setattr(conditional, "_stream_beside", lambda index, around: beside)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(setter, "load", lambda index: written.done.append("load"))
    monkeypatch.setattr(
        setter, "launch", lambda index, stream, handle, at: written.done.append((stream, handle))
    )
    yield written
    assert not conditional._OPEN


@pytest.mark.parametrize("kind", ["WHILE", "IF"])
def test_what_the_driver_is_asked_for(drivers: Drivers, kind: str):
    pred = torch.tensor(True)
    conditional._by_driver(kind, pred, lambda: drivers.done.append(conditional.is_body(8)))
    names = [x[0] if isinstance(x, tuple) and isinstance(x[0], str) else x for x in drivers.done]
    assert names == [
        "load", "pool", "cuStreamBeginCapture", True, "cuStreamEndCapture", "cuGraphDestroy",
        "cuCtxGetCurrent", "cuGraphConditionalHandleCreate", (7, 50),
        "cuGraphAddNode_v2", "cuStreamUpdateCaptureDependencies", "cuStreamBeginCaptureToGraph",
        True, *([(8, 50)] if kind == "WHILE" else []), "cuStreamEndCapture",
    ]  # fmt: skip
    told = dict((x[0], x[1:]) for x in drivers.done if isinstance(x, tuple) and len(x) > 2)
    (*to, params) = told["cuGraphAddNode_v2"]
    assert to == [1, [99], None, 1] and params.conditional.type == f"CU_GRAPH_COND_TYPE_{kind}"
    assert params.conditional.handle == 50 and params.conditional.size == 1
    (node,) = bodies_of(1)
    assert told["cuStreamUpdateCaptureDependencies"] == (7, [node], None, 1, 1)
    assert told["cuStreamBeginCaptureToGraph"][:2] == (8, 2)


@pytest.mark.parametrize("failing", ["body", "cuStreamBeginCaptureToGraph", "cuStreamEndCapture"])
def test_a_bodys_capture_is_ended_whatever_fails(
    drivers: Drivers, failing: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(conditional, "_try", lambda *_: None)
    drivers.fails = {failing, "cuStreamEndCapture"}

    def body() -> None:
        conditional._BODIES[2] = {60: 3}  # of a node inside of it
        if failing == "body":
            raise ZeroDivisionError

    wanted = {
        "body": ZeroDivisionError, "cuStreamEndCapture": CaptureError,
        "cuStreamBeginCaptureToGraph": RuntimeError,
    }  # fmt: skip
    with pytest.raises(wanted[failing]) as raised:
        conditional._by_driver("WHILE", torch.tensor(True), body)
    assert drivers.done[-1] == ("cuStreamEndCapture", 8) and not conditional._BODIES, failing
    assert ("forked and not joined" in str(raised.value)) == (failing == "cuStreamEndCapture")


@pytest.mark.parametrize("failing", ["body", "cuStreamBeginCapture", "cuStreamEndCapture"])
def test_a_body_that_cannot_be_captured_gets_no_node(drivers: Drivers, failing: str):
    """Of which the driver would destroy the graph twice."""
    drivers.fails = {failing, "cuStreamEndCapture"}

    def body() -> None:
        assert conditional._TRIED == {8}
        conditional._by_driver("IF", torch.tensor(True), lambda: drivers.done.append("within"))
        if failing == "body":
            raise ZeroDivisionError

    wanted = {"body": ZeroDivisionError, "cuStreamEndCapture": CaptureError}
    with pytest.raises(wanted.get(failing, RuntimeError)):
        conditional._by_driver("WHILE", torch.tensor(True), body)
    ends = [("cuStreamEndCapture", 8)] if failing != "cuStreamBeginCapture" else []
    begun = next(i for i, x in enumerate(drivers.done) if x[0] == "cuStreamBeginCapture")
    assert drivers.done[begun + 1 :] == [*["within"] * bool(ends), *ends]
    assert not conditional._TRIED and not bodies_of(1)


def test_the_pool_of_the_capture_takes_what_its_thread_allocates(monkeypatch: pytest.MonkeyPatch):
    done: list[Any] = []
    for name in ("end_allocating", "allocate_by_thread", "release_pool"):
        monkeypatch.setattr(
            conditional, name, lambda index, pool, name=name: done.append((name, index, pool))
        )
    byte = torch.zeros(1, dtype=torch.uint8)
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: byte)
    at = byte.data_ptr()
    segments = [
        {"device": device, "address": at + more, "total_size": 8, "segment_pool_id": pool}
        for device, more, pool in ((1, 0, (0, 5)), (0, -8, (0, 6)), (0, 1, (0, 7)), (0, -7, (0, 8)))
    ]
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: segments)
    conditional._let_thread_allocate(0, 7)
    names = ["end_allocating", "allocate_by_thread", "release_pool"]
    assert done == [(name, 0, (0, 8)) for name in names]
    with conditional._open(7):  # it is so already
        conditional._let_thread_allocate(0, 7)
    assert len(done) == 3
    for left in (segments[:3], [{**segments[3], "segment_pool_id": (0, 0)}]):
        monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda left=left: left)
        with pytest.raises(CaptureError, match="without a pool of its own"):
            conditional._let_thread_allocate(0, 7)
    assert len(done) == 3


@pytest.fixture
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine without CUDA; a folder of its own for what a test puts there."""
    monkeypatch.setattr(setter.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(setter, "ARCHIVE", "libcudadevrt_of_no_machine.a")
    monkeypatch.setattr(setter.shutil, "which", lambda name: None)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("version", "folder"), [("13.0", "cu13/lib"), ("12.8", "cuda_runtime/lib")]
)
def test_the_device_runtime_that_came_with_torch_is_found_first(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, version: str, folder: str
):
    for place in ("nvidia/cu13/lib", "nvidia/cuda_runtime/lib", "home/lib64"):
        (nowhere / place).mkdir(parents=True)
    (nowhere / "home" / "lib64" / setter.ARCHIVE).touch()
    monkeypatch.setenv("CUDA_HOME", str(nowhere / "home"))
    monkeypatch.setattr(torch.version, "cuda", version)
    spec = SimpleNamespace(submodule_search_locations=[str(nowhere / "nvidia")])
    monkeypatch.setattr(setter.importlib.util, "find_spec", lambda name: spec)
    assert setter.found_archive().parent == nowhere / "home" / "lib64"
    (nowhere / "nvidia" / folder / setter.ARCHIVE).touch()
    assert setter.found_archive().parent == nowhere / "nvidia" / folder


def test_the_device_runtime_beside_nvcc_is_found(nowhere: Path, monkeypatch: pytest.MonkeyPatch):
    archive = nowhere / "cuda" / "targets" / "x86_64-linux" / "lib" / setter.ARCHIVE
    archive.parent.mkdir(parents=True)
    archive.touch()
    monkeypatch.setattr(setter.shutil, "which", lambda name: str(nowhere / "cuda" / "bin" / name))
    assert setter.found_archive() == archive.resolve()


@pytest.mark.parametrize(
    ("version", "package"),
    [("13.0", "nvidia-cuda-runtime,"), ("12.8", "nvidia-cuda-runtime-cu12,"),
     (None, "nvidia-cuda-runtime,")],
)  # fmt: skip
def test_without_the_device_runtime_the_error_says_where_it_was_looked_for(
    nowhere: Path, monkeypatch: pytest.MonkeyPatch, version: str | None, package: str
):
    monkeypatch.setattr(torch.version, "cuda", version)
    with pytest.raises(PackageError, match="/usr/local/cuda/lib64") as raised:
        setter.found_archive()
    assert f"pip install {package}" in str(raised.value)
    with pytest.raises(PackageError):
        setter.linked.__wrapped__("sm_90")


def test_the_kernel_links(monkeypatch: pytest.MonkeyPatch):
    """Where nvJitLink and the device runtime are, if there is no GPU as well."""
    nvjitlink = pytest.importorskip("cuda.bindings.nvjitlink")
    try:
        nvjitlink.destroy(nvjitlink.create(1, ["-arch=sm_90"]))
        setter.found_archive()
    except (PackageError, RuntimeError) as error:
        pytest.skip(str(error))
    for arch in ("sm_75", "sm_80", "sm_90"):
        assert setter.linked.__wrapped__(arch)[:4] == b"\x7fELF"
    monkeypatch.setattr(setter, "PTX", setter.PTX.replace("SetConditional", "SetNothing"))
    with pytest.raises(CaptureError, match=r"does not link .*cudaGraphSetNothing"):
        setter.linked.__wrapped__("sm_90")


def test_newest_forms_of_the_drivers_functions():
    old = SimpleNamespace(f=1, f_v2=2, f_v3=3, g=4)
    assert newest(old, "f", "v3") == 3 and newest(old, "f", "v2") == 2
    assert newest(old, "g", "v2") == 4


def test_bodies_are_told_once_and_with_those_inside(monkeypatch: pytest.MonkeyPatch):
    known = {1: {10: 2, 11: 3}, 3: {30: 4}, 9: {90: 5}}
    monkeypatch.setattr(conditional, "_BODIES", known)
    assert bodies_of(1) == {10: 2, 11: 3, 30: 4}
    assert known == {9: {90: 5}} and bodies_of(1) == {}


def test_a_conditional_node_is_followed_by_the_nodes_of_its_body(monkeypatch: pytest.MonkeyPatch):
    graphs = {1: [(10, 0), (11, 1), (12, 0)], 2: [(20, 0), (21, 1)], 3: [(31, 0)]}
    kinds = {node: kind for nodes in graphs.values() for node, kind in nodes}

    def node_type(kind: int) -> Any:
        return SimpleNamespace(name="CU_GRAPH_NODE_TYPE_CONDITIONAL")

    vars(node_type).update(
        CU_GRAPH_NODE_TYPE_KERNEL=0, CU_GRAPH_NODE_TYPE_CONDITIONAL=1, CU_GRAPH_NODE_TYPE_MEMCPY=2,
        CU_GRAPH_NODE_TYPE_MEMSET=3, CU_GRAPH_NODE_TYPE_GRAPH=4,
    )  # fmt: skip

    def edges(graph: int, number: int = 0) -> Any:
        chain = [node for node, _ in graphs[graph]]
        return 0, chain[:-1][:number], chain[1:][:number], [], len(chain) - 1

    written = SimpleNamespace(
        CUresult=SimpleNamespace(CUDA_SUCCESS=0),
        CUgraph=lambda init_value: init_value,
        CUgraphNodeType=node_type,
        cuGraphGetNodes=lambda g, n=0: (0, [node for node, _ in graphs[g]][:n], len(graphs[g])),
        cuGraphNodeGetType=lambda node: (0, kinds[node]),
        cuGraphGetEdges=edges,
        cuGraphKernelNodeGetParams=lambda node: (0, SimpleNamespace(func=node, kern=0)),
        cuFuncGetName=lambda function: (0, f"f{function}".encode()),
    )
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=written))
    nodes, chain = read(1, {11: 2, 21: 3, 12: 3})
    node = Node("other", "conditional")
    assert [n if n == node else n.name for n in nodes] == ["f10", node, "f20", node, "f31", "f12"]
    assert chain == ((0, 1), (1, 5), (2, 3))
    assert [n.name for n in read(1)[0]] == ["f10", "conditional", "f12"]


def test_a_warm_up_runs_each_body_once(monkeypatch: pytest.MonkeyPatch):
    ran: list[int] = []
    streams = SimpleNamespace(cuda_stream=5)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: streams)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    monkeypatch.setattr(conditional, "prepare", lambda device: ran.append(-1))
    assert recording_control(CUDA) is None
    with conditional.warmed(5):
        control = recording_control(CUDA)
        for pred in (False, True):
            control.while_node(torch.tensor(pred), lambda: ran.append(1))
            control.if_node(torch.tensor(pred), lambda: ran.append(2))
        streams.cuda_stream = 6
        assert recording_control(CUDA) is None
    streams.cuda_stream = 5
    assert recording_control(CUDA) is None and recording_control(torch.device("cpu")) is None
    assert ran == [-1, 1, 2, 1, 2]
