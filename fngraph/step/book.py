"""What is kept of a step's keys beside their replays: rules, memory, failures, what is warm."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from typing import NamedTuple

from fngraph.core import BatchDescriptor, Mode
from fngraph.core.memory import Bytes
from fngraph.errors import CaptureError, SleepError
from fngraph.graphs.memory import Emptied

Key = tuple[Mode, BatchDescriptor]


@dataclasses.dataclass(frozen=True)
class Rules:
    """How keys are kept.

    Attributes:
        memory_budget: bytes that the pool and all graphs may take together; None: anything.
        on_failure: of a key that cannot be captured: "raise", or serve it "eager".

    Raises:
        CaptureError: values that mean nothing.
    """

    memory_budget: int | None = None
    on_failure: str = "raise"

    def __post_init__(self) -> None:
        if self.on_failure not in ("raise", "eager"):
            raise CaptureError(f'on_failure={self.on_failure!r}: "raise" or "eager"')
        budget = self.memory_budget
        if budget is not None and (type(budget) is not int or budget < 0):
            raise CaptureError(f"memory_budget={budget!r}: a number of bytes, 2 << 30, or None")


class Asleep(NamedTuple):
    """What `wake` brings back: the keys that were captured, and memory with its bytes."""

    keys: tuple[Key, ...]
    emptied: Emptied


@dataclasses.dataclass(eq=False)
class Book:
    """The state of a step's keys.

    Attributes:
        measured: memory of each captured key.
        pool: bytes that the pool has grown to for this step.
        failed: why a key is served eagerly.
        warm: kinds of kernels that have run, each with the key that they ran for.
        asleep: set while the step sleeps.
    """

    rules: Rules
    measured: dict[Key, Bytes] = dataclasses.field(default_factory=dict)
    pool: int = 0
    failed: dict[Key, str] = dataclasses.field(default_factory=dict)
    warm: dict[Hashable, Key] = dataclasses.field(default_factory=dict)
    asleep: Asleep | None = None

    @property
    def total(self) -> int:
        """Bytes of the pool and of all graphs."""
        return self.pool + sum(item.graph for item in self.measured.values())

    def check_awake(self) -> None:
        """Raise `SleepError` while the step sleeps."""
        if self.asleep is not None:
            raise SleepError(
                "the step sleeps: its graphs and static buffers are given back. Call step.wake()"
            )
