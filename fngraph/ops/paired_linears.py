"""A linear layer, a sum, its RMSNorm and the linear layers that read that, in one op.

    total = x @ weight.t() + more           of attention, or of the mlp before
    y = norm(total) @ [w_q; w_k; w_v].t()   or the gate of two, silu(.) * .

A decoder is a row of these between its attentions. In one op, since who makes the norm depends on
the number of rows: for few it is the second layer, on the way (`fused_linear`); for more, and for a
long one, it is what puts the parts of the sum together (`triton/products/wide.py`), and beyond
these what adds `more` (`triton/fused.py`). Rounding is `fused_linear`'s.

Gradients, tangents and `torch.func` go through the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fngraph.ops import fused_linear
from fngraph.ops.fused_linear import FEW_ROWS, dense_rows, has_kernels, wide_tile
from fngraph.ops.opaque import define_op

_OPS = torch.ops.fngraph


def plain(
    x: Tensor, weight: Tensor, more: Tensor, norm: Tensor, weights: Sequence[Tensor], eps: float,
    centred: bool, gated: bool, together: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The torch ops that the op stands for."""
    total = fused_linear.plain(x, [weight], None, more, 0.0, False, False)
    return total, fused_linear.plain(total, weights, norm, None, eps, centred, gated)


def for_many_rows(
    x: Tensor, weight: Tensor, more: Tensor, norm: Tensor, weights: Sequence[Tensor], eps: float,
    centred: bool, gated: bool, together: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same for Inductor; see `fused_linear.for_many_rows`."""
    total = fused_linear.plain(x, [weight], None, more, 0.0, False, False)
    again = (centred, gated, True, together)
    return total, fused_linear.for_many_rows(total, weights, norm, None, eps, *again)


def _run(
    x: Tensor, weight: Tensor, more: Tensor, norm: Tensor, weights: list[Tensor], eps: float,
    centred: bool, gated: bool, together: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    after = (eps, centred, gated, True, together)
    T, E = x.shape[0], weight.shape[0]
    on_the_way = not has_kernels(x) or (1 < T <= FEW_ROWS and E <= 2048)
    tile = None if on_the_way else wide_tile(x, [weight], more, False)
    if on_the_way or (tile is None and T <= 1):
        total = fused_linear.run(x, [weight], None, more, 0.0, False, False, True, False)
        return total, fused_linear.run(total, weights, norm, None, *after)
    x, more = dense_rows(x), dense_rows(more)
    if tile is not None:
        from fngraph.ops.triton.products import wide  # loads Triton

        total, normed = wide.summed(x, weight, more, norm, eps, centred, tile)
    else:
        total, normed = _OPS.add_rms_norm(x @ weight.t(), more, norm, eps, centred)
    return total, fused_linear.run(normed, weights, None, None, *after)


def _fake(
    x: Tensor, weight: Tensor, more: Tensor, norm: Tensor, weights: list[Tensor], eps: float,
    centred: bool, gated: bool, together: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    columns = weights[0].shape[0] if gated else sum(w.shape[0] for w in weights)
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], columns)


define_op(
    "paired_linears",
    "(Tensor x, Tensor weight, Tensor more, Tensor norm, Tensor[] weights, float eps, "
    "bool centred, bool gated, bool together) -> (Tensor, Tensor)",
    _run,
    _fake,
    plain,
)
"""x (T, K), weight (E, K), more (T, E), norm (E,), up to three weights (N, E), all of one dtype.
The results are (T, E) and (T, sum of N), or (T, N) if gated.

Nothing writes the weights in the graph that this is recorded in (`held` of `fused_linear`); eps,
centred, gated and together are as there.
"""
