"""What torch may have active around a call that a replay would go past: both are refused."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from fngraph.core.where import user_line
from fngraph.errors import AmbientError, TransformError


def check_no_dispatch_mode() -> None:
    """Raise `AmbientError` if a dispatch mode is active, which a replay would go past."""
    if torch._C._len_torch_dispatch_stack():
        names = ", ".join(type(mode).__name__ for mode in _get_current_dispatch_mode_stack())
        raise AmbientError(
            f"the dispatch mode {names} is active, and a graph replays without it. Call forward "
            "itself under the mode, or graphify a forward that does what the mode does"
        )


def check_no_transform() -> None:
    """Raise if a `torch.func` transform goes over a whole step: it would see constants.

    Raises:
        TransformError: always then.
    """
    if torch._C._are_functorch_transforms_active():
        raise TransformError(
            f"{user_line()}: a torch.func transform goes over a graphified function, whose results "
            "are constants to it. Put the transform inside: fg.graphify(torch.func.vmap(f)), or "
            "call torch.func.grad(f) in the function that is graphified"
        )
