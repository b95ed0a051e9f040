"""The recorder of a name, for a device: `cuda` or `tape`."""

from __future__ import annotations

import torch

from fngraph.errors import CaptureError
from fngraph.graphs.cuda.recorder import CudaRecorder
from fngraph.graphs.recorder import Recorder
from fngraph.graphs.tape.recorder import TapeRecorder


def make_recorder(name: str | Recorder | None, device: torch.device) -> Recorder:
    """The recorder called `name` for `device`; None is "cuda" on CUDA, else "tape".

    Raises:
        CaptureError: an unknown name, or one that cannot record on this device.
    """
    check_name(name)
    if isinstance(name, Recorder):
        if name.device.type != device.type or device.index not in (None, name.device.index):
            raise CaptureError(f"{name.name!r} records on {name.device}, arguments are on {device}")
        return name
    name = name or ("cuda" if device.type == "cuda" else "tape")
    return TapeRecorder(device) if name == "tape" else CudaRecorder(device)


def check_name(name: str | Recorder | None) -> None:
    """Raise `CaptureError` unless `name` is a recorder, the name of one, or None."""
    if not isinstance(name, Recorder) and name not in (None, "cuda", "tape"):
        raise CaptureError(f'recorder={name!r} is unknown; there are "cuda" and "tape"')
