"""Chains of stages, for random programs: something is made, changed and read in one of many ways.

A stage takes what the one before has made, and the named values. Of most chains a few are right, a
few are refused, and one or two were accepted once and are wrong.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from rows_programs import Op
from torch import Tensor

Stage = Sequence[Callable[[Any, Any], Any]]


def chain(names: str, *stages: Stage) -> tuple[str, Op]:
    """A program through one function of each stage: `fn(value so far, named values)`."""

    def make(r: random.Random, *_: Tensor) -> Op:
        fns = [r.choice(list(stage)) for stage in stages]

        def run(*values: Tensor) -> Any:
            given = SimpleNamespace(**dict(zip(names.split(), values)))
            made = None
            for fn in fns:
                made = fn(made, given)
            return made

        return run

    return names, make


def literal(g: Any, values: Any, dtype: Any = None) -> Tensor:
    """A constant of the program."""
    return torch.tensor(values, dtype=dtype, device=g.x.device)


def counted(g: Any, *args: int, **options: Any) -> Tensor:
    """arange, where x is."""
    return torch.arange(*(args or (g.x.shape[0],)), device=g.x.device, **options)


def changed(write: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """What a write in place leaves of the value before."""

    def run(v: Any, g: Any) -> Any:
        v = v.clone()
        write(v, g)
        return v

    return run


def same(v: Any, g: Any) -> Any:
    return v
