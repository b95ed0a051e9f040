"""Work beside the steps: one piece at a time, in a thread that is started for it and ends with it.

torch lets go of Python's lock inside each op, so steps go on meanwhile. On CUDA it launches on a
stream of its own, behind what the caller had launched, and has waited for that when it ends: then
nobody reads the copies any more, and their memory may serve the caller's stream again.

The thread is no daemon: an interpreter that ends waits for it, some ms, since torch may not be
taken down under an op. It holds what it works on, never the step.
"""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Aside(Generic[T]):
    """At most one piece of work that goes on beside the steps."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: threading.Thread | None = None
        self._found: list[T] = []
        self._stream: torch.cuda.Stream | None = None

    def begin(self, work: Callable[[], T], done: Callable[[T], None]) -> None:
        """Have it done. What was begun before must have been taken.

        Args:
            work: raises nothing. It sees the caller's context variables.
            done: is told of the result, in that thread, before anybody can take it.
        """
        assert self._thread is None, "take() what was begun before"
        found: list[T] = []
        behind = self._behind_the_caller()

        def run() -> None:
            with behind:
                made = work()
            found.append(made)
            done(made)

        context = contextvars.copy_context()
        thread = threading.Thread(target=context.run, args=(run,), name="fngraph verify")
        self._thread, self._found = thread, found
        try:
            thread.start()
        except RuntimeError:  # no more threads, or the interpreter is ending
            context.run(run)

    def wait(self) -> None:
        """Until nothing goes on."""
        thread = self._thread
        if thread is not None and thread.ident is not None and not self.is_here():
            thread.join()

    def take(self) -> list[T]:
        """Wait, and take the result; nothing if nothing was begun, or a fork has ended it."""
        self.wait()
        found, self._thread, self._found = self._found, None, []
        return found

    def is_here(self) -> bool:
        """Whether this is the thread that does it."""
        return self._thread is threading.current_thread()

    def _behind_the_caller(self) -> contextlib.AbstractContextManager[None]:
        """To be entered in the thread: what it launches follows what the caller has launched."""
        if self.device.type != "cuda":
            return contextlib.nullcontext()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        launched = torch.cuda.current_stream(self.device).record_event()
        return _on(self._stream, launched)


@contextlib.contextmanager
def _on(stream: torch.cuda.Stream, after: torch.cuda.Event) -> Iterator[None]:
    """Launch on `stream`, behind an event; at the end all of it is done."""
    with torch.cuda.stream(stream):
        stream.wait_event(after)
        try:
            yield
        finally:
            stream.synchronize()
