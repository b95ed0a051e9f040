"""`CutFn`: a call of a primitive as one step of a program, with the backends that run it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fngraph.core import BatchDescriptor, HostBounds
from fngraph.ops.backend import Backend
from fngraph.ops.plan import Planner
from fngraph.ops.primitive import Primitive


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class CutFn:
    """A cut as a function: `fn(sizes, host, *tensors) -> ()`.

    Attributes:
        backend: what runs it; `uniform`, where there is one, the keys of uniform batches.
        template: the op's arguments, literals where they are, anything where tensors go.
        places: where they go, in order.
        planners: of backends that plan on the host, by name.
    """

    primitive: Primitive
    backend: Backend
    config: Any
    template: tuple[Any, ...]
    places: Sequence[int]
    uniform: Backend | None = None
    planners: Mapping[str, Planner] = dataclasses.field(default_factory=dict)

    def bind(self, tensors: Sequence[torch.Tensor]) -> Callable[..., None]:
        """The eager call over these tensors, which takes the step's bounds as `host=`."""
        args, plan = self._given(self.backend, tensors, None)
        return self.primitive.bind(self.backend, args, self.config, **plan)

    def __call__(self, sizes: Any, host: HostBounds | None, *tensors: torch.Tensor) -> tuple[()]:
        """Call it once: by the bounds, for a key that is captured in one graph, or eagerly.

        Raises:
            BackendError: the backend returned something.
        """
        key = None if host is None else host.key
        own = None if key is None or key.query_len is None else self.uniform
        backend = own or self.backend
        args, plan = self._given(backend, tensors, key)
        self.primitive.call(backend, args, self.config, host, **plan)
        return ()

    def _given(
        self, backend: Backend, tensors: Sequence[torch.Tensor], key: BatchDescriptor | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The op's arguments, and what the backend has planned, by name."""
        args = list(self.template)
        for i, tensor in zip(self.places, tensors):
            args[i] = tensor
        planner = self.planners.get(backend.name)
        return tuple(args), {} if planner is None else {"plan": planner.buffers(key)}
