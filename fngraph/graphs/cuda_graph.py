"""One `torch.cuda.CUDAGraph`: made, launched, looked into."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

import torch

from fngraph.graphs.cuda_nodes import read
from fngraph.graphs.inside import Node


@dataclasses.dataclass(frozen=True, slots=True)
class CudaRecording:
    """One captured graph."""

    graph: torch.cuda.CUDAGraph

    @property
    def replay(self) -> Callable[[], None]:
        """Launch it on the current stream. (Past torch's Python wrapper, which takes 0.3 us.)"""
        return functools.partial(torch._C._CUDAGraph.replay, self.graph)

    @property
    def nodes(self) -> tuple[Node, ...]:
        """See `Recording.nodes`."""
        return read(self.graph.raw_cuda_graph())[0]

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """See `Recording.edges`."""
        return read(self.graph.raw_cuda_graph())[1]


def new_graph(
    generators: Sequence[torch.Generator], keep_graph: bool = False
) -> torch.cuda.CUDAGraph:
    """A new graph, whose replays draw from `generators`."""
    graph = torch.cuda.CUDAGraph(keep_graph=keep_graph)
    with torch.inference_mode(False):  # it keeps a tensor for each, which every replay writes
        for generator in generators:
            graph.register_generator_state(generator)
    return graph
