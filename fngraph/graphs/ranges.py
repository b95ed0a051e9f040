"""Named ranges around a key's work: in torch.profiler, and NVTX ones where there is CUDA.

A graph cannot hold a range, so they are on the host, around each replay. A replay without them has
no trace of them: `Replay.with_ranges` makes another one.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fngraph.graphs.inside import Node


@contextlib.contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range of this name in the profile of whatever profiler looks."""
    cuda = torch.cuda.is_available()
    with torch.profiler.record_function(name):
        if cuda:
            torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            if cuda:
                torch.cuda.nvtx.range_pop()


@dataclasses.dataclass(frozen=True, slots=True)
class RangedRecording:
    """A recording whose replays show as `name`."""

    recording: Any
    name: str

    @property
    def graph(self) -> Any:
        """The recording's graph."""
        return self.recording.graph

    @property
    def keeps(self) -> tuple[Any, ...]:
        """What the recording keeps."""
        return self.recording.keeps

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The recording's nodes."""
        return self.recording.nodes

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """The recording's edges."""
        return self.recording.edges

    def replay(self) -> None:
        """Replay in a range."""
        with named_range(self.name):
            self.recording.replay()


def in_range(name: str, fn: Callable[..., Any], *, host: Any) -> Any:
    """`fn(host=host)` in a range."""
    with named_range(name):
        return fn(host=host)
