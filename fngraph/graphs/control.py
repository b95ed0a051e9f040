"""Who records right now, and so holds loops: the tape, a CUDA capture, or nobody."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from fngraph.errors import PackageError
from fngraph.graphs.tape.mode import TapeMode
from fngraph.torch_facts.names import dispatch_modes


def recording_control(device: torch.device) -> Any:
    """The one that records on this thread; None: ops run as they are called.

    Either has `while_node(pred, run_body)` and `if_node(pred, run_body)`, which take a function
    that launches a body. `pred` is bool () at an address that stays, read at replay; the body of a
    while leaves the next one there.

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
        return conditional
    with contextlib.suppress(PackageError):  # a capture says so; NONE needs nothing
        conditional.prepare(device)
    return None
