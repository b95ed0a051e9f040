"""A run of a function for the shapes of what it gives alone: what it writes is put back."""

from __future__ import annotations

from typing import Any

from fngraph.torch_facts.memory import storage_key
from fngraph.torch_facts.names import OpOverload, TorchDispatchMode
from fngraph.torch_facts.schemas import written
from fngraph.torch_facts.tracing import FakeTensor


class Trial(TorchDispatchMode):
    """Meanwhile memory may be written; afterwards it holds what it held before."""

    def __init__(self) -> None:
        super().__init__()
        self._before: dict[int, tuple[Any, Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for x in written(func, args, kwargs) if isinstance(func, OpOverload) else ():
            if not isinstance(x, FakeTensor) and storage_key(x) not in self._before:
                storage = x.untyped_storage()
                self._before[storage_key(x)] = storage, storage.clone()
        return func(*args, **kwargs)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for storage, before in self._before.values():
            storage.copy_(before)
