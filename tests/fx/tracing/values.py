"""A function of one value over the toys, traced: what several test files plant things in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import toys

import fngraph as fg

Value = Callable[[Any, Any, Any], Any]


def rows(p: Any, b: Any) -> torch.Tensor:
    """The tokens' embeddings."""
    return p["w"][b.token_ids]


def trace(value: Value) -> Any:
    """The trace of a forward that returns `value(p, s, b)` and the state as it was."""
    fast = fg.graphify(
        lambda p, s, b: (value(p, s, b), s), donate="s", stage="b", limits=toys.LIMITS
    )
    return fast.trace(toys.tally_params(), toys.tally_state(), batch=toys.batch(2))
