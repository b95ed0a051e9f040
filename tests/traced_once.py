"""A trace kept for several tests: modes, sizes and counts of adapters are chosen after it."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

Kept = dict[Any, list[Any]]


@contextlib.contextmanager
def traced_once(kept: Kept, label: Any) -> Iterator[None]:
    """Within, the n-th trace is the n-th one that was made under `label`, if there is one.

    Args:
        label: stands for the functions that are traced, in order.
    """
    module: Any = importlib.import_module("fngraph.graphified")
    trace, made, numbers = module.trace_function, kept.setdefault(label, []), itertools.count()

    def once(args: Any, options: Any, limits: Any, *more: Any) -> Any:
        i = next(numbers)
        if i == len(made):
            made.append(trace(args, options, limits, *more))
        old = made[i]
        given = args.leaves, args.treedefs, limits
        assert given == (old.args.leaves, old.args.treedefs, old.limits), f"{label} is not alike"
        return dataclasses.replace(old, args=args, options=options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "trace_function", once)
        yield
