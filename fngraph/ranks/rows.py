"""Rows shared out over processes: sums and norms of a process's own, and products around them.

Of n processes the r-th has the r-th block of k = ceil(T / n) rows; the last have fewer, or none.
Blocks lie as what gathers or sums them wants them, so nothing is put in another order. What has a
process's own rows alone keeps its shape, and is 0 in all others: so the sum over processes is all
of it.

    total, normed = reduce_scatter_rms_norm(x, y, weight, ...)    # of own rows, each; 0 elsewhere
    h = gather_rows(normed)                                      # whole again

Passes put these ops into traced graphs (`fngraph.passes.ranks.sequence`). With a product before or
behind (`matmul_reduce_scatter_rms_norm`, `all_gather_matmul`) on CUDA both go at once, by torch's
own ops over memory that processes share, where there are rows enough, as many for each, and such
memory; else one after the other. Shape letters: T rows, n processes, k = ceil(T / n).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fngraph.ops.fused import define_fused, plain_add_rms_norm
from fngraph.ops.opaque import define_op
from fngraph.ops.side_by_side import whole_of
from fngraph.ops.symmetric import SymmetricMemory
from fngraph.ranks.collectives import WHO, refused
from fngraph.ranks.faults import failing_as, group_of
from fngraph.ranks.symmetric import shared_of
from fngraph.torch_facts.names import all_gather_into, reduce_scatter_into
from fngraph.torch_facts.symmetric import all_gather_matmul, matmul_all_to_all

OVERLAP_FROM = 512
"""Rows from which a product and a collective go at once. Over two GPUs it paid nowhere before rows
were blocks (`docs/ranks.md`); since then it has not been measured."""
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _overlapping(x: Tensor, axis: str, group: str) -> SymmetricMemory | None:
    """Memory by which a product of these rows and a collective go at once, alike in all processes;
    None: they go one after the other."""
    if not x.is_cuda or x.dim() != 2 or x.dtype not in _DTYPES or len(x) < OVERLAP_FROM:
        return None
    if len(x) % dist.get_world_size(group_of(group, axis)):
        return None
    return shared_of(axis, group)


def _sum_and_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str, group: str,
    after: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = x.reshape(-1, x.shape[-1])
    sums = _scattered(rows, axis, group)
    total, normed = _normed(sums, y.reshape(rows.shape), weight, eps, centred, axis, group)
    return total.view(x.shape), normed.view(x.shape)


def _product_sum_and_norm(
    x: Tensor, w: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str,
    group: str, after: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if shared := _overlapping(x, axis, group):
        with failing_as("matmul_reduce_scatter", axis, group):
            parts = matmul_all_to_all(x, w.t(), shared.size, group, shared.kept)
    else:
        parts = _scattered(x @ w.t(), axis, group)
    return _normed(parts, y, weight, eps, centred, axis, group)


def _gathered(x: Tensor, axis: str, group: str, after: Any = None) -> Tensor:
    with failing_as("gather_rows", axis, group) as found:
        rows = x.reshape(-1, x.shape[-1])
        own, k = _own(rows, found)
        own = pad(own, (0, 0, 0, k - len(own))).contiguous()
        out = own.new_empty(k * dist.get_world_size(found), own.shape[1])
        all_gather_into(out, own, found)
    return out[: len(rows)].view(x.shape)


def _gathered_products(
    x: Tensor, weights: Sequence[Tensor], together: Sequence[int], axis: str, group: str,
    after: Any = None,
) -> list[Tensor]:  # fmt: skip
    shared = _overlapping(x, axis, group)
    runs = _runs(weights, together)
    turned = [whole_of("weights", run).t() if len(run) > 1 else run[0].t() for run in runs]
    if shared is None:
        gathered = _gathered(x, axis, group)
        return [gathered @ w for w in turned]
    with failing_as("all_gather_matmul", axis, group) as found:
        own = _own(x, found)[0].contiguous()
        return list(all_gather_matmul(own, turned, group, shared.kept))


def _runs(weights: Sequence[Tensor], together: Sequence[int]) -> list[Sequence[Tensor]]:
    ends = list(itertools.accumulate(together))
    return [weights[end - count : end] for end, count in zip(ends, together)]


def _own(rows: Tensor, found: Any) -> tuple[Tensor, int]:
    """A process's own rows, and how many it has at most."""
    k = -(-len(rows) // dist.get_world_size(found))
    return rows[dist.get_rank(found) * k :][:k], k


def _scattered(rows: Tensor, axis: str, group: str) -> Tensor:
    """(1, k, E): the sums of a process's own rows; where it has fewer, zeros behind them."""
    with failing_as("reduce_scatter_rms_norm", axis, group) as found:
        size = dist.get_world_size(found)
        rows = pad(rows, (0, 0, 0, -len(rows) % size)).contiguous()
        out = rows.new_empty(1, len(rows) // size, rows.shape[1])
        reduce_scatter_into(out[0], rows, found)
    return out


def _normed(
    parts: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str, group: str
) -> tuple[Tensor, Tensor]:
    first = dist.get_rank(group_of(group, axis)) * parts.shape[1]
    return torch.ops.fngraph.own_rows_rms_norm(parts, y, weight, eps, centred, first)  # type: ignore[no-any-return]


def plain_own_rows_rms_norm(
    parts: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, first: int
) -> tuple[Tensor, Tensor]:
    """The sum of `parts`, (n, k, E), and of k rows of `y`, (T, E), from the `first` on, and their
    norm, `weight` (E,), each among zeros, (T, E). What is past the last row is left out."""
    others = y[first:][: parts.shape[1]]
    if not len(others):
        return torch.zeros_like(y), torch.zeros_like(y)
    own = (parts.sum(0) if len(parts) > 1 else parts[0])[: len(others)]
    total, normed = plain_add_rms_norm(own, others, weight, eps, centred)
    around = (0, 0, first, len(y) - first - len(others))
    return pad(total, around), pad(normed, around)


def _two(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _two_behind(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape)


def _one(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _several(
    x: Tensor, weights: Sequence[Tensor], together: Sequence[int], *_: Any
) -> list[Tensor]:
    runs = _runs(weights, together)
    return [x.new_empty(x.shape[0], sum(w.shape[0] for w in run)) for run in runs]


def _two_of_all(parts: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape)


_NORM = "Tensor y, Tensor weight, float eps, bool centred"
for _name, _schema, _run, _fake in (
    ("reduce_scatter_rms_norm", f"(Tensor x, {_NORM}, {WHO}) -> (Tensor, Tensor)",
     _sum_and_norm, _two),
    ("matmul_reduce_scatter_rms_norm", f"(Tensor x, Tensor w, {_NORM}, {WHO}) -> (Tensor, Tensor)",
     _product_sum_and_norm, _two_behind),
    ("gather_rows", f"(Tensor x, {WHO}) -> Tensor", _gathered, _one),
    ("all_gather_matmul", f"(Tensor x, Tensor[] weights, int[] together, {WHO}) -> Tensor[]",
     _gathered_products, _several),
):  # fmt: skip
    define_op(_name, _schema, _run, _fake, refused(_name))
define_fused(
    "own_rows_rms_norm",
    "(Tensor parts, Tensor y, Tensor weight, float eps, bool centred, int first) "
    "-> (Tensor, Tensor)",
    plain_own_rows_rms_norm, _two_of_all, module="own_rows",
)  # fmt: skip
