"""WHILE and IF nodes: a part of a CUDA graph that runs as often as a predicate on the device says.

They are put into the graph that the current stream is being captured into. The body is captured
into a graph of its own, inside the node, from a stream of its own: torch has calls for that from
2.14 on, and before that the driver is asked through `cuda.bindings`.

A body reads and writes memory at fixed addresses, like the rest of the graph. What it allocates is
of the graph's own pool, and lives as long as the graph. It may hold kernels, copies on the device,
sets, and conditional nodes. It may not draw random numbers from torch's generators: each turn would
draw the same ones (2.11 to 2.13; an error from 2.14 on).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fngraph.errors import CaptureError, PackageError
from fngraph.graphs.cuda import setter
from fngraph.torch_facts.driver import checked, driver_for, newest, relaxed
from fngraph.torch_facts.names import (
    allocate_by_thread,
    current_device,
    current_stream,
    end_allocating,
    release_pool,
)

_OPEN: set[int] = set()  # streams that bodies are being captured from, now
_TRIED: set[int] = set()  # those of them whose capture is thrown away, see `_try`
_WARMED: set[int] = set()  # streams on which a recorder warms up, now
_BODIES: dict[int, dict[int, int]] = {}  # of a graph: its conditional nodes, and the graph in each


def while_node(pred: torch.Tensor, run_body: Callable[[], object]) -> None:
    """A part of the graph that runs again and again, as long as `pred` is true before a turn.

    Args:
        pred: (), bool or uint8, on the current device, at an address that stays: whether there is
            a first turn, written on the current stream.
        run_body: called to launch one turn on the stream that is then the current one, up to torch
            2.13 twice (`_try`). It leaves in `pred` whether there is another turn.

    Raises:
        CaptureError: the current stream is not being captured, `pred` is something else, or the
            body did what a node cannot hold. PackageError: `cuda.bindings`, nvJitLink or
            `libcudadevrt.a` is missing (torch 2.11 to 2.13). What `run_body` raises is raised, with
            the body's capture ended; the capture around it is the caller's to end.
    """
    _add("WHILE", pred, run_body)


def if_node(pred: torch.Tensor, run_body: Callable[[], object]) -> None:
    """A part of the graph that runs once if `pred` is true, and else not; see `while_node`."""
    _add("IF", pred, run_body)


def prepare(device: torch.device) -> None:
    """What the first conditional node on that device needs; done here, it is not in a capture.

    Raises:
        PackageError: see `while_node`.
    """
    if not _torch_has_nodes():
        with torch.cuda.device(device):
            setter.load(torch.cuda.current_device())


class Once:
    """In place of nodes where kernels are warmed up: each body runs, once, whatever `pred` says.

    What is warmed up runs on padding, of which a loop may have no turn, and a choice takes one way;
    but in a capture no kernel may be new.
    """

    @staticmethod
    def while_node(pred: torch.Tensor, run_body: Callable[[], object]) -> None:
        """See above."""
        run_body()

    if_node = while_node


@contextlib.contextmanager
def warmed(stream: int) -> Iterator[None]:
    """Meanwhile a recorder warms up on that stream: see `Once`."""
    _WARMED.add(stream)
    try:
        yield
    finally:
        _WARMED.discard(stream)


def is_warmed(stream: int) -> bool:
    """Whether a recorder warms up on that stream now."""
    return stream in _WARMED


def is_body(stream: int) -> bool:
    """Whether a body is being captured from that stream now."""
    return stream in _OPEN


def bodies_of(graph: int) -> dict[int, int]:
    """The graph inside each conditional node of a captured graph, and of those within; told once.

    A handle of CUDA's may be another object's once its own is gone: ask when the capture ends.
    """
    found = _BODIES.pop(graph, {})
    for body in list(found.values()):
        found |= bodies_of(body)
    return found


def _torch_has_nodes() -> bool:
    return hasattr(torch.cuda.CUDAGraph, "begin_capture_to_while_node")


def _add(kind: str, pred: torch.Tensor, run_body: Callable[[], object]) -> None:
    _check(kind, pred)
    add = _by_torch if _torch_has_nodes() else _by_driver
    add(kind, pred, run_body)


def _check(kind: str, pred: torch.Tensor) -> None:
    if pred.shape != () or pred.dtype not in (torch.bool, torch.uint8) or not pred.is_cuda:
        raise CaptureError(
            f"the predicate of a {kind} node is {tuple(pred.shape)}, {pred.dtype} on "
            f"{pred.device}; it must be (), bool or uint8, on a CUDA device"
        )
    if pred.device.index != current_device():
        raise CaptureError(
            f"the predicate of a {kind} node is on {pred.device}, but the current device is "
            f"cuda:{current_device()}; a node has one device"
        )
    if not torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"a {kind} node outside of a capture: the current stream is not being captured. "
            "Outside, loop and branch in Python"
        )


# --- from torch 2.14 on ---------------------------------------------------------------------------


def _by_torch(kind: str, pred: torch.Tensor, run_body: Callable[[], object]) -> None:
    around = current_stream(current_device())
    graph: Any = torch.cuda.CUDAGraph.get_currently_capturing_graph()  # type: ignore[attr-defined]
    pred = pred.view(torch.bool)
    if kind == "WHILE":
        graph.begin_capture_to_while_node(pred)
    else:
        graph.begin_capture_to_if_node(pred)
    try:
        with _open(current_stream(current_device())):
            with contextlib.suppress(PackageError):  # only to look inside of the graph later
                _remember_node(around)
            run_body()
        if kind == "WHILE":
            graph.set_conditional_handle_for_current_node(pred)
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that the body has failed is said already
            graph.end_capture_to_conditional_node()
        raise
    try:
        graph.end_capture_to_conditional_node()
    except RuntimeError as error:
        raise CaptureError(_refused(kind, error)) from error


def _remember_node(around: int) -> None:
    """The node that the stream `around` has just been given, and the graph captured into now."""
    driver = driver_for("looking inside a CUDA graph")
    graph, (node,) = _underway(driver, around)
    body, _ = _underway(driver, current_stream(current_device()))
    _BODIES.setdefault(int(graph), {})[int(node)] = int(body)


# --- up to torch 2.13 -----------------------------------------------------------------------------


def _by_driver(kind: str, pred: torch.Tensor, run_body: Callable[[], object]) -> None:
    driver = driver_for(setter.WHAT)
    index, around = current_device(), current_stream(current_device())
    if around in _TRIED:
        run_body()
        return
    setter.load(index)
    _let_thread_allocate(index, around)
    if around not in _OPEN:
        _try(driver, kind, index, around, run_body)
    graph, _ = _underway(driver, around)
    (context,) = checked(driver, driver.cuCtxGetCurrent(), "there is no context")
    made = driver.cuGraphConditionalHandleCreate(graph, context, 0, 0)
    (handle,) = checked(driver, made, f"cannot make a handle of a {kind} node")
    setter.launch(index, around, int(handle), pred.data_ptr())
    node, body = _added_node(driver, kind, handle, context, around)
    side = _stream_beside(index, around)
    raw = driver.CUstream(init_value=side.cuda_stream)
    try:
        begun = driver.cuStreamBeginCaptureToGraph(raw, body, None, None, 0, _mode(driver))
        checked(driver, begun, f"cannot capture the body of a {kind} node")
        with torch.cuda.stream(side), _open(side.cuda_stream):
            run_body()
            if kind == "WHILE":
                setter.launch(index, side.cuda_stream, int(handle), pred.data_ptr())
    except BaseException:
        driver.cuStreamEndCapture(raw)  # whatever it says: the body has failed
        bodies_of(int(body))
        raise
    try:
        checked(driver, driver.cuStreamEndCapture(raw), "the capture of its body failed")
    except RuntimeError as error:
        bodies_of(int(body))
        raise CaptureError(_refused(kind, error)) from error
    _BODIES.setdefault(int(graph), {})[int(node)] = int(body)


def _try(driver: Any, kind: str, index: int, around: int, run_body: Callable[[], object]) -> None:
    """Capture a body, with those within it, into a graph that is thrown away.

    Where the capture of a body is broken, by a wait or a stream that was not joined, the driver
    (580) destroys the graph inside the node, and again with the graph around it: the process ends.
    So what breaks a capture is to break this one.
    """
    side = _stream_beside(index, around)
    raw = driver.CUstream(init_value=side.cuda_stream)
    begun = driver.cuStreamBeginCapture(raw, _mode(driver))
    checked(driver, begun, f"cannot capture the body of a {kind} node")
    _TRIED.add(side.cuda_stream)
    try:
        with torch.cuda.stream(side), _open(side.cuda_stream):
            run_body()
    except BaseException:
        with contextlib.suppress(RuntimeError):  # that the body has failed is said already
            _drop(driver, driver.cuStreamEndCapture(raw))
        raise
    finally:
        _TRIED.discard(side.cuda_stream)
    try:
        _drop(driver, driver.cuStreamEndCapture(raw))
    except RuntimeError as error:
        raise CaptureError(_refused(kind, error)) from error


def _drop(driver: Any, ended: tuple[Any, ...]) -> None:
    """Destroy the graph that a capture has ended with.

    Raises:
        RuntimeError: it has ended with none.
    """
    (graph,) = checked(driver, ended, "the capture of its body failed")
    checked(driver, driver.cuGraphDestroy(graph), "cannot destroy a graph")


def _mode(driver: Any) -> Any:
    return driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL


def _added_node(driver: Any, kind: str, handle: Any, context: Any, stream: int) -> tuple[Any, Any]:
    """A conditional node that comes next on `stream`, and the empty graph inside of it."""
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = handle
    params.conditional.type = getattr(
        driver.CUgraphConditionalNodeType, f"CU_GRAPH_COND_TYPE_{kind}"
    )
    params.conditional.size = 1
    params.conditional.ctx = context
    graph, after = _underway(driver, stream)
    add = newest(driver, "cuGraphAddNode", "v2")
    (node,) = checked(  # after the setter, which is an ordinary kernel: edges without data
        driver, add(graph, after, None, len(after), params), f"cannot add a {kind} node"
    )
    update = newest(driver, "cuStreamUpdateCaptureDependencies", "v2")
    flags = driver.CUstreamUpdateCaptureDependencies_flags
    instead = int(flags.CU_STREAM_SET_CAPTURE_DEPENDENCIES)
    moved = update(driver.CUstream(init_value=stream), [node], None, 1, instead)
    checked(driver, moved, f"cannot go on after a {kind} node")
    return node, params.conditional.phGraph_out[0]


def _underway(driver: Any, stream: int) -> tuple[Any, list[Any]]:
    """The graph that `stream` is being captured into, and the nodes that its next one follows."""
    info = newest(driver, "cuStreamGetCaptureInfo", "v3")(driver.CUstream(init_value=stream))
    status, _, graph, nodes, *_ = checked(driver, info, "cannot tell what is captured")
    if status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE:
        raise CaptureError("the capture around a conditional node has failed before it")
    return graph, list(nodes or ())


def _let_thread_allocate(index: int, stream: int) -> None:
    """The capture's pool takes all that this thread allocates, from now to the capture's end.

    torch gives a pool what is allocated on streams of one capture id, and a body's capture has an
    id of its own: its memory would be nobody's once it is freed here, and the next eager op's. The
    pool is that of a byte that is allocated here.
    """
    if stream in _OPEN:  # in a body: it is so already
        return
    byte = torch.empty((1,), dtype=torch.uint8, device=torch.device("cuda", index))
    at = byte.data_ptr()
    for segment in torch.cuda.memory_snapshot():
        first, size = segment["address"], segment["total_size"]
        if segment["device"] == index and first <= at < first + size:
            pool = tuple(segment["segment_pool_id"])
            break
    else:
        pool = (0, 0)
    if pool == (0, 0):
        raise CaptureError(
            "a conditional node in a capture without a pool of its own, where memory of its body "
            "could not be kept. Capture by torch.cuda.graph, with torch's native allocator"
        )
    end_allocating(index, pool)
    allocate_by_thread(index, pool)
    release_pool(index, pool)  # the graph holds it; one time more is one too many


@functools.cache
def _stream_beside(index: int, around: int) -> torch.cuda.ExternalStream:
    """The stream of bodies in what is captured from the stream `around`; the same at each capture.

    A block of memory belongs to the stream that it was freed on, as in the recorder. It is nobody
    else's, where one of torch's is handed out again after 32.
    """
    driver = driver_for(setter.WHAT)
    with relaxed(driver):
        made = driver.cuStreamCreate(int(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    (stream,) = checked(driver, made, "cannot make a stream")
    return torch.cuda.ExternalStream(int(stream), device=torch.device("cuda", index))


# --- both -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open(stream: int) -> Iterator[None]:
    _OPEN.add(stream)
    try:
        yield
    finally:
        _OPEN.discard(stream)


def _refused(kind: str, error: RuntimeError) -> str:
    return (
        f"the body of a {kind} node holds what no such node can: a stream that was forked and not "
        f"joined, work on the host, or an allocation by CUDA itself ({error})"
    )
