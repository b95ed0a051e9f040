"""`Moment`: what a call came under and read besides its copies, to run `forward` later as then.

What torch keeps by thread (gradients, inference mode, autocast) is set again in another thread.
What it keeps for all (default dtype, precision, determinism, choices of kernels) is the user's to
change meanwhile, and so are held leaves, whose `_version` tells of writes. Neither is put back: a
run that has met a change says nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

import torch

from fngraph.fx.tracing.ambient import Ambient, read
from fngraph.shadow.saved import held_of
from fngraph.step.keys import Keys

SWITCHED = "another state of torch was set before it had been compared"
WRITTEN = "held leaves were written or replaced before it had been compared"


@dataclasses.dataclass(frozen=True, eq=False)
class Moment:
    """A call's surroundings.

    Attributes:
        ambient: of the caller.
        autocast: its dtype by type of device, where it is on.
        held: leaves as the caller's containers had them; while they live, no other is where one is.
        versions: how often each had been written, and where it was.
    """

    ambient: Ambient
    autocast: dict[str, torch.dtype]
    held: dict[int, torch.Tensor]
    versions: list[tuple[int, int]]

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Meanwhile this thread is under what the caller was under."""
        with contextlib.ExitStack() as stack:
            for device, dtype in self.autocast.items():
                stack.enter_context(torch.autocast(device, dtype))
            stack.enter_context(torch.inference_mode(self.ambient.inference))
            stack.enter_context(torch.set_grad_enabled(self.ambient.grad))
            yield

    def changed(self, keys: Keys) -> str:
        """What is not as it was then; "" if all is. Asked for within `entered`."""
        if read(keys.shared.recorder.device.type) != self.ambient:
            return SWITCHED
        return "" if _versions(held_of(keys)) == self.versions else WRITTEN


def moment_of(keys: Keys) -> Moment | None:
    """This moment; None where it cannot be met again: function modes are active, the current device
    is another, or held leaves are inference tensors, whose writes torch does not count.

    Raises:
        TreeError: a container of another structure than was bound.
    """
    device = keys.shared.recorder.device.type
    ambient, held = read(device), held_of(keys)
    if ambient.modes or not keys.shared.recorder.turn.is_here():
        return None
    if any(x.is_inference() for x in held.values()):
        return None
    devices = {device, "cpu"} - {"meta"}  # which has no autocast
    on = {d: torch.get_autocast_dtype(d) for d in devices if torch.is_autocast_enabled(d)}
    return Moment(ambient, on, held, _versions(held))


def _versions(held: dict[int, torch.Tensor]) -> list[tuple[int, int]]:
    return [(x._version, x.data_ptr()) for x in held.values()]
