"""Turns: steps on one pool go one at a time, each after the one before, from any thread or stream.

A graph's memory is the pool's, so two steps of it may never overlap: on the host a lock keeps them
apart, on the device a step on another stream than the last one's waits for that stream's work.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator

import torch

from fngraph.errors import CaptureError
from fngraph.torch_facts.names import current_device, current_stream, is_capturing


class PoolTurn:
    """Whose turn it is on one pool.

    Attributes:
        lock: held for a whole step, and for a capture.
        current: the handle of the caller's stream; always 0 on the CPU.
        capturing: whether a capture is going on there.
        stream: of the last step; None before the first.
    """

    def __init__(self, device: torch.device) -> None:
        self.lock = threading.RLock()
        self.device = device
        self.stream: int | None = None
        self.current: Callable[[], int] = int
        self.capturing: Callable[[], bool] = bool
        if device.type == "cuda":
            self.capturing = is_capturing
            self.current = functools.partial(current_stream, device.index)

    def is_here(self) -> bool:
        """Whether the caller's current device is the pool's, as launches of Triton's want it."""
        return self.device.type != "cuda" or current_device() == self.device.index

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Work between two steps, on the caller's stream: after the last one, alone."""
        with self.lock:
            stream = self.current()
            if stream != self.stream or self.capturing():
                self.order(stream)
            yield

    def order(self, stream: int) -> None:
        """Go on from `stream`, once what the last step launched elsewhere is done.

        Raises:
            CaptureError: a capture of the caller's own is going on there.
        """
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                capturing = torch.cuda.is_current_stream_capturing()
            if capturing:
                raise CaptureError(
                    "a step inside a capture of your own: it takes its batch from the host, which "
                    "a graph would not do again. Call it outside, or graphify the whole"
                )
            if self.stream is not None:
                last = torch.cuda.ExternalStream(self.stream, device=self.device)
                torch.cuda.current_stream(self.device).wait_stream(last)
        self.stream = stream
