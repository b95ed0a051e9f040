"""`Planner`: a backend's host-side plan at work, for all calls that share it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fngraph.core import BatchDescriptor
from fngraph.errors import BackendError
from fngraph.ops.plan import Plan


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
