"""The `cuda` recorder: `torch.cuda.CUDAGraph` on one pool and one capture stream.

One stream for the life of the pool: blocks belong to the stream that they were freed on, and a new
stream for each capture took 4.9 GB where one takes 256 MB (51 sizes of a 1B model on an H200).
`thread_local` error mode, so that another thread's CUDA call does not end the capture.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fngraph.core.collector import without_collector
from fngraph.errors import CaptureError, FnGraphError
from fngraph.graphs.cuda.conditional import bodies_of, warmed
from fngraph.graphs.cuda.nodes import read
from fngraph.graphs.inside import Node
from fngraph.graphs.loans import Loans
from fngraph.graphs.recorder import Usage, describe
from fngraph.graphs.turn import PoolTurn
from fngraph.graphs.witness import Witness
from fngraph.torch_facts.names import end_allocating, launch_graph, release_pool, storage_at

_CAPTURING = threading.RLock()
"""One thread captures at a time: a wait for the device in another, which `recording` begins with,
would end the capture, whatever its pool."""
_ABANDONED: list[torch.cuda.CUDAGraph] = []  # see CudaRecorder._abandon


class CudaRecorder:
    """Captures on `device` into one private pool."""

    name = "cuda"
    lazy_kernels = True

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise CaptureError(
                f'recorder "cuda" cannot record on {device}; move the model to a CUDA device, '
                'or use recorder="tape"'
            )
        index = device.index if device.index is not None else torch.cuda.current_device()
        self.device = torch.device("cuda", index)
        self.loans = Loans()
        with torch.cuda.device(self.device):
            self.pool = torch.cuda.graph_pool_handle()
            self.stream = torch.cuda.Stream()
        self.turn = PoolTurn(self.device)
        self._anchor: torch.cuda.CUDAGraph | None = None  # holds the pool while no other graph does
        self._open: torch.cuda.CUDAGraph | None = None
        self._entered = False

    def __repr__(self) -> str:
        return f"CudaRecorder({self.device})"

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run `fn` on the capture stream, ordered after and before the caller's work.

        The body of a loop runs once there, and so do both ways of a choice.
        """
        with torch.cuda.device(self.device):
            self.stream.wait_stream(torch.cuda.current_stream())
            try:
                with torch.cuda.stream(self.stream), warmed(self.stream.cuda_stream):
                    fn()
            finally:  # or what undoes a failed warm-up would run before it
                torch.cuda.current_stream().wait_stream(self.stream)

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """The capture stream, no garbage collection, and a device at rest before and after.

        A graph is captured in 0.7 ms, and each of these would cost it 10 us and more; and to free
        an old graph's memory would end the capture. Collection is off rather than frozen:
        `gc.unfreeze` would also free what the caller has frozen.
        """
        if self._entered:
            yield
            return
        self._entered = True
        try:
            with _CAPTURING, torch.cuda.device(self.device), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                torch.cuda.synchronize()
                with torch.cuda.stream(self.stream), torch.no_grad(), without_collector():
                    try:
                        yield
                    finally:
                        self._end_stray()
                        self.stream.synchronize()  # copies made for a graph may be replayed at once
        finally:
            self._entered = False

    def record(
        self,
        fn: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        watched: bool = True,
        keeps: tuple[Any, ...] = (),
    ) -> tuple[CudaRecording, Any]:
        """See `Recorder.record`."""
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("record() inside a capture; graphs do not nest")
        graph = new_graph(generators, keep_graph=True)  # to look inside; in host memory
        failure: BaseException | None = None
        result = None
        with self.recording():
            if self._anchor is None:
                self._anchor = self._capture_nothing()
            witness = Witness(self.device, sys._getframe().f_code) if watched else None
            self._open = graph
            try:
                graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
                with witness or contextlib.nullcontext():
                    result = fn()
            except BaseException as error:
                failure = error
            try:
                graph.capture_end()
                if failure is None:
                    graph.instantiate()
            except RuntimeError as error:  # what fn did has invalidated the capture
                if witness and witness.aside and not failure:
                    error.add_note(f"the last op on another stream is {witness.aside}")
                failure = failure or error
                self._abandon(graph, generators)
            self._open = None
        if failure is not None:
            traceback.clear_frames(failure.__traceback__)  # or it keeps the pool's memory alive
            if not isinstance(failure, Exception):
                raise failure
            if isinstance(failure, FnGraphError):
                raise failure
            raise CaptureError(f"the capture failed: {describe(failure)}") from failure
        return CudaRecording(graph, keeps, bodies_of(graph.raw_cuda_graph())), result

    def _end_stray(self) -> None:
        """End a capture that an interrupt has left open, between `record`'s own lines."""
        graph, self._open = self._open, None
        if graph is not None and torch.cuda.is_current_stream_capturing():
            try:
                graph.capture_end()
            except RuntimeError:
                self._abandon(graph, ())

    def usage(self) -> Usage:
        """What torch has reserved, and the rest of what the device has given away, to anybody."""
        stats = torch.cuda.memory_stats_as_nested_dict(self.device)
        reserved = int(stats["reserved_bytes"]["all"]["current"]) if stats else 0
        free, total = torch.cuda.mem_get_info(self.device)
        return Usage(reserved, total - free - reserved)

    def synchronize(self) -> None:
        """Wait for the whole device: a graph may run on any stream."""
        torch.cuda.synchronize(self.device)

    def renew(self) -> None:
        """See `Recorder.renew`. torch frees a pool's memory once no graph is in it, and gives it to
        the device when its cache is emptied."""
        self._anchor = None
        with torch.cuda.device(self.device):
            self.pool = torch.cuda.graph_pool_handle()
            torch.cuda.empty_cache()

    def _abandon(self, graph: torch.cuda.CUDAGraph, generators: Sequence[torch.Generator]) -> None:
        """Undo what a failed `capture_end` leaves behind up to torch 2.13, as far as one can.

        A throwaway pool for each risky capture would keep the good one whole, but every mode's
        largest key would be captured twice. This way a failure costs that later keys do not share
        memory with earlier ones; largest first, what fails is mostly the first, and costs nothing.

        The device's allocator goes on allocating into the pool, which is ended here. So does the
        allocator of pinned memory, which cannot be told; hence a new pool for what comes, and
        the graph is kept, since that allocator points into it. The random generator believes
        that it is being captured until a capture ends well, as the anchor's does.
        """
        assert self.device.index is not None
        try:
            end_allocating(self.device.index, self.pool)
        except RuntimeError:  # a torch that has cleaned up by itself
            return
        release_pool(self.device.index, self.pool)
        _ABANDONED.append(graph)
        self.pool = torch.cuda.graph_pool_handle()
        self._anchor = self._capture_nothing(generators)

    def _capture_nothing(self, generators: Sequence[torch.Generator] = ()) -> torch.cuda.CUDAGraph:
        graph = new_graph(generators)
        with torch.cuda.device(self.device), torch.cuda.stream(self.stream):
            one = torch.zeros(1, device=self.device)
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            one.zero_()  # an empty graph would warn
            graph.capture_end()
        return graph

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """See `Recorder.unowned`. The storage is built over the bare address."""
        if tensor.numel() == 0:
            return tensor
        storage = tensor.untyped_storage()
        bare = storage_at(storage.data_ptr(), tensor.device, storage.nbytes())
        alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        return alias.set_(bare, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclasses.dataclass(frozen=True, slots=True)
class CudaRecording:
    """One captured graph.

    Attributes:
        keeps: see `Recorder.record`.
        bodies: the graph inside each of its conditional nodes, by CUDA's addresses of both.
    """

    graph: torch.cuda.CUDAGraph
    keeps: tuple[Any, ...] = dataclasses.field(default=(), repr=False)
    bodies: Mapping[int, int] = dataclasses.field(default_factory=dict, repr=False)

    @property
    def replay(self) -> Callable[[], None]:
        """Launch it on the current stream. (Past torch's Python wrapper, which takes 0.3 us.)"""
        return functools.partial(launch_graph, self.graph)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """See `Recording.nodes`."""
        return read(self.graph.raw_cuda_graph(), self.bodies)[0]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """See `Recording.edges`."""
        return read(self.graph.raw_cuda_graph(), self.bodies)[1]


def new_graph(
    generators: Sequence[torch.Generator], keep_graph: bool = False
) -> torch.cuda.CUDAGraph:
    """A new graph, whose replays draw from `generators`."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.inference_mode(False):  # it keeps a tensor for each, which every replay writes
        for generator in generators:
            graph.register_generator_state(generator)
    return graph
