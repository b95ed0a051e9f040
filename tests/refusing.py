"""Functions to be given what is wrong, and how an error is asked for."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import toys

import fngraph as fg
from fngraph import errors

WEIGHT = torch.ones(toys.E)
GOOD: dict[str, Any] = {"donate": "cache", "stage": "batch", "limits": toys.LIMITS,
                        "sizes": toys.SIZES}  # fmt: skip


def attend(**options: Any) -> tuple[Any, Any, Any]:
    """`toys.attend` of one layer, its weights and its cache."""
    fast = fg.graphify(toys.attend, **GOOD | options)
    return fast, toys.attention_params(1), toys.attention_cache(1)


def tally() -> Any:
    """`toys.tally` over the toys' limits."""
    return fg.graphify(toys.tally, donate="state", stage="batch", limits=toys.LIMITS)


@contextlib.contextmanager
def refused(kind: type, builtin: type, words: list[str]) -> Iterator[None]:
    """An error of that class and builtin base, whose message has these words."""
    with pytest.raises(errors.FnGraphError) as caught:
        yield
    assert type(caught.value) is kind and isinstance(caught.value, builtin)
    assert [w for w in words if w not in str(caught.value)] == [], str(caught.value)


TREE, SPEC = (errors.TreeError, TypeError), (errors.SpecError, ValueError)
CLOSURE, SYNC = (errors.ClosureError, RuntimeError), (errors.HostSyncError, RuntimeError)
SIZES, DONATION = (errors.SizesError, ValueError), (errors.DonationError, ValueError)
BACKEND, MODES = (errors.BackendError, LookupError), (errors.ModesError, ValueError)

x43, w44 = torch.rand(3, 4).add_(4), torch.rand(4, 4)


def exact(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """One call of a function of exact shapes."""
    return fg.graphify(forward, **{"stage": "x"} | options)(*args)
