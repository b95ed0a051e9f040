"""Norms and gates whose result is rounded to fp8, as a product in fp8 reads it: one op each.

Each stands for the op of `fngraph.ops.fused` that it is named after and one of `fngraph.ops.fp8`
behind it: `..._fp8` by a scale that is known before, `quantize_fp8`; `..._fp8_rows` by one that
each row makes of itself, `quantize_fp8_rows`. What is rounded has been rounded to the model's dtype
first, as between the two ops. On the CPU the two run in their order, bit for bit; on CUDA a kernel
of Triton's does all in one launch (`triton/fused.py`), with the rounding of both. The norm or gate
itself is no result: where somebody else reads it, the two ops stay. No gradient goes through.

Products of one input have a known scale each, `wq`'s, `wk`'s and `wv`'s, and what they read can be
rounded once only if these are one. So `..._fp8` takes all of them, and looks at each call, and so
when it is recorded, whether they are the same memory: `fg.ops.lay_side_by_side(params)` makes equal
ones so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fngraph.ops.fp8 import CAPABILITY, FP8, quantize_fp8, quantize_fp8_rows
from fngraph.ops.fused import define_fused, plain_add_rms_norm, plain_rms_norm, plain_silu_mul
from fngraph.ops.side_by_side import the_scale

Rows = tuple[Tensor, Tensor]  # values (..., K) float8_e4m3fn, scales (..., 1) float32


def _rms_norm(x: Tensor, weight: Tensor, eps: float, centred: bool, scales: list[Tensor]) -> Tensor:
    return quantize_fp8(plain_rms_norm(x, weight, eps, centred), the_scale(scales))


def _rms_norm_rows(x: Tensor, weight: Tensor, eps: float, centred: bool) -> Rows:
    return quantize_fp8_rows(plain_rms_norm(x, weight, eps, centred))


def _add_rms_norm(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool, scales: list[Tensor]
) -> tuple[Tensor, Tensor]:
    total, normed = plain_add_rms_norm(x, y, weight, eps, centred)
    return total, quantize_fp8(normed, the_scale(scales))


def _add_rms_norm_rows(
    x: Tensor, y: Tensor, weight: Tensor, eps: float, centred: bool
) -> tuple[Tensor, Tensor, Tensor]:
    total, normed = plain_add_rms_norm(x, y, weight, eps, centred)
    return total, *quantize_fp8_rows(normed)


def _silu_mul(gate: Tensor, up: Tensor, scales: list[Tensor]) -> Tensor:
    return quantize_fp8(plain_silu_mul(gate, up), the_scale(scales))


def _silu_mul_rows(gate: Tensor, up: Tensor) -> Rows:
    return quantize_fp8_rows(plain_silu_mul(gate, up))


_NORM = "Tensor weight, float eps, bool centred"
PLAIN: dict[str, tuple[str, Callable[..., Any]]] = {
    "rms_norm_fp8": (f"(Tensor x, {_NORM}, Tensor[] scales) -> Tensor", _rms_norm),
    "rms_norm_fp8_rows": (f"(Tensor x, {_NORM}) -> (Tensor, Tensor)", _rms_norm_rows),
    "add_rms_norm_fp8": (
        f"(Tensor x, Tensor y, {_NORM}, Tensor[] scales) -> (Tensor, Tensor)",
        _add_rms_norm,
    ),
    "add_rms_norm_fp8_rows": (
        f"(Tensor x, Tensor y, {_NORM}) -> (Tensor, Tensor, Tensor)",
        _add_rms_norm_rows,
    ),
    "silu_mul_fp8": ("(Tensor gate, Tensor up, Tensor[] scales) -> Tensor", _silu_mul),
    "silu_mul_fp8_rows": ("(Tensor gate, Tensor up) -> (Tensor, Tensor)", _silu_mul_rows),
}
"""By name in the `fngraph` library: schema, and the ops that it stands for.

Arguments are those of `fngraph.ops.fused.PLAIN`, and `scales` () float32, all one. Results are the
sum, if there is one; the values (..., E) float8_e4m3fn; and in `..._rows` their scales (..., 1)
float32.
"""


def _fake(name: str) -> Callable[..., Any]:
    adds, rows = name.startswith("add_"), name.endswith("_rows")

    def fake(x: Tensor, *_: Any) -> Any:
        made = [x.new_empty(x.shape)] if adds else []
        made.append(x.new_empty(x.shape, dtype=FP8))
        made += [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)] if rows else []
        return tuple(made) if len(made) > 1 else made[0]

    return fake


for _name, (_schema, _plain) in PLAIN.items():
    define_fused(_name, _schema, _plain, _fake(_name), CAPABILITY)
