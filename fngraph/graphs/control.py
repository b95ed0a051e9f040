"""Who records right now, and so holds loops: the tape, a CUDA capture, or nobody."""

from __future__ import annotations

from typing import Any

import torch

from fngraph.graphs.tape.mode import TapeMode
from fngraph.torch_facts.names import dispatch_modes


def recording_control(device: torch.device) -> Any:
    """The one that records on this thread, or warms up for that; None: ops run as they are called.

    Each has `while_node(pred, run_body)` and `if_node(pred, run_body)`, which take a function that
    launches a body. `pred` is bool () at an address that stays, read at replay; the body of a while
    leaves the next one there.

    Args:
        device: that of a loop's tensors. A warm-up makes it ready for a capture.
    """
    for mode in dispatch_modes():
        if isinstance(mode, TapeMode):
            return mode
    if device.type != "cuda":
        return None
    from fngraph.graphs.cuda import conditional

    if torch.cuda.is_current_stream_capturing():
        return conditional
    if conditional.is_warmed(torch.cuda.current_stream(device).cuda_stream):
        conditional.prepare(device)
        return conditional.Once
    return None
