"""Who records right now, and so holds loops: the tape, a CUDA capture, or nobody."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import torch

from fngraph.errors import PackageError
from fngraph.graphs.tape.mode import TapeMode
from fngraph.torch_facts.names import dispatch_modes


class Control(Protocol):
    """Takes functions that launch a body; their predicates are read at replay.

    A predicate is bool () at an address that stays; a body that a WHILE node repeats leaves the next
    one there.
    """

    def while_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """Replay what `run_body` launches as long as `pred` holds."""

    def if_node(self, pred: torch.Tensor, run_body: Callable[[], None]) -> None:
        """Replay what `run_body` launches if `pred` holds."""


def recording_control(device: torch.device) -> Control | None:
    """The one that records on this thread; None: ops run as they are called.

    Args:
        device: that of a loop's tensors. Outside a capture it is made ready for one there.
    """
    for mode in dispatch_modes():
        if isinstance(mode, TapeMode):
            return mode
    if device.type != "cuda":
        return None
    from fngraph.graphs.cuda import conditional  # loads cuda.bindings

    if torch.cuda.is_current_stream_capturing():
        found: Any = conditional
        return found  # type: ignore[no-any-return]
    with contextlib.suppress(PackageError):  # a capture says so; NONE needs nothing
        conditional.prepare(device)
    return None
