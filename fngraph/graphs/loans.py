"""Borrowed results under guards: poisoned when the next call of the pool begins, and said so.

    y, cache = decode(cache, batch)       # a `Borrowed`, over the step's own output buffer
    x, cache = prefill(cache, other)      # of the same pool: y now holds poison
    y + 1                                 # StaleError

A view of a borrowed result expires with it; what is computed from one is a plain tensor.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from fngraph.errors import StaleError
from fngraph.torch_facts.memory import storage_addresses, storage_key
from fngraph.torch_facts.names import DisableTorchFunctionSubclass, tree_leaves, tree_map


@dataclasses.dataclass(eq=False)
class Loan:
    """What one call has lent.

    Attributes:
        by: the function and its call, "decode (call 3 of the pool)".
        tensors: as lent, without guard.
        expired_by: the call, or "sleep()", that expired it; None: it is good.
    """

    by: str
    tensors: list[torch.Tensor]
    expired_by: str | None = None

    def check(self) -> None:
        """Raise `StaleError` if it has expired."""
        if self.expired_by is not None:
            raise StaleError(
                f"this result of {self.by} was borrowed, and {self.expired_by} has expired it. "
                'Keep a copy before the next call, x.clone(), or capture with outputs="own"'
            )


@dataclasses.dataclass(eq=False)
class Loans:
    """The loans of one pool. `generation` counts the calls of its guarded functions."""

    generation: int = 0
    running: list[Loan] = dataclasses.field(default_factory=list)

    def begin(self, name: str) -> None:
        """A call of the function `name` begins: all that was lent is poisoned."""
        self.generation += 1
        self._expire(self.running, self._call_of(name))

    def expire(self, outputs: Iterable[torch.Tensor], by: str) -> None:
        """What is lent of these buffers is poisoned, before `by` takes or overwrites them."""
        memory = storage_addresses(outputs)
        self._expire([x for x in self.running if storage_addresses(x.tensors) & memory], by)

    def _expire(self, loans: list[Loan], by: str) -> None:
        for loan in loans:
            loan.expired_by = by
            for tensor in loan.tensors:
                poison(tensor)
        self.running = [x for x in self.running if x.expired_by is None]

    def lend(self, name: str, results: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """The results as `Borrowed`, until the next call begins."""
        loan = Loan(self._call_of(name), list(results))
        self.running.append(loan)
        return [borrowed(tensor, loan) for tensor in loan.tensors]

    def _call_of(self, name: str) -> str:
        return f"{name} (call {self.generation} of the pool)"

    def storages(self) -> set[int]:
        """Addresses of the memory that is lent."""
        return storage_addresses(x for loan in self.running for x in loan.tensors)


def poison(tensor: torch.Tensor) -> None:
    """NaN in floats; the least number in signed ints, the largest in others: no row, no token."""
    dtype = tensor.dtype
    value: Any = float("nan")
    if dtype is torch.bool:
        value = True
    elif not (dtype.is_floating_point or dtype.is_complex):
        info = torch.iinfo(dtype)
        value = info.min or info.max
    with torch.inference_mode(tensor.is_inference()), torch.no_grad():
        tensor.fill_(value)


_TENSOR: Any = torch.Tensor
_HARMLESS = {_TENSOR.shape.__get__, _TENSOR.dtype.__get__, _TENSOR.device.__get__,
             _TENSOR.ndim.__get__, _TENSOR.layout.__get__, _TENSOR.size, _TENSOR.dim,
             _TENSOR.numel, _TENSOR.__len__}  # fmt: skip


class Borrowed(torch.Tensor):
    """A result that is good until the next call of its pool; later, its use is a `StaleError`."""

    is_plain_memory = True  # see fx.leaves: an argument may be one
    _loan: Loan

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Borrowed)]
        loans = {x.__dict__["_loan"] for x in given}
        if func is _TENSOR.__repr__ and any(loan.expired_by for loan in loans):
            return "<a borrowed result that has expired>"
        if func not in _HARMLESS:
            for loan in loans:
                loan.check()
        with DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
            memory = {storage_key(x): x.__dict__["_loan"] for x in given}

            def guarded(x: Any) -> Any:
                if not isinstance(x, torch.Tensor) or isinstance(x, Borrowed):
                    return x
                loan = memory.get(storage_key(x))
                return x if loan is None else borrowed(x, loan)

            return tree_map(guarded, result)


def borrowed(tensor: torch.Tensor, loan: Loan) -> Borrowed:
    """The same memory, guarded."""
    made = tensor.as_subclass(Borrowed)
    made._loan = loan
    return made
