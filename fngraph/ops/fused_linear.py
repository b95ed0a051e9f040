"""A linear layer with what is around it in one op: norm before, gate or sum behind.

    y = norm(x) @ [w_q; w_k; w_v].t()          silu(norm(x) @ w_gate.t()) * (norm(x) @ w_up.t())
    y = x @ w_o.t() + residual

Its plain form is the torch ops that it stands for in their order, and what runs on the CPU, bit for
bit. On CUDA few rows, which is decoding, are one launch (`triton/products/skinny.py`); of up to 64
a gate is one too, as is a product alone of weights with many rows, and a sum two
(`triton/products/wide.py`). All else is matrix products by torch between the kernels of `fused.py`.
Each rounds where the plain form rounds, but for the norm's scale, which few rows apply to the sums,
and adds up in another order.

Gradients, tangents and `torch.func` go through the plain form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fngraph.ops.fused import plain_rms_norm, plain_silu_mul
from fngraph.ops.opaque import define_op
from fngraph.ops.side_by_side import as_one, why_apart
from fngraph.ops.triton.launching import missing, power_of_two, processors, shared_bytes

MOST_WEIGHTS = 3  # that one launch reads
FEW_ROWS = 8  # of input, up to which the norm is made on the way: half of a tensor core's tile
MOST_ROWS = 64  # that kernels are for; beyond, `for_many_rows` is as fast

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_OPS = torch.ops.fngraph


class Tile(NamedTuple):
    """What a program takes.

    Attributes:
        rows: of a weight.
        block: columns at a time.
        warps: of its kernel.
        parts: into which the columns are cut on tensor cores, with `block` columns each at a time;
            0: without tensor cores.
        stages: of loads, on tensor cores.
    """

    rows: int
    block: int
    warps: int
    parts: int = 0
    stages: int = 4


class WideTile(NamedTuple):
    """What a program takes of up to 64 rows of input.

    Attributes:
        rows: of a weight, or of each of two.
        block: columns at a time.
        split: parts of the columns, each with programs of its own.
        warps: of its kernel.
        stages: of loads.
    """

    rows: int
    block: int
    split: int
    warps: int
    stages: int


def tile_of(
    T: int, K: int, gated: bool, normed: bool, itemsize: int = 2, adds: bool = False
) -> Tile | None:
    """By static shapes and bytes of an element; None: what is faster otherwise.

    On an H200, TB/s of weights, ours and cuBLAS's alone, for Llama-1B's and 8B's layers: one row
    2.6 to 4.5 and 1.4 to 4.3. A layer of 1B takes 59 us at 8 rows, and 72 with a product by torch
    before a residual; one of 8B takes 158 at two rows, and 190 without tensor cores. With q, k and
    v in tiles of 16 rows of 4096 a step of 8B takes 4.41 ms at 8, 4.47 by cuBLAS, which lets
    attention ask for no keys meanwhile, and 4.50 in tiles of 32: 192 leave processors idle.
    """
    if T > FEW_ROWS or (T > 1 and K > 2048 and normed and not gated):
        return None
    if T == 1:
        return _tile_of_one(K, gated, normed)
    wide = lambda block: min(block * 2 // itemsize, power_of_two(-(-K // 4), at_least=16))  # noqa: E731
    if K > 2048 and not gated and not adds:
        return Tile(16, wide(128), 4, 4)
    if T == 2 and not gated and K <= (2048 if normed else 8192):
        tile = Tile(2, 2048, 4) if normed else Tile(4 if K >= 4096 else 2, 1024, 4)
        return tile._replace(block=min(tile.block, power_of_two(K)))
    if K > 8192:
        return Tile(16, wide(128), 4, 4)
    if gated:
        return Tile(32, wide(64), 4, 4)
    return Tile(32, wide(128), 4, 4) if normed else Tile(16, wide(256), 4, 4)


def _tile_of_one(K: int, gated: bool, normed: bool) -> Tile:
    """Rows of 4096 are read as a whole before the wait, which spares a step of Llama-8B a tenth on
    an H200; one of 1B, with rows of 2048, is no faster so."""
    whole = power_of_two(K)
    if whole > 4096:
        return Tile(2, 2048, 4) if whole == 8192 else Tile(4, 2048, 8)
    if whole <= 2048:
        return Tile(2, min(2048 if gated else 1024, whole), 4)
    return Tile(2, whole, 8) if gated else Tile(2 if normed else 1, whole, 4)


def wide_of(
    T: int, K: int, N: int, gated: bool, device: torch.device, itemsize: int = 2, sums: bool = True
) -> WideTile | None:
    """Likewise for a gate, a sum, or neither, by N rows; None: what torch's product is for.

    On an H200, us at 64 rows, ours and cuBLAS's with what is around it (a sum, its addition and its
    norm; a gate): Llama-1B down 12.8 and 19.8, attention's 6.0 and 9.8, gate and up 19.5 and 22.1;
    8B 34.6 and 42.7, 13.6 and 16.1, 62.6 and 66.2. With its down so for one row too, a step of the
    8B takes 5.44 ms on an H100, and 5.49 in one launch. With q, k and v of 8B by it 5.59 ms at 64
    rows on an H200, and 5.64 by cuBLAS; those of 1B leave most processors without a tile.
    """
    least = 1 if K > _LONG_ROW and not gated else 2
    if not least <= T <= MOST_ROWS or K < _LEAST_PART or itemsize != 2:
        return None
    tiles, split = -(-N // _WIDE_ROWS), 1
    if not (gated or sums) and (K <= 2048 or 3 * tiles < 2 * processors(device)):
        return None
    while sums and not gated and split < 8 and tiles * split * 2 <= processors(device):
        if K // (split * 2) < _LEAST_PART:
            break
        split *= 2
    row_bytes = (_WIDE_ROWS * (1 + gated) + power_of_two(T, at_least=16)) * itemsize
    stages = min(4 if gated else 6, shared_bytes(device) * 9 // 10 // (row_bytes * _WIDE_BLOCK))
    if stages < 2:
        return None
    return WideTile(_WIDE_ROWS, _WIDE_BLOCK, split, 4, stages)


_WIDE_ROWS, _WIDE_BLOCK = 64, 128
_LEAST_PART = 512  # columns
_LONG_ROW = 8192  # columns, beyond which a sum of one row whose norm follows is faster in parts too


def plain(
    x: Tensor, weights: Sequence[Tensor], norm: Tensor | None, more: Tensor | None, eps: float,
    centred: bool, gated: bool, held: bool = False, together: bool = False,
) -> Tensor:  # fmt: skip
    """The torch ops that the op stands for."""
    if norm is not None:
        x = plain_rms_norm(x, norm, eps, centred)
    made = [x @ w.t() for w in weights]
    return _around(made, more, gated)


def for_many_rows(
    x: Tensor, weights: Sequence[Tensor], norm: Tensor | None, more: Tensor | None, eps: float,
    centred: bool, gated: bool, held: bool = False, together: bool = False,
) -> Tensor:  # fmt: skip
    """The same for Inductor, which fuses the rest; with one product of weights side by side."""
    if not together:
        return plain(x, weights, norm, more, eps, centred, gated)
    if norm is not None:
        x = plain_rms_norm(x, norm, eps, centred)
    whole = _OPS.linear_side_by_side(x, list(weights), [])
    if not gated:
        return _around([whole], more, gated)
    return _around(list(whole.split([w.shape[0] for w in weights], 1)), more, gated)


def _around(made: list[Tensor], more: Tensor | None, gated: bool) -> Tensor:
    y = plain_silu_mul(*made) if gated else made[0] if len(made) == 1 else torch.cat(made, 1)
    return y if more is None else y + more


def run(
    x: Tensor, weights: list[Tensor], norm: Tensor | None, more: Tensor | None, eps: float,
    centred: bool, gated: bool, held: bool, together: bool,
) -> Tensor:  # fmt: skip
    """What the op does."""
    if not has_kernels(x):
        return plain(x, weights, norm, more, eps, centred, gated).contiguous()
    x, more = dense_rows(x), None if more is None else dense_rows(more)
    if norm is not None and x.dtype == torch.float16:  # in which x * norm may overflow
        x, norm = _OPS.rms_norm(x, norm, eps, centred), None
    tile = few_of(x, weights, norm, more, gated)
    if tile is None and norm is not None:
        x, norm = _OPS.rms_norm(x, norm, eps, centred), None
        tile = few_of(x, weights, norm, more, gated)
    if tile is not None:
        from fngraph.ops.triton.products import skinny  # loads Triton

        out = x.new_empty(x.shape[0], weights[0].shape[0] if gated else _columns(weights))
        skinny.run(x, weights, norm, more, out, eps, tile, centred=centred, gated=gated, held=held)
        return out
    if (wide := wide_tile(x, weights, more, gated)) is None:
        return _by_torch(x, weights, more, gated)
    from fngraph.ops.triton.products import wide as kernels  # loads Triton

    if more is not None:
        return kernels.summed(x, weights[0], more, None, 0.0, False, wide)[0]
    return kernels.product(x, weights if gated else [as_one(weights)], wide)


def has_kernels(x: Tensor) -> bool:
    """Whether there are kernels where a tensor lies."""
    return x.is_cuda and missing("cuda") is None


def dense_rows(x: Tensor) -> Tensor:
    """x (T, N), of rows whose elements lie side by side."""
    return x if x.stride(-1) == 1 else x.contiguous()


def few_of(
    x: Tensor, weights: Sequence[Tensor], norm: Tensor | None, more: Tensor | None, gated: bool
) -> Tile | None:
    """The tile of one launch that does it all, if that is the fastest."""
    if not _is_plain(x, weights):
        return None
    (T, K), adds = x.shape, more is not None
    return tile_of(T, K, gated, norm is not None, x.itemsize, adds)


def wide_tile(
    x: Tensor, weights: Sequence[Tensor], more: Tensor | None, gated: bool
) -> WideTile | None:
    """The tile of a gate, of a sum, or of a product alone, if that is the fastest."""
    adds = more is not None
    if not _is_plain(x, weights) or (adds and (gated or len(weights) > 1)):
        return None
    (T, K), N = x.shape, weights[0].shape[0] if gated else _columns(weights)
    tile = wide_of(T, K, N, gated, x.device, x.itemsize, sums=adds)
    return tile if tile is None or gated or why_apart(weights) is None else None


def _is_plain(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether the kernel takes these."""
    alike = all(w.dtype == x.dtype and w.is_contiguous() for w in weights)
    return alike and x.dtype in _DTYPES and 0 < len(weights) <= MOST_WEIGHTS and x.numel() > 0


def _columns(weights: Sequence[Tensor]) -> int:
    return sum(w.shape[0] for w in weights)


def _by_torch(x: Tensor, weights: list[Tensor], more: Tensor | None, gated: bool) -> Tensor:
    """Matrix products by torch: one, if the weights lie side by side."""
    out = x.new_empty(x.shape[0], _columns(weights))
    if why_apart(weights) is None:
        torch.mm(x, as_one(weights).t(), out=out)
    else:
        for part, w in zip(out.split([w.shape[0] for w in weights], 1), weights):
            torch.mm(x, w.t(), out=part)
    if gated:
        out = _OPS.silu_mul(*out.chunk(2, 1))
    return out if more is None else out.add_(more)


def _fake(
    x: Tensor, weights: list[Tensor], norm: Tensor | None, more: Tensor | None, eps: float,
    centred: bool, gated: bool, held: bool, together: bool,
) -> Tensor:  # fmt: skip
    return x.new_empty(x.shape[0], weights[0].shape[0] if gated else _columns(weights))


define_op(
    "fused_linear",
    "(Tensor x, Tensor[] weights, Tensor? norm, Tensor? more, float eps, bool centred, bool gated, "
    "bool held, bool together) -> Tensor",
    run,
    _fake,
    plain,
)
"""x (T, K); up to three weights (N, K), all of its dtype; the result is (T, sum of N).

norm: (K,), of an RMSNorm of x with `eps`; with `centred` its weight is 1 + norm.
more: (T, N), added.
gated: of two weights, silu of the one times the other; the result is (T, N).
held: whether nothing writes the weights in the graph that this is recorded in, so that a kernel may
    read them before the one ahead of it has finished. A pass knows; if in doubt: False.
together: whether the weights lay side by side when that was traced: compiled for many rows, the op
    is one product of them then.
"""
