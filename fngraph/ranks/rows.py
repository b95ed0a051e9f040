"""Rows shared out over processes: sums and norms of a process's own, and products around them.

Of n processes the r-th has rows r, r + n, r + 2n, ...: whose a row is depends on its place alone,
not on how many there are, nor on padding behind them. What has a process's own rows alone keeps its
shape, and is 0 in all others: so the sum over processes is all of it.

    total, normed = reduce_scatter_rms_norm(x, y, weight, ...)    # of own rows, each; 0 elsewhere
    h = gather_rows(normed)                                      # whole again

Passes put these ops into traced graphs (`fngraph.passes.ranks.sequence`). With a product before or
behind (`matmul_reduce_scatter_rms_norm`, `all_gather_matmul`) on CUDA both go at once, by torch's
own ops over memory that processes share, where there are rows enough, as many for each, and such
memory; else one after the other. Shape letters: T rows, n processes, k = ceil(T / n).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from fngraph.ops.opaque import define_op
from fngraph.ops.symmetric import SymmetricMemory
from fngraph.ranks.collectives import WHO, refused
from fngraph.ranks.faults import failing_as, group_of
from fngraph.ranks.symmetric import shared_of
from fngraph.torch_facts.names import all_gather_into, reduce_scatter_into
from fngraph.torch_facts.symmetric import all_gather_matmul, matmul_reduce_scatter

OVERLAP_FROM = 512
"""Rows from which a product and a collective go at once; not measured."""
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
    own = _scattered(rows, axis, group)
    total, normed = _normed(own, y.reshape(rows.shape), weight, eps, centred, axis, group)
    return total.view(x.shape), normed.view(x.shape)


def _product_sum_and_norm(
    x: Tensor, w: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str,
    group: str, after: Any = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    if shared := _overlapping(x, axis, group):
        by_process = _by_process(x, axis, group).flatten(0, 1)
        with failing_as("matmul_reduce_scatter", axis, group):
            own = matmul_reduce_scatter(by_process, w.t(), group, shared.kept)
    else:
        own = _scattered(x @ w.t(), axis, group)
    return _normed(own, y, weight, eps, centred, axis, group)


def _gathered(x: Tensor, axis: str, group: str, after: Any = None) -> Tensor:
    with failing_as("gather_rows", axis, group) as found:
        size, rank = dist.get_world_size(found), dist.get_rank(found)
        rows = x.reshape(-1, x.shape[-1])
        own = rows[rank::size]
        k = -(-len(rows) // size)
        own = pad(own, (0, 0, 0, k - len(own))).contiguous()
        out = own.new_empty(size * k, own.shape[1])
        all_gather_into(out, own, found)
    return _in_order(out, size, len(rows)).view(x.shape)


def _gathered_products(
    x: Tensor, weights: Sequence[Tensor], axis: str, group: str, after: Any = None
) -> list[Tensor]:
    shared = _overlapping(x, axis, group)
    if shared is None:
        whole = _gathered(x, axis, group)
        return [whole @ w.t() for w in weights]
    own = x[shared.rank :: shared.size].contiguous()
    with failing_as("all_gather_matmul", axis, group):
        made = all_gather_matmul(own, [w.t() for w in weights], group, shared.kept)
    return [_in_order(one, shared.size, len(x)) for one in made]


def _by_process(rows: Tensor, axis: str, group: str) -> Tensor:
    """(T, E) as (n, k, E), filled up with zeros."""
    size = dist.get_world_size(group_of(group, axis))
    rows = pad(rows, (0, 0, 0, -len(rows) % size))
    return rows.unflatten(0, (-1, size)).transpose(0, 1).contiguous()


def _in_order(rows: Tensor, size: int, count: int) -> Tensor:
    """(n * k, E), each process's behind the other, as (T, E)."""
    return rows.unflatten(0, (size, -1)).transpose(0, 1).flatten(0, 1)[:count].contiguous()


def _scattered(rows: Tensor, axis: str, group: str) -> Tensor:
    """(k, E): the sums of a process's own rows."""
    parts = _by_process(rows, axis, group)
    out = parts.new_empty(parts.shape[1:])
    with failing_as("reduce_scatter_rms_norm", axis, group) as found:
        reduce_scatter_into(out, parts.flatten(0, 1), found)
    return out


def _normed(
    own: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, axis: str, group: str
) -> tuple[Tensor, Tensor]:
    """Own rows of a sum, those of y added, and their norm, each among zeros."""
    found = group_of(group, axis)
    size, rank = dist.get_world_size(found), dist.get_rank(found)
    others = y[rank::size]
    made = torch.ops.fngraph.add_rms_norm(own[: len(others)], others, weight, eps, centred)
    total, normed = y.new_zeros(y.shape), y.new_zeros(y.shape)
    for into, one in zip((total, normed), made):
        into[rank::size] = one
    return total, normed


def _two(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _two_behind(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), y.new_empty(y.shape)


def _one(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _several(x: Tensor, weights: Sequence[Tensor], *_: Any) -> list[Tensor]:
    return [x.new_empty(x.shape[0], w.shape[0]) for w in weights]


_NORM = "Tensor y, Tensor weight, float eps, bool centred"
for _name, _schema, _run, _fake in (
    ("reduce_scatter_rms_norm", f"(Tensor x, {_NORM}, {WHO}) -> (Tensor, Tensor)",
     _sum_and_norm, _two),
    ("matmul_reduce_scatter_rms_norm", f"(Tensor x, Tensor w, {_NORM}, {WHO}) -> (Tensor, Tensor)",
     _product_sum_and_norm, _two_behind),
    ("gather_rows", f"(Tensor x, {WHO}) -> Tensor", _gathered, _one),
    ("all_gather_matmul", f"(Tensor x, Tensor[] weights, {WHO}) -> Tensor[]", _gathered_products,
     _several),
):  # fmt: skip
    define_op(_name, _schema, _run, _fake, refused(_name))
