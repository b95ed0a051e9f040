"""What no graph can hold, said alike by both recorders, and a look at each op of a CUDA capture.

CUDA fails a capture that waits for the device, without a word about the op; and work on a stream
that is not part of the capture is done once, there and then, and left out of the graph.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import CodeType, TracebackType
from typing import Any

import torch

from fngraph.core.where import is_user, short_path, user_line
from fngraph.errors import CaptureError
from fngraph.graphs.cuda.conditional import is_body
from fngraph.torch_facts.names import OpOverload, TorchDispatchMode, current_stream
from fngraph.torch_facts.schemas import SYNCS, is_composite, is_view

aten = torch.ops.aten
_COPIES = {aten.copy_.default, aten._to_copy.default}


def check_no_read(func: Any, args: Any, kwargs: Mapping[str, Any], within: CodeType) -> None:
    """Raise `CaptureError` if an op brings a value, or a shape made of values, back to the host.

    Args:
        within: the recorder's own code: the user's line is looked for inside of it.
    """
    if func not in SYNCS and torch.Tag.dynamic_output_shape not in func.tags:
        return
    if func is aten.index.Tensor and not any(
        x is not None and x.dtype in (torch.bool, torch.uint8) for x in args[1]
    ):  # it carries the tag for boolean masks
        return
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return
    raise CaptureError(
        f"{op_at(func, within)} reads a value back to the host, which a graph cannot hold. "
        "Keep it on the device: torch.where(condition, a, b)"
    )


def check_no_wait(func: Any, args: Any, kwargs: dict[str, Any], within: CodeType) -> None:
    """Raise `CaptureError` if an op copies between host and device and waits for it."""
    if func not in _COPIES:
        return
    if func is aten.copy_.default:
        into, source = args[:2]
        host = into if into.device.type == "cpu" else source
        there = {into.device.type, source.device.type}
        waits = not ((args[2:] or [kwargs.get("non_blocking")])[0] and host.is_pinned())
    else:
        (source,), into = args, torch.device(kwargs.get("device") or args[0].device)
        there = {into.type, source.device.type}
        waits = not (kwargs.get("non_blocking") and (into.type == "cpu" or source.is_pinned()))
    if waits and "cpu" in there and len(there) == 2:
        raise CaptureError(
            f"{op_at(func, within)} copies between host and device and waits for it, which a graph "
            "cannot hold. Copy before the step; or from and to pinned memory that stays: "
            "x.copy_(pinned, non_blocking=True)"
        )


class Witness(TorchDispatchMode):
    """Over a CUDA capture: each op is looked at before it runs.

    Args:
        within: the recorder's own code.

    Attributes:
        aside: the last op on a stream other than the capture's own, with its line.
    """

    def __init__(self, device: torch.device, within: CodeType) -> None:
        super().__init__()
        self.index, self.within = device.index, within
        self.stream = current_stream(self.index)
        self.aside = ""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, OpOverload):
            if is_composite(func):  # inference tensors bring composite ops in one part
                with self:
                    return func.decompose(*args, **kwargs)
            check_no_read(func, args, kwargs, self.within)
            check_no_wait(func, args, kwargs, self.within)
        stream = current_stream(self.index)
        if stream != self.stream and not is_body(stream) and not is_view(func):
            self.aside = op_at(func, self.within)
            if not torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"{self.aside} runs on a stream that is not part of the capture: it would run "
                    "now, and never again. Fork the stream and join it: "
                    "s.wait_stream(torch.cuda.current_stream()) before its first op, "
                    "torch.cuda.current_stream().wait_stream(s) after its last"
                )
        return func(*args, **kwargs)


def op_at(func: Any, within: CodeType) -> str:
    """`model.py:12: aten.item`: the op, and the user's line that called it inside a recording."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not within:
        if is_user(frame):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}: {func}"
        frame = frame.f_back  # type: ignore[assignment]
    return str(func)


def raised_at(traceback: TracebackType | None) -> str:
    """The user's line of an exception, "" if no line of theirs is between here and there."""
    line = user_line(traceback) if traceback is not None else "<"
    return "" if line.startswith("<") else line
