"""`Plan`: what a backend works out on the host before each step, into buffers that stay.

Some libraries schedule a batch on the CPU and leave the result in device memory, where a captured
graph reads it. So there is one set of buffers for each key that is captured in one graph, made
before its capture, and one more for all eager calls.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from fngraph.core import BatchDescriptor
from fngraph.errors import BackendError


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """The host side of a backend. Calls of one configuration and the same leaves share one plan.

    Attributes:
        leaves: names of the primitive's arguments that it reads on the host. Each must be a leaf
            of the batch as it was passed to `forward`, and come in host memory: nothing waits.
        buffers: `buffers(config, sizes, key) -> Any`: what `run` gets as `plan=`. `sizes` are the
            letters' (T, R, B, ...) largest values; `key` is None for eager calls.
        fill: `fill(buffers, config, sizes, leaves)`: before each step, with the leaves of the
            batch (unpadded, on the CPU) and `sizes` of what runs: the key's, or the true ones.
    """

    leaves: tuple[str, ...]
    buffers: Callable[[Any, Mapping[str, int], BatchDescriptor | None], Any]
    fill: Callable[[Any, Any, Mapping[str, int], Sequence[Tensor]], None]

    def __post_init__(self) -> None:
        """Raise where `leaves` is one name.

        Raises:
            BackendError: so it is.
        """
        if isinstance(self.leaves, str):
            raise BackendError(f"Plan({self.leaves!r}, ...): pass a tuple, ({self.leaves!r},)")


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Planner:
    """A plan with the leaves that it reads and the buffers that it fills.

    Attributes:
        leaves: of the batch, by number; `paths` are their names.
        dims: sizes of the letters other than T and R.
        most: the largest T and R of a step.
        made: buffers of each key, and of eager calls under None.
    """

    backend: str
    plan: Plan
    config: Any
    leaves: tuple[int, ...]
    paths: tuple[str, ...]
    most: Mapping[str, int]
    made: dict[BatchDescriptor | None, Any] = dataclasses.field(default_factory=dict)

    def buffers(self, key: BatchDescriptor | None) -> Any:
        """What `run` gets; made when first asked for, which is before a capture."""
        if key not in self.made:
            sizes = dict(self.most)
            if key is not None:
                sizes |= {"T": key.num_tokens, "R": key.num_reqs or self.most["R"]}
            self.made[key] = self.plan.buffers(self.config, sizes, key)
        return self.made[key]

    def fill(
        self, key: BatchDescriptor | None, sizes: Mapping[str, int], leaves: Sequence[Tensor]
    ) -> None:
        """Plan a step.

        Args:
            leaves: all of the batch.

        Raises:
            BackendError: a leaf that is on the device; it would have to be waited for.
        """
        read = [leaves[i] for i in self.leaves]
        for path, leaf in zip(self.paths, read):
            if leaf.device.type != "cpu":
                raise BackendError(
                    f"backend {self.backend!r} plans on the host and reads {path}, which is on "
                    f"{leaf.device}. Pass it in host memory: step.host_batch(spec), or x.cpu()"
                )
        self.plan.fill(self.buffers(key), self.config, sizes, read)
