"""The sum of each process's rows, the addition and the RMSNorm behind it, as one op.

    total = all_reduce(x) + y;  normed = RMSNorm(total) * weight

The pass `all_reduce_rms_norm` puts it into a traced graph. On the CPU it is the ops that it stands
for, bit for bit; on CUDA one kernel over memory of all processes, where they have such
(`fngraph.ranks.symmetric`) and the rows are few enough (`fngraph.ops.symmetric`), else the
collective, and a kernel for the rest.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.opaque import define_op
from fngraph.ops.symmetric import APART
from fngraph.ranks.collectives import WHO, reduced, refused
from fngraph.ranks.symmetric import shared_of

SCHEMA = f"(Tensor x, Tensor y, Tensor weight, float eps, bool centred, {WHO}) -> (Tensor, Tensor)"


def _run(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str, group: str,
    after: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if x.is_cuda and x.numel() and (shared := shared_of(axis, group)) is not None:
        width = x.shape[-1]
        way = shared.way(x.numel() // width, width * x.element_size())
        if way != APART:
            return _kernel()(x, y, weight, eps, centred, shared, way)  # type: ignore[no-any-return]
    total = reduced(x, "sum", axis, group)
    return torch.ops.fngraph.add_rms_norm(total, y, weight, eps, centred)  # type: ignore[no-any-return]


@functools.cache
def _kernel() -> Any:
    from fngraph.ops.triton.reducing import all_reduce_rms_norm  # loads Triton

    return all_reduce_rms_norm


def _two(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


define_op("all_reduce_rms_norm", SCHEMA, _run, _two, refused("all_reduce_rms_norm"))
