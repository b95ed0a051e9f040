"""What a recorder is: the two implementations are `cuda` and `tape`, with one conformance suite.

A recorder owns one memory pool. `record(fn)` calls `fn` once and keeps what it would do to the
device, without doing it: buffers that `fn` writes stay as they were, and what it returns holds
nothing until the first replay. Memory that dies inside `fn` serves later recordings of the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from fngraph.graphs.inside import Node
from fngraph.graphs.loans import Loans
from fngraph.graphs.turn import PoolTurn
from fngraph.graphs.witness import raised_at


class Recording(Protocol):
    """What was recorded; `replay()` does it again, into the same memory."""

    @property
    def replay(self) -> Callable[[], None]: ...

    @property
    def keeps(self) -> tuple[Any, ...]:
        """What it needs and does not own itself; see `Recorder.record`."""
        ...

    @property
    def graph(self) -> Any:
        """The thing itself, to look at: a `torch.cuda.CUDAGraph`, or the tape's list of ops."""
        ...

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Its nodes, read when asked. `PackageError` on CUDA without `cuda.bindings`."""
        ...

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(from, to) by index into `nodes`: what waits for what (cuda), or reads it (tape)."""
        ...


CHUNK = 16 << 20
"""Bytes that the driver may take for a graph at a time; the next graphs then take nothing."""


class Usage(NamedTuple):
    """Bytes in use; two looks differ by what was done between them.

    Attributes:
        pool: by this process's allocator that pools belong to.
        other: of the device by anything else: graphs first of all, and other processes, whose
            memory CUDA does not tell apart.
    """

    pool: int
    other: int

    def graphs_since(self, before: Usage, estimate: Callable[[], int]) -> int:
        """What graphs have taken since `before`: what the device has given, unless that is far
        beyond `estimate`. It is another process's then, and the estimate stands.

        Args:
            estimate: asked only where what was given needs an explanation.
        """
        given = max(self.other - before.other, 0)
        if given <= CHUNK or given <= 4 * (likely := estimate()):
            return given
        return likely


@runtime_checkable
class Recorder(Protocol):
    """Records functions on one device and one pool.

    Attributes:
        lazy_kernels: whether a kernel's first run does what a recording may not hold.
    """

    name: str
    device: torch.device
    loans: Loans  # of borrowed results, where functions are guarded
    lazy_kernels: bool
    turn: PoolTurn

    def warm_up(self, fn: Callable[[], Any]) -> None:
        """Run `fn` for real, so that lazy set-up happens outside of a recording."""
        ...

    def record(
        self,
        fn: Callable[[], Any],
        generators: Sequence[torch.Generator] = (),
        watched: bool = True,
        keeps: tuple[Any, ...] = (),
    ) -> tuple[Recording, Any]:
        """The recording of `fn`, and what `fn` returned.

        Args:
            generators: those that `fn` draws from; each replay draws anew.
            watched: look at each op, to name one that a graph would drop or that waits for the
                device, and its line; else only what the device itself refuses is refused.
            keeps: lives as long as the recording: what it reads and writes by a bare address, or
                calls by a handle. Memory of the pool is not meant.

        Raises:
            CaptureError: `fn` did what a graph cannot hold, or raised. Nothing is left behind.
        """
        ...

    def recording(self) -> AbstractContextManager[None]:
        """What one or many calls of `record` need about them; entered once it costs once."""
        ...

    def usage(self) -> Usage:
        """Memory in use now."""
        ...

    def synchronize(self) -> None:
        """Wait until the device is done: what it runs must not be freed."""
        ...

    def renew(self) -> None:
        """Record into a new pool from now on, and give unused memory back to the device.

        The old pool lives on with the recordings that it has, and goes with the last of them.
        """
        ...

    def unowned(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, without keeping it: the pool may give it to a later recording."""
        ...


WAITS = ("operation not permitted when stream is capturing", "during CUDA graph capture")
"""What CUDA and torch say of an op that waits for the device, or for a copy from or to the host."""


def describe(error: BaseException) -> str:
    """An exception's first line, with the op and the user's line that it came from; and what to do
    where a capture cannot hold the op."""
    first = (str(error) or type(error).__name__).partition("\n")[0]
    notes = list(getattr(error, "__notes__", ()))
    line = "" if notes else raised_at(error.__traceback__)
    told = ", ".join([first, *notes, *([f"at {line}"] if line and line not in first else [])])
    if any(text in first for text in WAITS):
        told += (
            ". torch waits for the device in this op, which no graph can hold: call it outside of "
            "the step, or run the step in mode NONE"
        )
    return told
