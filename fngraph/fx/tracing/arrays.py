"""Literals, and those that stay in an array's memory: `torch.from_numpy(a)`, `torch.as_tensor(a)`.

A trace takes their numbers once. An array that Python changes after an op has read it, or a write
through the tensor that Python would find in the array, a graph does not do again.
"""

from __future__ import annotations

from typing import Any

import torch

from fngraph.errors import PurityError
from fngraph.fx.tracing.api import CallsMode
from fngraph.fx.tracing.refusals import Refusals
from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import without_modes

_FIX = "Make the tensor of a copy: torch.tensor(array)"


class Arrays:
    """What one trace has taken out of arrays.

    Attributes:
        shared: keys of the storages that stand for an array's memory.
    """

    def __init__(self) -> None:
        self.shared: set[int] = set()
        self._taken: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def take(self, line: str, calls: CallsMode, literal: torch.Tensor) -> torch.Tensor:
        """A literal of the call that `calls` is in, with the numbers that it has by now: an index
        is in an array's memory too, and `torch.tensor` copies that only later."""
        with without_modes():
            now = literal.clone()
        if calls.shares_array:
            self._taken.append((line, literal, now))
        return now

    def note(self, calls: CallsMode, result: Any) -> None:
        """`result` stands for the literal from here on."""
        if calls.shares_array:
            self.shared.add(storage_key(result))

    def written(self, line: str, func: Any) -> PurityError:
        """The error about an op that writes one of them."""
        return PurityError(
            f"{line}: forward writes into a tensor that shares its memory with an array ({func}), "
            f"which a graph would leave as it is. {_FIX}"
        )

    def check(self, refuse: Refusals) -> None:
        """Refuse each array that is another than when it was taken."""
        for line, literal, before in self._taken:
            with without_modes():
                same = bool(((literal == before) | (literal != literal)).all())
            if not same:
                refuse(
                    PurityError(
                        f"{line}: forward changes an array after it has made a tensor of it here, "
                        f"in the same memory, and a graph has the numbers of one moment. {_FIX}"
                    )
                )
