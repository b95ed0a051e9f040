"""What one trace has refused so far. The trace owns the list; no `except` of forward's hides it.

The first refusal is raised where it is found, and once more at the end. `fg.check` wants all of
them: there nothing is raised, and the trace goes on with a stand-in value.

Values with which a trace goes on after a refusal (`fg.check`): of the right type, no more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from fngraph.errors import FnGraphError
from fngraph.torch_facts.names import tree_map


class Refusals:
    """Errors in the order of the trace.

    Args:
        go_on: note errors and raise none.
    """

    def __init__(self, go_on: bool = False) -> None:
        self.go_on = go_on
        self.errors: list[FnGraphError] = []
        self.sizes: Any = None  # knows torch's names of T and R

    def __call__(self, error: FnGraphError) -> None:
        """Note `error`, and raise it unless the trace is to go on."""
        if self.sizes is not None:
            error.args = (self.sizes.spell(str(error)),)
        self.errors.append(error)
        if not self.go_on:
            raise error

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Note what a check raises, and go past that check if the trace is to go on."""
        try:
            yield
        except FnGraphError as error:
            if not any(error is known for known in self.errors):
                self(error.with_traceback(None))
            elif not self.go_on:
                raise

    def raise_first(self) -> None:
        """Raise the first refusal, which forward may have swallowed."""
        if self.errors and not self.go_on:
            raise self.errors[0].with_traceback(None) from None


def scalar(tensor: torch.Tensor) -> Any:
    """What `.item()` might give."""
    if tensor.dtype is torch.bool:
        return True
    return 1j if tensor.is_complex() else 1.0 if tensor.is_floating_point() else 1


def array(tensor: torch.Tensor) -> Any:
    """What `.numpy()` might give."""
    import numpy

    return numpy.full([example(n) for n in tensor.shape], scalar(tensor))


def example(size: Any) -> int:
    """A size as the number that it is in the example; 2 where it depends on values."""
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return 2 if hint is None else int(hint)


def fixed(result: Any) -> Any:
    """Fresh tensors in place of those whose shapes depend on values."""
    return tree_map(
        lambda x: x.new_empty([example(n) for n in x.shape]) if torch.is_tensor(x) else x, result
    )
