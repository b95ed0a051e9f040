"""Side streams in `forward`. A trace has one stream, in program order: that joins what was forked.

So `with torch.cuda.stream(s):` is noted and changes nothing. What asks the device where it is
(`synchronize`, `query`, `elapsed_time`) has an answer that a graph could only freeze.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fngraph.core.where import is_user, user_line
from fngraph.errors import HostSyncError, PurityError
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.names import current_stream

_STANDINS = {"query": True, "elapsed_time": 0.0}  # for a trace that goes on
_ASKING: list[tuple[Any, str]] = [
    (owner, name)
    for owner, names in (
        (torch.cuda, "synchronize"), (torch.cpu, "synchronize"), (torch.accelerator, "synchronize"),
        (torch.cuda.Stream, "synchronize query"),
        (torch.cuda.Event, "synchronize query elapsed_time"),
    )
    for name in names.split()
]  # fmt: skip
_ENTERING: list[tuple[Any, str]] = [
    (owner, "__enter__")
    for owner in (torch.cuda.StreamContext, torch.cpu.StreamContext, torch.cuda.Stream)
]


class Streams:
    """The side streams of one trace.

    Attributes:
        lines: where `forward` goes to one.
    """

    def __init__(self, refuse: Refusals) -> None:
        self.refuse = refuse
        self.lines: list[str] = []
        self.known = {raw_stream()}

    def look(self, line: str) -> None:
        """Before an op: a stream that was gone to unseen, as by `with torch.Stream():`."""
        if (raw := raw_stream()) not in self.known:
            self.known.add(raw)
            self.lines.append(line)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """The user's own calls meanwhile, on this thread, are refused or noted."""
        thread = threading.get_ident()

        def seen(original: Callable[..., Any], do: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if threading.get_ident() != thread or not is_user(sys._getframe(1)):
                    return original(*args, **kwargs)
                return do(original, args, kwargs)

            call.__name__ = original.__name__
            return call

        with contextlib.ExitStack() as stack:
            for owner, name in _ASKING:
                stack.enter_context(_replaced(owner, name, lambda f: seen(f, self._ask)))
            for owner, name in _ENTERING:
                stack.enter_context(_replaced(owner, name, lambda f: seen(f, self._enter)))
            stack.enter_context(_replaced(torch.cuda, "set_stream", lambda f: seen(f, self._set)))
            yield

    def _ask(self, original: Any, args: Any, kwargs: Any) -> Any:
        self.refuse(
            HostSyncError(
                f"{user_line()}: forward asks how far the device is ({original.__name__}), and a "
                "graph would freeze the answer. Wait, and measure, around the call"
            )
        )
        return _STANDINS.get(original.__name__)

    def _enter(self, original: Any, args: Any, kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        if getattr(args[0], "stream", args[0]) is not None:
            self.known.add(raw_stream())
            self.lines.append(user_line())
        return result

    def _set(self, original: Any, args: Any, kwargs: Any) -> Any:
        self.refuse(
            PurityError(
                f"{user_line()}: forward sets the current stream and leaves it set, which a graph "
                "would not do again. For a part: with torch.cuda.stream(s):"
            )
        )


@contextlib.contextmanager
def _replaced(owner: Any, name: str, by: Callable[[Any], Any]) -> Iterator[None]:
    """`owner.name` is another function meanwhile. One that `owner` inherits is put back as such."""
    original = getattr(owner, name, None)
    if original is None:
        yield
        return
    own = name in vars(owner)
    setattr(owner, name, by(original))
    try:
        yield
    finally:
        if own:
            setattr(owner, name, original)
        else:
            delattr(owner, name)


def raw_stream() -> int:
    """The current stream of the current CUDA device; 0 where none is in use."""
    if not torch.cuda.is_initialized():
        return 0
    return current_stream(torch.cuda.current_device())
