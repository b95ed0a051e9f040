"""Products of rows that are grouped: experts of few tokens, each with the rows that chose it.

    order, ends, back = sorted by expert, where each one's rows end, where each choice is
    hidden = silu(x[order // C] @ w_gate[group].t()) * (x[order // C] @ w_up[group].t())
    out = hidden @ w_down[group].t()

Each op's plain form is the torch ops that it stands for: that is what runs on the CPU, bit for bit,
and on CUDA where there are many rows, which is what torch's own products are good at. Few, which is
decoding, are one launch each (`triton/products/grouped.py`), which round where the plain form does.

Gradients, tangents and `torch.func` go through the plain form. Letters: T tokens, C choices of
each, N = T * C rows, X groups, I columns in, O columns out.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import grouped_mm

from fngraph.ops.fused import plain_silu_mul
from fngraph.ops.fused_linear import has_kernels
from fngraph.ops.opaque import define_op
from fngraph.ops.triton.launching import power_of_two

MOST_ROWS = 1024  # N that kernels are for
MOST_GROUPS = 1024  # X, of which a program looks at all


class GroupTile(NamedTuple):
    """What a program takes.

    Attributes:
        rows: of a group's weight, or of each of two.
        block: columns at a time.
        most: rows of the group.
        warps: of its kernel.
        stages: of loads.
    """

    rows: int
    block: int
    most: int
    warps: int
    stages: int


def tile_of(N: int, X: int, gated: bool) -> GroupTile:
    """By the numbers of rows and groups.

    Of 52 tiles none is better by more than 1% on an H100, for Qwen3-30B-A3B's experts at 1, 8 and
    64 tokens: gate and up take 22.5, 114 and 259 us, of which bytes are 16.8, 111 and 260 at 3
    TB/s, and torch's products with what is around them 42, 146 and 311.
    """
    return GroupTile(64, 128, min(power_of_two(2 * N // X, at_least=16), 64), 4, 3 if gated else 4)


def plain_group_rows(group: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The torch ops that `group_rows` stands for."""
    sorted_N, order_N = group.sort(stable=True)
    ends_X = torch.searchsorted(sorted_N, numbers, right=True).to(torch.int32)
    return order_N, ends_X, order_N.argsort()


def plain_grouped_gate(
    x: Tensor, order: Tensor, ends: Tensor, gate: Tensor, up: Tensor, chosen: int
) -> Tensor:
    """The torch ops that `grouped_gate` stands for."""
    x_NI = x[order // chosen]
    return plain_silu_mul(*(grouped_mm(x_NI, w.mT, offs=ends) for w in (gate, up)))


def plain_grouped_linear(x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    """The torch op that `grouped_linear` stands for."""
    return grouped_mm(x, weight.mT, offs=ends)


def _group_rows(group: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    if not (has_kernels(group) and 0 < group.numel() <= MOST_ROWS and numbers.numel() > 0):
        return plain_group_rows(group, numbers)
    from fngraph.ops.triton.products import grouped  # loads Triton

    return grouped.group_rows(group.contiguous(), numbers.contiguous())


def _grouped_gate(
    x: Tensor, order: Tensor, ends: Tensor, gate: Tensor, up: Tensor, chosen: int
) -> Tensor:
    N = order.shape[0]
    if not (_is_few(x, N, gate, up) and gate.shape == up.shape):
        return plain_grouped_gate(x, order, ends, gate, up, chosen)
    from fngraph.ops.triton.products import grouped  # loads Triton

    X, O, _ = gate.shape
    out = x.new_empty(N, O)
    grouped.gated(x, order.contiguous(), ends, gate, up, out, chosen, tile_of(N, X, True))
    return out


def _grouped_linear(x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    N = x.shape[0]
    if not _is_few(x, N, weight):
        return plain_grouped_linear(x, ends, weight)
    from fngraph.ops.triton.products import grouped  # loads Triton

    X, O, _ = weight.shape
    out = x.new_empty(N, O)
    grouped.linear(x, ends, weight, out, tile_of(N, X, False))
    return out


def _is_few(x: Tensor, N: int, *weights: Tensor) -> bool:
    """Whether the kernel takes these, and is the faster one."""
    if not has_kernels(x) or not 0 < N <= MOST_ROWS or x.stride(-1) != 1 or x.itemsize != 2:
        return False
    return all(w.is_contiguous() and len(w) <= MOST_GROUPS and w.dtype == x.dtype for w in weights)


def _fake_rows(group: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    order, back = (group.new_empty(group.shape, dtype=torch.int64) for _ in range(2))
    return order, numbers.new_empty(numbers.shape, dtype=torch.int32), back


def _fake_gate(
    x: Tensor, order: Tensor, ends: Tensor, gate: Tensor, up: Tensor, chosen: int
) -> Tensor:
    return x.new_empty(order.shape[0], gate.shape[1])


def _fake_linear(x: Tensor, ends: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


define_op(
    "group_rows",
    "(Tensor key, Tensor numbers) -> (Tensor, Tensor, Tensor)",
    _group_rows,
    _fake_rows,
    plain_group_rows,
)
"""key (N,) int64, the group of each row; numbers (X,) int64, those of groups, in order.

The results are the rows in order of their groups, (N,) int64, those of one in their own order; how
many are of each group or one before it, (X,) int32; and where each row is in that order, (N,)
int64.
Rows of a group behind the last number come last.
"""

define_op(
    "grouped_gate",
    "(Tensor x, Tensor order, Tensor ends, Tensor gate, Tensor up, int chosen) -> Tensor",
    _grouped_gate,
    _fake_gate,
    plain_grouped_gate,
)
"""x (T, I); order (N,) and ends (X,) of `group_rows`, N = T * chosen; gate and up (X, O, I).

The result is (N, O), in order of groups: silu of the product with a group's gate, times that with
its up. Rows of no group have whatever was there.
"""

define_op(
    "grouped_linear",
    "(Tensor x, Tensor ends, Tensor weight) -> Tensor",
    _grouped_linear,
    _fake_linear,
    plain_grouped_linear,
)
"""x (N, I), in order of groups; ends (X,) of `group_rows`; weight (X, O, I). It gives (N, O)."""
